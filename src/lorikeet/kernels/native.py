"""The fast backend on CPUs: the C++ functions of ``native/``, called with addresses of tensors."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.base import Batch, HeadNorms, LoraDelta, LoraTarget, Weight
from lorikeet.kernels.choose import ChoiceParameters
from lorikeet.kernels.einsum import add_lora_einsum
from lorikeet.kernels.huge_pages import Slabs
from lorikeet.kernels.native_choose import native_choose

DTYPES = (torch.bfloat16, torch.float32)
"""What the native functions compute in."""

_NO_LORA = (0, 0, 0, 0, 0, 0)
_MODULE_NUMBERS = {module: number for number, module in enumerate(LORA_MODULES)}


class PanelWeight(NamedTuple):
    """A weight packed in panels (``native/linear.cpp``), repacked by another ``pack`` when the weight changes."""

    panels: Tensor
    shape: torch.Size


class _TargetTable(NamedTuple):
    """Some targets as numbers, int64 ``[3, targets]``."""

    targets: Sequence[LoraTarget]
    numbers: Tensor


class NativeKernels:
    """See ``kernels.base.Kernels`` for what each method computes.

    Args:
        instruction_set: what the library was built for; it becomes part of the name.
        library: see ``kernels.library``.
    """

    def __init__(self, instruction_set: str, library: ctypes.CDLL) -> None:
        self.name = f"native ({instruction_set})"
        self._threads = torch.get_num_threads()
        self._library = library
        self._slabs = Slabs()
        self._tables: dict[int, _TargetTable] = {}

    @property
    def threads(self) -> int:
        """Of the native functions, and of torch, which computes the little that is left."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads = threads
        torch.set_num_threads(threads)

    def pack(self, weight: Tensor) -> Weight:
        """Reorder into panels, which one row reads at the speed of memory and many rows multiply without shuffles."""
        outputs, inputs = weight.shape
        item_bytes = weight.element_size()
        elements = self._library.lorikeet_packed_elements(outputs, inputs, item_bytes)
        panels = self._slabs.allocate(elements, weight.dtype)
        plain = weight.contiguous()
        self._library.lorikeet_pack(plain.data_ptr(), panels.data_ptr(), outputs, inputs, item_bytes, self._threads)
        return PanelWeight(panels, weight.shape)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, ahead: LoraDelta | None = None) -> Tensor:
        """One function for any number of rows."""
        assert isinstance(weight, PanelWeight)
        outputs, inputs = weight.shape
        rows = x.shape[0]
        out = x.new_empty((rows, outputs))
        self._library.lorikeet_linear(
            x.data_ptr(),
            x.stride(0),
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            outputs,
            rows,
            inputs,
            outputs,
            x.element_size(),
            self._threads,
            *(_NO_LORA if ahead is None else self._lora_numbers(ahead)),
        )
        return out

    def add_lora(self, out: Tensor, x: Tensor, delta: LoraDelta) -> None:
        """Read in place, the modules of one input together; einsums are torch's."""
        lora, layer, targets = delta
        if lora.form is KernelForm.EINSUM:
            return add_lora_einsum(out, x, delta)
        modules, columns, outputs = self._addresses_of(targets)
        self._library.lorikeet_lora(
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            x.shape[1],
            lora.table.data_ptr(),
            len(lora.segments),
            layer,
            modules,
            columns,
            outputs,
            len(targets),
            lora.largest_rank if lora.form is KernelForm.PADDED else 0,
            x.element_size(),
            self._threads,
        )

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """One pass."""
        rows, hidden = x.shape
        out = torch.empty_like(x)
        self._library.lorikeet_add_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            hidden,
            eps,
            x.element_size(),
            self._threads,
        )
        return out

    def rotary_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch, norms: HeadNorms | None
    ) -> None:
        """One pass."""
        _, _, block_tokens, kv_heads, head_dim = kv.shape
        rows, columns = qkv.shape
        self._library.lorikeet_rotary_store(
            qkv.data_ptr(),
            columns,
            columns // head_dim - 2 * kv_heads,
            kv_heads,
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            0.0 if norms is None else norms.eps,
            kv.data_ptr(),
            kv.stride(0),
            block_tokens,
            batch.slot_blocks.data_ptr(),
            batch.slot_offsets.data_ptr(),
            rows,
            qkv.element_size(),
            self._threads,
        )

    def attention(self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Decodes and prefills in one call."""
        _, _, block_tokens, kv_heads, head_dim = kv.shape
        rows, columns = qkv.shape
        heads = columns // head_dim - 2 * kv_heads
        out = qkv.new_empty((rows, heads * head_dim))
        self._library.lorikeet_attention(
            qkv.data_ptr(),
            columns,
            kv.data_ptr(),
            kv.stride(0),
            out.data_ptr(),
            heads * head_dim,
            batch.row_starts.data_ptr(),
            batch.contexts.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.shape[1],
            len(batch.contexts),
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            scale,
            window or 0,
            qkv.element_size(),
            self._threads,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """One pass."""
        rows, columns = gate_up.shape
        out = gate_up.new_empty((rows, columns // 2))
        self._library.lorikeet_silu_mul(
            gate_up.data_ptr(), out.data_ptr(), rows, columns // 2, gate_up.element_size(), self.threads
        )
        return out

    def choose(self, logits: Tensor, parameters: ChoiceParameters) -> Tensor:
        """Nothing is sorted; threads share the rows."""
        return native_choose(self._library, logits, parameters, self._threads)

    def _lora_numbers(self, delta: LoraDelta) -> tuple[int, int, int, int, int, int]:
        """Return a delta as the native product wants it; nothing of it for einsums, which copy weights first."""
        lora, layer, targets = delta
        if lora.form is KernelForm.EINSUM:
            return _NO_LORA
        modules, _, outputs = self._addresses_of(targets)
        return lora.table.data_ptr(), len(lora.segments), layer, modules, outputs, len(targets)

    def _addresses_of(self, targets: Sequence[LoraTarget]) -> tuple[int, int, int]:
        """Return where the numbers of the modules, their columns and their outputs lie, int64 each.

        Tables are kept by identity: a decoder has four tuples, and hashing them takes as long as a small kernel.
        """
        known = self._tables.get(id(targets))
        if known is None or known.targets is not targets:
            rows = [(_MODULE_NUMBERS[target.module], target.column, target.outputs) for target in targets]
            known = self._tables[id(targets)] = _TargetTable(
                targets, torch.tensor(rows, dtype=torch.int64).T.contiguous()
            )
        first = known.numbers.data_ptr()
        step = 8 * len(targets)
        return first, first + step, first + 2 * step
