"""The Triton backend with the attention of FlashInfer (Ye et al., MLSys 2025).

FlashInfer makes a plan on the host for each step, which all layers use. Our blocks hold all layers. FlashInfer supports
such blocks as strided pages (its pull request 513). Steps in a graph run without the host, so they use Triton's
attention.
"""

from typing import Any, NamedTuple

import flashinfer
import torch
from torch import Tensor

from lorikeet.kernels.interface import Batch, HostMetadata
from lorikeet.kernels.triton.kernels import TritonKernels

WORKSPACE_BYTES = 384 * 2**20
"""Workspace for results of splits. With less, FlashInfer refuses large prefills on large devices."""


class _Planned(NamedTuple):
    wrapper: Any
    batch: Batch
    scale: float
    softcap: float


class FlashInferKernels(TritonKernels):
    """Triton kernels with FlashInfer's attention.

    Implements ``kernels.interface.Kernels``.

    Args:
        device: a GPU.
    """

    name = "triton with flashinfer"

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[int | None, _Planned] = {}

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Compute attention with FlashInfer's plan for this step and window, or with Triton in a graph."""
        if batch.host is None:
            return super().attention(qkv, kv, batch, scale, window, softcap)
        block_size, kv_heads, head_dim = kv.shape[2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        planned = self._planned.get(window)
        if planned is None or planned.batch is not batch or (planned.scale, planned.softcap) != (scale, softcap):
            wrapper = self._wrapper() if planned is None else planned.wrapper
            tables = page_tables(batch.host, block_size)
            wrapper.plan(
                *(tables._replace(pages=tables.pages.to(qkv.device))),
                num_qo_heads=heads,
                num_kv_heads=kv_heads,
                head_dim_qk=head_dim,
                page_size=block_size,
                causal=True,
                sm_scale=scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=softcap or None,
                q_data_type=qkv.dtype,
                kv_data_type=kv.dtype,
            )
            planned = self._planned[window] = _Planned(wrapper, batch, scale, softcap)
        queries = qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        found: Tensor = planned.wrapper.run(queries, kv)
        return found.flatten(1)

    def _wrapper(self) -> Any:
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="NHD")


class PageTables(NamedTuple):
    """The arguments of a FlashInfer plan that describe a step, in FlashInfer's order, int32.

    Attributes:
        row_starts: ``[n + 1]``.
        page_starts: ``[n + 1]``, start of each sequence's pages in ``pages``.
        pages: the used blocks of all sequences, concatenated.
        last_page_tokens: ``[n]``, number of tokens in each sequence's last block.
    """

    row_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_page_tokens: Tensor


def page_tables(host: HostMetadata, block_size: int) -> PageTables:
    """Return the tables of a batch, on the host."""
    counts = (host.contexts + block_size - 1) // block_size
    is_page = torch.arange(host.block_tables.shape[1]) < counts[:, None]
    page_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    last = host.contexts - (counts - 1) * block_size
    return PageTables(*(each.int() for each in (host.row_starts, page_starts, host.block_tables[is_page], last)))
