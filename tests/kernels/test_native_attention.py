"""The native attention against fp64, by the error that torch makes in the same dtype."""

import ctypes
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from lorikeet.kernels.native import load_library, supported_instruction_sets
from tests.kernels.exactness import check_error

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="no native library on this machine")
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Shape:
    """A call: ``sequences`` are (rows, context) each; ``window`` and ``softcap`` 0 are none."""

    sequences: list[tuple[int, int]]
    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0


class Case:
    """Random tensors of a shape. What no row may see is NaN: the tail of the last blocks, and block 0."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = [rows for rows, _ in shape.sequences]
        contexts = [context for _, context in shape.sequences]
        blocks = [-(-context // shape.block_size) for context in contexts]
        numbers = (torch.randperm(sum(blocks), generator=generator) + 1).split(blocks)
        self.shape = shape
        self.heads = shape.kv_heads * shape.group
        self.row_starts = torch.tensor([0, *rows]).cumsum(0)
        self.contexts = torch.tensor(contexts)
        # Padded with a block that is not there.
        self.tables = torch.full((len(blocks), max(blocks) + 1), 1 << 40)
        size = (sum(blocks) + 1, 2, shape.block_size, shape.kv_heads, shape.head_dim)
        self.kv = torch.randn(size, generator=generator).to(dtype)
        self.kv[0] = torch.nan
        for table, mine, context in zip(self.tables, numbers, contexts, strict=True):
            table[: len(mine)] = mine
            if unused := -context % shape.block_size:
                self.kv[mine[-1], :, -unused:] = torch.nan
        # Wider than the queries, as they come with keys and values.
        self.q = torch.randn(sum(rows), (self.heads + 2) * shape.head_dim, generator=generator).to(dtype)

    def native(self, library: ctypes.CDLL, threads: int, *, only: int | None = None) -> Tensor:
        """Return ``[rows, heads * head_dim]``; with ``only`` that of one sequence, alone in the call."""
        shape = self.shape
        first = only or 0
        sequences = len(self.contexts) if only is None else 1
        starts = self.row_starts[first : first + sequences + 1]
        out = self.q.new_full((len(self.q), self.heads * shape.head_dim), torch.nan)
        library.lorikeet_attention(
            self.q.data_ptr(),
            self.q.stride(0),
            self.kv.data_ptr(),
            self.kv.element_size(),
            self.kv.stride(0),
            out.data_ptr(),
            out.stride(0),
            starts.data_ptr(),
            self.contexts[first:].data_ptr(),
            self.tables[first:].data_ptr(),
            self.tables.stride(0),
            sequences,
            self.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.head_dim**-0.5,
            shape.window,
            shape.softcap,
            self.q.element_size(),
            threads,
        )
        return out[starts[0] : starts[-1]]

    def by_torch(self, dtype: torch.dtype) -> Tensor:
        """Return the same, computed by torch in ``dtype``."""
        shape = self.shape
        outputs = []
        for index, (rows, context) in enumerate(shape.sequences):
            start = int(self.row_starts[index])
            table = self.tables[index, : -(-context // shape.block_size)]
            k, v = (self.kv[table, part].flatten(0, 1)[:context].transpose(0, 1).to(dtype) for part in (0, 1))
            q = self.q[start : start + rows, : self.heads * shape.head_dim].unflatten(1, (self.heads, -1))
            position = torch.arange(context)
            distance = position[context - rows :, None] - position
            seen = distance >= 0
            if shape.window:
                seen &= distance < shape.window
            out = self._attended(q.transpose(0, 1).to(dtype), k, v, seen)
            outputs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        if not self.shape.softcap:
            return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)[0]
        k, v = (each.repeat_interleave(self.shape.group, 0) for each in (k, v))
        scores = (q @ k.mT).to(torch.float64 if q.dtype == torch.float64 else torch.float32) * q.shape[-1] ** -0.5
        scores = (torch.tanh(scores / self.shape.softcap) * self.shape.softcap).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).to(q.dtype) @ v


def check(shape: Shape, dtype: torch.dtype, instruction_set: str) -> None:
    """The error is small enough, and the same on one thread."""
    library = load_library(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Case(shape, dtype, seed)
        return case.native(library, 2), case.by_torch(dtype), case.by_torch(torch.float64)

    check_error("attention", draw)
    case = Case(shape, dtype)
    out = case.native(library, 2)
    assert torch.equal(out, case.native(library, 1))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Decodes, prefills and what lies between, on both sides of every size that the kernel cuts at."""
    lengths = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 192, 300]))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(lengths)
        sequences.append((rows, rows + draw(st.one_of(st.just(0), lengths))))
    return Shape(
        sequences,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.one_of(st.sampled_from([16, 32, 64, 80, 128]), st.integers(1, 130))),
        block_size=draw(st.sampled_from([1, 5, 16, 64])),
        window=draw(st.sampled_from([0, 0, 1, 17, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
    )


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@given(shapes(), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_the_error_is_at_most_twice_that_of_torch(instruction_set: str, shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, instruction_set)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_and_prompts(instruction_set: str, dtype: torch.dtype) -> None:
    check(Shape([(1, 5000), (512, 512), (64, 2000), (8, 65)]), dtype, instruction_set)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 80), (3, 64), (7, 128)], ids="group {0[0]}, head_dim {0[1]}".format)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(
    instruction_set: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    library = load_library(instruction_set)
    sequences = [(1, 700), (40, 90), (3, 130), (1, 5), (200, 200), (2, 4200)]
    case = Case(Shape(sequences, group=heads[0], head_dim=heads[1]), dtype)
    together = case.native(library, 2)
    for index in range(len(case.contexts)):
        start, stop = case.row_starts[index : index + 2].tolist()
        assert torch.equal(together[start:stop], case.native(library, 1, only=index))


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("rows", [1, 20])
def test_a_nan_that_is_seen_is_not_hidden(instruction_set: str, rows: int) -> None:
    case = Case(Shape([(rows, 100)]), torch.bfloat16)
    case.kv[case.tables[0, 0], 0, 3] = torch.nan
    assert case.native(load_library(instruction_set), 1).isnan().all()


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("sizes", [(33, 33), (1, 33), (8, 33)], ids="{0[0]} rows".format)
def test_results_do_not_depend_on_earlier_calls(instruction_set: str, sizes: tuple[int, int]) -> None:
    library = load_library(instruction_set)
    case, spoilt = (Case(Shape([shape]), torch.bfloat16) for shape in (sizes, (sizes[0], 128)))
    before = case.native(library, 1)
    spoilt.kv[:] = torch.nan
    spoilt.native(library, 1)
    assert torch.equal(case.native(library, 1), before)
