"""Calls of FlashInfer's attention. The library needs a GPU, so a stand-in with its documented interface runs here."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.interface import Batch, HostMetadata
from lorikeet.kernels.triton.kernels import TritonKernels
from tests.kernels import attention_cases as attention
from tests.kernels.triton_cases import FEW, shapes

CPU = torch.device("cpu")


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` as its documentation has it, in fp64."""

    made: ClassVar[list["Wrapper"]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = 0
        Wrapper.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(each.dtype == torch.int32 for each in tables)
        assert causal
        self.tables = [each.tolist() for each in tables]
        self.sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.scale = sm_scale
        self.window_left = window_left
        self.cap = logits_soft_cap
        self.dtypes = q_data_type, kv_data_type
        self.plans += 1

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        heads, kv_heads, dim, page = self.sizes
        starts, page_starts, pages, last = self.tables
        assert (q.dtype, paged_kv_cache.dtype) == self.dtypes
        assert q.shape == (starts[-1], heads, dim)
        assert paged_kv_cache.shape[1:] == (2, page, kv_heads, dim)
        out = torch.empty(q.shape, dtype=torch.float64)
        for i, (begin, end) in enumerate(pairwise(starts)):
            own = pages[page_starts[i] : page_starts[i + 1]]
            seen = (len(own) - 1) * page + last[i]
            keys, values = paged_kv_cache[own].double().transpose(0, 1).flatten(1, 2)[:, :seen].unbind()
            keys, values = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (keys, values))
            position = seen - (end - begin) + torch.arange(end - begin)
            behind = position[:, None] - torch.arange(seen)
            hidden = (behind < 0) | ((behind > self.window_left) if self.window_left >= 0 else False)
            score = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * self.scale
            if self.cap is not None:
                score = self.cap * torch.tanh(score / self.cap)
            weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weight, values)
        return out.to(q.dtype)


@pytest.fixture(scope="module")
def kernels() -> Iterator[TritonKernels]:
    library = ModuleType("flashinfer")
    library.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", library)
        patch.delitem(sys.modules, "lorikeet.kernels.triton.flashinfer_attention", raising=False)
        from lorikeet.kernels.triton import flashinfer_attention

        patch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 16)
        yield flashinfer_attention.FlashInferKernels(CPU)
    sys.modules.pop("lorikeet.kernels.triton.flashinfer_attention")


class Paged(attention.Case):
    """KV in a layer of an arena, so that its pages have a stride."""

    def batch(self, *, of_a_graph: bool = False) -> Batch:
        none = torch.zeros(0, dtype=torch.int64)
        rows = torch.zeros(len(self.q), dtype=torch.int64)
        tables = torch.where(self.tables < len(self.kv), self.tables, 0)
        host = None if of_a_graph else HostMetadata(self.row_starts, self.contexts, tables, none)
        return Batch(rows, none, none, none, self.row_starts, self.contexts, tables, none, host=host)

    def run(self, kernels: TritonKernels, batch: Batch, window: int | None = None) -> Tensor:
        arena = torch.stack((torch.full_like(self.kv, torch.nan), self.kv), dim=1)
        qkv = torch.cat((self.q, self.q[:, : (2 * self.shape.kv_heads - 2) * self.shape.head_dim]), dim=1)
        return kernels.attention(qkv, arena[:, 1], batch, self.shape.head_dim**-0.5, window, self.shape.softcap)


@FEW
@given(shapes(), st.integers(0, 100))
def test_flashinfer_attention_equals_torch(kernels: TritonKernels, shape: attention.Shape, seed: int) -> None:
    case = Paged(shape, torch.float32, seed)
    found = case.run(kernels, case.batch(), shape.window or None)
    torch.testing.assert_close(found.double(), case.by_torch(torch.float64), rtol=1e-5, atol=1e-5)


def test_a_step_is_planned_once_for_all_its_layers_of_a_window(kernels: TritonKernels) -> None:
    case = Paged(attention.Shape([(3, 40), (1, 7)]), torch.float32)
    first = case.batch()
    second = case.batch()
    Wrapper.made.clear()
    fresh: TritonKernels = type(kernels)(CPU)  # type: ignore[call-arg]
    for batch, layers in ((first, 3), (second, 2)):
        for _ in range(layers):
            case.run(fresh, batch)
            case.run(fresh, batch, window=5)
    assert [wrapper.plans for wrapper in Wrapper.made] == [2, 2]


def test_a_step_of_a_graph_finds_its_way_on_the_device(kernels: TritonKernels) -> None:
    case = Paged(attention.Shape([(1, 40), (1, 7)]), torch.float32)
    Wrapper.made.clear()
    found = case.run(type(kernels)(CPU), case.batch(of_a_graph=True))  # type: ignore[call-arg]
    torch.testing.assert_close(found, case.by_torch(torch.float32), rtol=1e-4, atol=1e-5)
    assert not Wrapper.made


def test_auto_uses_flashinfer_if_installed_and_reports_why_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setenv("CC", "cc")
    for module in ("flashinfer", "lorikeet.kernels.triton.flashinfer_attention"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert choose_kernels("auto", torch.bfloat16, gpu).name == "triton"
    (tmp_path / "flashinfer.py").write_text("raise ImportError('it is broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="FlashInfer is installed but cannot be used: it is broken; --kernels triton"):
        choose_kernels("auto", torch.bfloat16, gpu)
    assert choose_kernels("triton", torch.bfloat16, gpu).name == "triton"
    assert choose_kernels("auto", torch.float32, gpu).name == "triton"


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and find_spec("flashinfer")), reason="torch sees no GPU, or FlashInfer is missing"
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_the_library_itself_computes_the_same(head_dim: int, window: int | None) -> None:
    gpu = torch.device("cuda")
    case = Paged(attention.Shape([(1, 700), (30, 30), (64, 400)], head_dim=head_dim), torch.bfloat16)
    batch = case.batch()
    placed = ("row_starts", "contexts", "block_tables")
    case.q = case.q.to(gpu)
    case.kv = case.kv.to(gpu)
    there = replace(batch, **{name: getattr(batch, name).to(gpu) for name in placed})
    kernels = choose_kernels("auto", torch.bfloat16, gpu)
    assert isinstance(kernels, TritonKernels)
    assert kernels.name == "triton with flashinfer"
    by_ours = case.run(TritonKernels(), there, window)
    torch.testing.assert_close(case.run(kernels, there, window), by_ours, rtol=2e-2, atol=2e-2)
