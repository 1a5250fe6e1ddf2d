"""The fast backend on CPUs: the C++ functions of ``native/``, called with addresses of tensors."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.base import Batch, HeadNorms, LoraDelta, Weight
from lorikeet.kernels.choose import ChoiceParameters
from lorikeet.kernels.einsum import add_lora_einsum
from lorikeet.kernels.huge_pages import Slabs
from lorikeet.kernels.layers import Layers, LayersShape, LayerWeights
from lorikeet.kernels.native_choose import native_choose
from lorikeet.kernels.native_layers import NativeLayers
from lorikeet.kernels.panels import PanelWeight

DTYPES = (torch.bfloat16, torch.float32)
"""What the native functions compute in."""

_NO_LORA = (0, 0, 0)
"""Instead of address of the adapters, layer and address of the targets."""


class NativeKernels:
    """See ``kernels.base.Kernels`` for what each method computes.

    Args:
        instruction_set: what the library was built for; it becomes part of the name.
        library: see ``kernels.library``.
    """

    fits_graphs = False

    def __init__(self, instruction_set: str, library: ctypes.CDLL) -> None:
        self.name = f"native ({instruction_set})"
        self._threads = torch.get_num_threads()
        self._library = library
        self._slabs = Slabs()

    @property
    def threads(self) -> int:
        """Of the native functions, and of torch, which computes the little that is left."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads = threads
        torch.set_num_threads(threads)

    @contextmanager
    def apart(self, cores: Sequence[int]) -> Iterator[None]:
        """Where the system does not grant a core, the thread runs where it did."""
        threads = self._threads
        places = torch.tensor(cores, dtype=torch.int64)
        assert len(places) == threads
        self._library.lorikeet_place(places.data_ptr(), threads, True)
        try:
            yield
        finally:
            self._library.lorikeet_place(places.data_ptr(), threads, False)

    def pack(self, weight: Tensor) -> Weight:
        """Reorder into panels, which one row reads at the speed of memory and many rows multiply without shuffles."""
        outputs, inputs = weight.shape
        item_bytes = weight.element_size()
        elements = self._library.lorikeet_packed_elements(outputs, inputs, item_bytes)
        packed = PanelWeight(self._slabs.allocate(elements, weight.dtype), weight.shape)
        self.repack(weight, packed)
        return packed

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Write the panels anew."""
        assert isinstance(packed, PanelWeight)
        panels, plain = packed.panels, weight.contiguous()
        if plain.shape != packed.shape or plain.dtype != panels.dtype:
            raise ValueError(f"{list(plain.shape)} of {plain.dtype} in place of {list(packed.shape)} of {panels.dtype}")
        self._library.lorikeet_pack(
            plain.data_ptr(), panels.data_ptr(), *plain.shape, plain.element_size(), self._threads
        )

    def layers_in_one_call(self, weights: Sequence[LayerWeights], shape: LayersShape) -> Layers:
        """All kernels of a step but its first and last, without the interpreter in between."""
        return NativeLayers(self._library, weights, shape, lambda: self._threads)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """One function for any number of rows, and for what adapters add, read in place; einsums are torch's."""
        assert isinstance(weight, PanelWeight)
        rows = x.shape[0]
        out = x.new_empty(rows, weight.outputs)
        numbers = _NO_LORA
        if delta is not None and delta.lora.form is not KernelForm.EINSUM:
            numbers = delta.lora.numbers.data_ptr(), delta.layer, delta.targets.numbers.data_ptr()
        self._library.lorikeet_linear(
            x.data_ptr(),
            x.stride(0),
            weight.address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            self._threads,
            *numbers,
        )
        if delta is not None and numbers is _NO_LORA:
            add_lora_einsum(out, x, delta)
        return out

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
        _, _, block_size, kv_heads, head_dim = kv.shape
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
            block_size,
            batch.slot_blocks.data_ptr(),
            batch.slot_offsets.data_ptr(),
            rows,
            qkv.element_size(),
            self._threads,
        )

    def attention(self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Decodes and prefills in one call."""
        _, _, block_size, kv_heads, head_dim = kv.shape
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
            block_size,
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
