"""Norm, rotary embedding, KV store and gating against fp64, by the error that torch makes in the same dtype."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorikeet.kernels.base import Batch, HeadNorms, kv_view
from lorikeet.kernels.native import supported_instruction_sets
from lorikeet.kernels.reference import ReferenceKernels
from tests.kernels.exactness import check_error
from tests.kernels.test_native_linear import DTYPES, kernels

REFERENCE = ReferenceKernels()
instruction_sets = pytest.mark.parametrize("instruction_set", supported_instruction_sets())
dtypes = st.sampled_from(DTYPES)
rows = st.one_of(st.integers(1, 9), st.just(64))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.slow
@instruction_sets
@given(rows, st.one_of(st.integers(1, 70), st.just(1000)), st.booleans(), dtypes)
def test_add_norm(instruction_set: str, rows: int, hidden: int, added: bool, dtype: torch.dtype) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = random(rows, hidden, dtype=dtype, seed=3 * seed), random(hidden, dtype=dtype, seed=3 * seed + 1)
        delta = random(rows, hidden, dtype=dtype, seed=3 * seed + 2) if added else None
        sums = {name: x.clone() for name in ("native", "torch")}
        found = native.add_norm(sums["native"], delta, weight, 1e-5)
        by_torch = REFERENCE.add_norm(sums["torch"], delta, weight, 1e-5)
        assert torch.equal(sums["native"], sums["torch"])
        wide = sums["torch"].double()
        return found, by_torch, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    check_error("add_norm", draw)


@pytest.mark.slow
@instruction_sets
@given(rows, st.one_of(st.integers(1, 70), st.just(1536)), dtypes)
def test_silu_mul(instruction_set: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        gate_up = random(rows, 2 * columns, dtype=dtype, seed=seed) * 4
        return native.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.double())

    check_error("silu_mul", draw)


@instruction_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_what_is_far_out_or_not_a_number(instruction_set: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([-torch.inf, -1e30, -200.0, -90.0, 0.0, 90.0, 1e30, torch.inf, torch.nan], dtype=dtype)
    found = kernels(instruction_set).silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(found[1:8], torch.nn.functional.silu(gate.float()).to(dtype)[1:8])
    assert found[8].isnan()


class Heads:
    """Random queries, keys and values of some rows, and where they go."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, seed: int
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.qkv = random(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=4 * seed)
        angle = random(rows, head_dim, dtype=torch.float32, seed=4 * seed + 1) * 3
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        weights = (random(head_dim, dtype=dtype, seed=4 * seed + i) for i in (2, 3))
        self.norms = HeadNorms(*weights, 1e-5) if normed else None
        none = torch.zeros(0, dtype=torch.int64)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
        self.batch = Batch(none, none, order // 4, order % 4, none, none, none, none)

    def run(self, backend: ReferenceKernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rotated queries, and the arena."""
        blocks = len(self.qkv) // 4 + 1
        arena = torch.zeros(blocks, 2 * 2 * 4 * self.kv_heads * self.head_dim, dtype=dtype)
        kv = kv_view(arena, 2, 4, self.kv_heads, self.head_dim)
        qkv = self.qkv.to(dtype, copy=True)
        norms = self.norms and HeadNorms(self.norms.q.to(dtype), self.norms.k.to(dtype), self.norms.eps)
        backend.rotary_store(qkv, self.cos.to(dtype), self.sin.to(dtype), kv[1], self.batch, norms)
        return qkv[:, : qkv.shape[1] - 2 * self.kv_heads * self.head_dim], arena


@pytest.mark.slow
@instruction_sets
@given(
    rows, st.integers(1, 4), st.integers(1, 3), st.one_of(st.integers(1, 20), st.sampled_from([32, 64])), st.booleans(),
    dtypes,
)  # fmt: skip
def test_rotary_store(
    instruction_set: str, rows: int, group: int, kv_heads: int, half: int, normed: bool, dtype: torch.dtype
) -> None:
    native = kernels(instruction_set)

    def draw(seed: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = Heads(rows, group * kv_heads, kv_heads, 2 * half, normed, dtype, seed)
        found = heads.run(native, dtype)  # type: ignore[arg-type]
        return found[part], heads.run(REFERENCE, dtype)[part], heads.run(_ExactNorms(), torch.float64)[part]

    for part, name in enumerate(("rotary", "store_kv")):
        check_error(name, partial(draw, part=part))


class _ExactNorms(ReferenceKernels):
    """The reference in fp64, its norms too."""

    def rotary_store(self, qkv, cos, sin, kv, batch, norms) -> None:  # type: ignore[no-untyped-def]
        if norms is not None:
            heads = qkv.unflatten(-1, (-1, kv.shape[-1]))
            normed = heads.shape[1] - kv.shape[-2]
            wide = heads[:, :normed] / (heads[:, :normed].square().mean(-1, keepdim=True) + norms.eps).sqrt()
            queries = normed - kv.shape[-2]
            heads[:, :queries] = wide[:, :queries] * norms.q
            heads[:, queries:normed] = wide[:, queries:] * norms.k
        super().rotary_store(qkv, cos, sin, kv, batch, None)
