"""The native backend for CPUs, which loads the C++ library for this CPU and calls it with addresses of tensors."""

import ctypes
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.huge_pages import Slabs
from lorikeet.kernels.interface import (
    Batch,
    GroupedProducts,
    GroupProduct,
    HeadNorms,
    Layers,
    LayersShape,
    LayerWeights,
    RecurrenceStates,
    RecurrenceWeights,
    Rotation,
    Weight,
    kv_head_dim,
)
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraTargets
from lorikeet.kernels.native_groups import NativeGroups
from lorikeet.kernels.native_records import (
    LayerRecord,
    LayersStepRecord,
    ModelRecord,
    NativeActivation,
    ProductTargetsRecord,
    RecurrencesRecord,
    WeightRecord,
    differing_record,
)
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.reference import add_lora_einsum
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.states import ANY_STEP, StateSequences

_IS_ARM = platform.machine() in ("aarch64", "arm64")
INSTRUCTION_SETS = ("neonbf16", "neon") if _IS_ARM else ("amx", "avx512bf16", "avx512", "avx2")
"""Those of this machine's architecture, the best first."""

_ADDRESS = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_double
_SIGNATURES = {
    "lorikeet_supported": (),
    "lorikeet_record_bytes": (ctypes.c_char_p,),
    "lorikeet_packed_elements": (_INT,) * 3,
    "lorikeet_pack": (_ADDRESS,) * 2 + (_INT,) * 4,
    "lorikeet_linear": (_ADDRESS, _INT, *(_ADDRESS,) * 3, _INT, _INT, _ADDRESS, _INT, _ADDRESS),
    "lorikeet_linear_groups": (_ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS, _INT),
    "lorikeet_logits": (_ADDRESS, _INT, *(_ADDRESS,) * 2, _INT, _INT),
    "lorikeet_linear_gated": (_ADDRESS, _INT, *(_ADDRESS,) * 3, _INT, _INT),
    "lorikeet_add_norm": (_ADDRESS,) * 4 + (_INT, _INT, _FLOAT, _FLOAT, _INT, _INT),
    "lorikeet_rotary_store": (_ADDRESS, *(_INT,) * 4, *(_ADDRESS,) * 4, _FLOAT, _FLOAT, *(_INT,) * 3, _ADDRESS)
    + (_INT,) * 3
    + (_ADDRESS,) * 2
    + (_INT,) * 3,
    "lorikeet_scale_and_shift": (_ADDRESS, _INT, _ADDRESS, _INT, _ADDRESS, _INT, _INT),
    "lorikeet_silu_mul": (_ADDRESS,) * 2 + (_INT,) * 4,
    "lorikeet_gelu_mul": (_ADDRESS,) * 2 + (_INT,) * 4,
    "lorikeet_attention": (_ADDRESS, _INT, _ADDRESS, _INT, _INT, _ADDRESS, _INT, *(_ADDRESS,) * 3, *(_INT,) * 6)
    + (_FLOAT, _INT) * 2
    + (_INT,) * 2,
    "lorikeet_causal_conv": (_ADDRESS, _INT, *(_ADDRESS,) * 7, *(_INT,) * 7),
    "lorikeet_recurrence": (_ADDRESS, _INT) * 3 + (_ADDRESS,) * 7 + (_INT,) * 5 + (_ADDRESS, *(_INT,) * 3),
    "lorikeet_gated_norm": (_ADDRESS, _INT) * 3 + (_ADDRESS, *(_INT,) * 3, _FLOAT, *(_INT,) * 3),
    "lorikeet_recurrence_gates": (_ADDRESS, _INT) * 2
    + (_ADDRESS, _ADDRESS, _FLOAT, _FLOAT, _ADDRESS, _ADDRESS)
    + (_INT,) * 4,
    "lorikeet_sigmoid_mul": (_ADDRESS,) * 3 + (_INT,) * 3,
    "lorikeet_layers": (_ADDRESS, _ADDRESS, *(_FLOAT,) * 7, _INT),
    "lorikeet_copy": (_ADDRESS, _ADDRESS, _INT, _ADDRESS, _INT, _FLOAT),
    "lorikeet_place": (_ADDRESS, _INT, _INT),
    "lorikeet_choose": (_ADDRESS, *(_INT,) * 4, *(_ADDRESS,) * 7, _INT),
}
_RESULTS = {
    "lorikeet_supported": _INT,
    "lorikeet_record_bytes": _INT,
    "lorikeet_packed_elements": _INT,
    "lorikeet_linear_gated": ctypes.c_bool,
}


class NativeUnavailableError(RuntimeError):
    """Raised when no native library can be used. The message gives the reason."""


def _share_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded visible to the libraries, which are not linked with one.

    torch's wheels for x86-64 do so by themselves, those for ARM do not.
    """
    assert torch.get_num_threads() > 0  # loads the runtime
    loaded = Path("/proc/self/maps")
    if hasattr(ctypes.CDLL(None), "omp_get_thread_num") or not loaded.is_file():
        return
    files = {line.split(maxsplit=5)[-1] for line in loaded.read_text().splitlines()}
    for file in sorted(files):
        if re.match(r"lib[gi]?omp[-.]", Path(file).name):
            ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
            return


@cache
def load_library(instruction_set: str) -> ctypes.CDLL:
    """Load the library built for one of ``INSTRUCTION_SETS`` and declare its functions.

    Raises:
        NativeUnavailableError: the library was not built, does not load, or needs instructions that this CPU lacks.
    """
    path = Path(__file__).parent / f"_cpu_{instruction_set}.so"
    if not path.is_file():
        raise NativeUnavailableError(f"the native module for {instruction_set} was not built with the package")
    _share_openmp()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"the native module does not load: {error}") from error
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise NativeUnavailableError(
                f"the native module for {instruction_set} is of another version: install Lorikeet again"
            ) from None
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    if (record := differing_record(library.lorikeet_record_bytes)) is not None:
        raise NativeUnavailableError(
            f"the native module for {instruction_set} is of another version ({record} differs): install Lorikeet again"
        )
    if not library.lorikeet_supported():
        raise NativeUnavailableError(f"this CPU lacks {instruction_set}")
    return library


def supported_instruction_sets() -> list[str]:
    """Return the ``INSTRUCTION_SETS`` that this machine can run, the best first."""
    found = []
    for name in INSTRUCTION_SETS:
        try:
            load_library(name)
        except NativeUnavailableError:
            continue
        found.append(name)
    return found


def best_library() -> tuple[str, ctypes.CDLL]:
    """Return the best instruction set that this machine can run, and its library.

    Raises:
        NativeUnavailableError: there is no library that can run. The message has the reason for each set.
    """
    reasons = []
    for name in INSTRUCTION_SETS:
        try:
            return name, load_library(name)
        except NativeUnavailableError as error:
            reasons.append(str(error))
    raise NativeUnavailableError("; ".join(dict.fromkeys(reasons)))


class QuantizedPanels(NamedTuple):
    """The parts of a quantised ``PanelWeight`` besides the codes.

    Attributes:
        bits, group, zero: see ``QuantizedWeight``.
        scales, offsets: ``[panels, groups, columns]``.
    """

    bits: int
    group: int
    zero: int
    scales: Tensor
    offsets: Tensor | None


class PanelWeight:
    """A weight packed in panels (``native/panels.h``).

    The address stays the same when the weight changes.

    Args:
        panels: the packed elements or codes.
        shape: ``[out, in]``.
        item_bytes: bytes of an element of products with the weight.
        quantized: the other parts of a quantised weight; None for a plain weight.

    Attributes:
        outputs: number of outputs.
        address: address of the weight's ``WeightRecord``.
    """

    def __init__(
        self, panels: Tensor, shape: torch.Size, item_bytes: int, quantized: QuantizedPanels | None = None
    ) -> None:
        self.shape = shape
        self.outputs = shape[0]
        self.item_bytes = item_bytes
        self.panels = panels
        self.quantized = quantized
        self._record = WeightRecord(
            packed=panels.data_ptr(), inputs=shape[1], outputs=self.outputs, item_bytes=item_bytes
        )
        if quantized is not None:
            self._record.bits = quantized.bits
            self._record.group = quantized.group
            self._record.zero = quantized.zero
            self._record.scales = quantized.scales.data_ptr()
            self._record.offsets = _address(quantized.offsets)
            self._record.scale_bytes = quantized.scales.element_size()
        self.address = self._record.address

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        rest = () if self.quantized is None else (self.quantized.scales, self.quantized.offsets)
        return sum(tensor.nbytes for tensor in (self.panels, *rest) if tensor is not None)


def native_copy(
    library: ctypes.CDLL,
    source: Tensor,
    source_blocks: Sequence[int],
    target: Tensor,
    target_blocks: Sequence[int],
    until_s: float,
) -> None:
    """Copy blocks from one arena to another.

    The copy bypasses the caches, since the blocks are not read again soon.

    Args:
        library: a library from :func:`load_library`.
        source, target: the arenas, ``[blocks, elements]``, contiguous and on the CPU. They must not overlap.
        source_blocks, target_blocks: block indices, of the same number.
        until_s: time, on the monotonic clock, until which the copy yields to all other threads.

    Raises:
        RuntimeError: shapes, dtypes or numbers of blocks differ, or a block does not exist. Nothing is copied.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise RuntimeError(
            f"blocks {list(source.shape[1:])} of {source.dtype} cannot be copied to {list(target.shape[1:])} of "
            f"{target.dtype}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise RuntimeError("only contiguous arenas can be copied")
    if len(source_blocks) != len(target_blocks):
        raise RuntimeError(f"{len(source_blocks)} blocks cannot be copied to {len(target_blocks)}")
    blocks = np.array((source_blocks, target_blocks), dtype=np.int64)
    if blocks.size and (blocks.min() < 0 or (blocks.max(axis=1) >= (len(source), len(target))).any()):
        raise RuntimeError(
            f"blocks cannot be copied: an index is outside of the arenas of {len(source)} and {len(target)} blocks"
        )
    library.lorikeet_copy(
        source.data_ptr(),
        target.data_ptr(),
        source.shape[1] * source.itemsize,
        blocks.ctypes.data,
        len(source_blocks),
        until_s,
    )


def native_choose(library: ctypes.CDLL, logits: Tensor, parameters: SamplingTensors, threads: int) -> Tensor:
    """Sample one token per row, like ``kernels.sampling.choose`` except for rounding at the top-p limit.

    Args:
        library: a library from :func:`load_library`.
        logits: bfloat16 or fp32 ``[S, vocab]`` on the CPU, with contiguous rows.
        parameters: each row's sampling parameters.
        threads: number of threads that share the rows.
    """
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64)
    library.lorikeet_choose(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        logits.element_size(),
        parameters.temperature.data_ptr(),
        parameters.top_k.data_ptr(),
        parameters.top_p.data_ptr(),
        parameters.min_p.data_ptr(),
        parameters.seed.data_ptr(),
        parameters.position.data_ptr(),
        token_ids.data_ptr(),
        threads,
    )
    return token_ids


class NativeLayers:
    """Computes all layers of a decoder in one native call.

    Implements ``kernels.interface.Layers``.

    Args:
        library: a library from :func:`load_library`.
        weights: the packed weights.
        shape: the layers' other parameters.
        threads: function that returns the number of threads of a step.
        one_order: see ``NativeKernels``.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Sequence[LayerWeights],
        shape: LayersShape,
        threads: Callable[[], int],
        *,
        one_order: bool,
    ) -> None:
        self._library = library
        self._weights = weights
        self._shape = shape
        self._threads = threads
        down = weights[0].down
        assert isinstance(down, PanelWeight)
        hidden, inner = down.shape
        places = {True: count(), False: count()}
        rows = zip(weights, shape.windows, shape.rotations, strict=True)
        self._records = (LayerRecord * len(weights))(
            *(_record(layer, window, number, next(places[layer.recurrence is None])) for layer, window, number in rows)
        )
        self._kv_layers = next(places[True])
        self._model = ModelRecord(
            layers=ctypes.addressof(self._records),
            count=len(weights),
            hidden=hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            inner=inner,
            item_bytes=down.item_bytes,
            slots=shape.targets[0].slots,
            rotary_dims=shape.pairs.dims,
            rotates_neighbours=shape.pairs.are_neighbours,
            whole_norms=shape.has_whole_norms,
            one_order=one_order,
            gated_attention=shape.has_gated_attention,
            activation=NativeActivation.of(shape.activation),
        )
        mixed = shape.heads * shape.head_dim
        keys_and_values = 2 * shape.kv_heads * shape.head_dim
        gates = mixed if shape.has_gated_attention else 0
        qkv = mixed + gates + keys_and_values
        ordered = mixed + keys_and_values if gates else 0
        channels = 0
        self._heads = 0
        if rule := shape.recurrence:
            keys, _, values, *_ = rule.widths
            channels = 2 * keys + values
            mixed = max(mixed, values)
            qkv = max(qkv, sum(rule.widths))
            self._heads = rule.value_heads
            self._model.recurrences = RecurrencesRecord(
                is_delta=rule.is_delta,
                key_heads=rule.key_heads,
                heads=rule.value_heads,
                key_dim=rule.key_dim,
                value_dim=rule.value_dim,
                taps=next(len(each.recurrence.conv) for each in weights if each.recurrence is not None),
                group=rule.norm_group,
            )
        self._widths = (hidden, qkv, mixed, hidden, 2 * inner, inner, ordered, gates, channels)
        self._recurrence_targets: tuple[LoraTargets, ...] = rule.targets if rule else ()
        self._all_targets, self._all_recurrence_targets = (
            ProductTargetsRecord(*(targets.numbers.data_ptr() for targets in each))
            for each in (shape.targets, self._recurrence_targets)
        )

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch, states: RecurrenceStates | None
    ) -> tuple[Tensor, Tensor]:
        """Compute all layers of a step. See ``kernels.interface.Layers`` for arguments and results."""
        rows = len(x)
        samples = len(batch.sample_rows)
        normed, qkv, mixed, delta, gate_up, gated, ordered, gates, convolved = [
            x.new_empty(rows, width) for width in self._widths
        ]
        decay, beta = x.new_empty(2, rows, self._heads, dtype=torch.float32)
        assert all(tensor.is_contiguous() for tensor in (x, cos, sin, kv[0, 0]))
        assert len(kv) == self._kv_layers
        assert (states is None) == (self._model.recurrences.heads == 0)
        if states is not None:
            self._model.recurrences.parts = states.conv.shape[2]
        assert kv.dtype in (x.dtype, torch.int8)
        shape = self._shape
        step = LayersStepRecord(
            rows=rows,
            samples=samples,
            sample_rows=batch.sample_rows.data_ptr(),
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            kv=kv.data_ptr(),
            kv_bytes=kv.itemsize,
            layer_stride=kv.stride(0),
            block_stride=kv.stride(1),
            block_tokens=kv.shape[3],
            slot_blocks=batch.slot_blocks.data_ptr(),
            slot_offsets=batch.slot_offsets.data_ptr(),
            row_starts=batch.row_starts.data_ptr(),
            contexts=batch.contexts.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            table_stride=batch.block_tables.shape[1],
            sequences=len(batch.contexts),
            adapters=_adapters(batch.lora),
            sample_adapters=_adapters(batch.sample_lora),
            targets=ProductTargetsRecord(*(_changed(batch.lora, targets) for targets in shape.targets)),
            extras=_extras(batch.lora),
            sample_extras=_extras(batch.sample_lora),
            all_targets=self._all_targets,
            recurrence_targets=ProductTargetsRecord(
                *(_changed(batch.lora, targets) for targets in self._recurrence_targets)
            ),
            all_recurrence_targets=self._all_recurrence_targets,
            states=None if states is None else states.flat.data_ptr(),
            resumed=None if states is None else states.sequences.resumed.data_ptr(),
            conv_offsets=None if states is None else states.conv.data_ptr(),
            state_offsets=None if states is None else states.recurrent.data_ptr(),
            normed=normed.data_ptr(),
            qkv=qkv.data_ptr(),
            mixed=mixed.data_ptr(),
            delta=delta.data_ptr(),
            gate_up=gate_up.data_ptr(),
            gated=gated.data_ptr(),
            ordered=ordered.data_ptr(),
            gates=gates.data_ptr(),
            convolved=convolved.data_ptr(),
            decay=decay.data_ptr(),
            beta=beta.data_ptr(),
        )
        self._library.lorikeet_layers(
            self._model.address,
            step.address,
            shape.eps,
            shape.scale,
            shape.norm_offset,
            shape.softcap,
            *((0.0, *ANY_STEP) if shape.recurrence is None else (shape.recurrence.eps, *shape.recurrence.limits)),
            self._threads(),
        )
        return x[:samples], delta[:samples]


def _record(layer: LayerWeights, window: int | None, rotation: int, place: int) -> LayerRecord:
    own = {} if layer.recurrence is None else layer.recurrence._asdict()
    conv, conv_bias, rates, bias, skip, norm = (_address(own.get(name)) for name in RecurrenceWeights._fields)
    return LayerRecord(
        input_norm=_address(layer.input_norm),
        qkv=_packed(layer.qkv),
        qkv_bias=_address(layer.qkv_bias),
        q_norm=_address(layer.q_norm),
        k_norm=_address(layer.k_norm),
        o=_packed(layer.o),
        o_bias=_address(layer.o_bias),
        attention_norm=_address(layer.attention_norm),
        post_norm=_address(layer.post_norm),
        gate_up=_packed(layer.gate_up),
        gate_up_bias=_address(layer.gate_up_bias),
        down=_packed(layer.down),
        down_bias=_address(layer.down_bias),
        mlp_norm=_address(layer.mlp_norm),
        conv=conv,
        conv_bias=conv_bias,
        rates=rates,
        gate_bias=bias,
        skip=skip,
        gated_norm=norm,
        place=place,
        window=window or 0,
        rotation=rotation,
    )


_TILE_COLUMNS = 32
"""Columns of a panel for the tile unit."""
_TILE_DEPTH = 32
"""Inputs of a tile."""


def _tile_codes(weight: QuantizedWeight, slabs: Slabs) -> Tensor:
    """Return codes of 4 bits in the order of ``native/tile_codes.h``: by panel, step, group of four rows, and input."""
    outputs, inputs = weight.shape
    panels = -(-outputs // _TILE_COLUMNS)
    steps = -(-inputs // _TILE_DEPTH)
    packed = slabs.allocate(panels * steps * _TILE_COLUMNS * _TILE_DEPTH // 2, torch.uint8)
    parts = packed.view(panels, steps, -1).split(_PANELS_AT_ONCE)
    for codes, first in zip(parts, range(0, outputs, _PANELS_AT_ONCE * _TILE_COLUMNS), strict=True):
        levels = weight.rows(slice(first, first + len(codes) * _TILE_COLUMNS)).levels()
        whole = F.pad(levels, (0, steps * _TILE_DEPTH - inputs, 0, len(codes) * _TILE_COLUMNS - len(levels)))
        tiles = whole.view(len(codes), _TILE_COLUMNS, steps, _TILE_DEPTH).transpose(1, 2)
        words = tiles.unflatten(2, (-1, 4))  # The dimension is of groups of four rows.
        nibbles = words[:, :, :, ::2] | words[:, :, :, 1::2] << 4
        codes.view(*nibbles.shape[:3], _TILE_DEPTH, 2).copy_(nibbles.transpose(3, 4))
    return packed


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _sequences(sequences: StateSequences, offsets: Tensor) -> tuple[int, int, int, int, int]:
    """Return the addresses of the sequences' tensors, and the numbers of sequences and of parts of a state."""
    tensors = (sequences.row_starts, sequences.resumed, offsets)
    assert all(each.is_contiguous() and each.dtype == torch.int64 for each in tensors)
    starts, resumed, places = (each.data_ptr() for each in tensors)
    return starts, resumed, places, *offsets.shape


def _packed(weight: Weight) -> int:
    assert isinstance(weight, PanelWeight)
    return weight.address


def _adapters(lora: LoraBatch | None) -> int | None:
    return None if lora is None else lora.record.address


def _changed(lora: LoraBatch | None, targets: LoraTargets) -> int | None:
    """Return the address of ``targets`` if any adapter changes a module in it; else None."""
    return targets.numbers.data_ptr() if lora is not None and lora.changes(targets) else None


def _extras(lora: LoraBatch | None) -> int | None:
    """Return the address of the changes besides LoRA; None without such changes."""
    record = None if lora is None or not lora.has_extras else lora.extras_record
    return None if record is None else record.address


DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that the native functions support."""

_PANELS_AT_ONCE = 64
"""Panels whose norms are computed together; bounds the memory for them."""
_IDENTITY_ROWS = 256
"""Rows of the identity with which a quantised weight is multiplied at once; bounds the memory for them."""

_NO_LORA = (0, 0, 0)
"""Arguments without LoRA, for the address of the adapters, the layer and the address of the targets."""


class NativeKernels:
    """The native backend. ``kernels.interface.Kernels`` documents the methods.

    Args:
        instruction_set: the library's instruction set, which is part of the backend's name.
        library: a library from :func:`load_library`.
        one_order: whether attention sums in the order of a prefill for any number of rows, so that a row's bits do not
            depend on the other rows of its sequence in the step. All other sums have one order in any case.
    """

    fits_graphs = False
    reads_codes = True

    def __init__(self, instruction_set: str, library: ctypes.CDLL, *, one_order: bool = False) -> None:
        self.name = f"native ({instruction_set}{', one order of sums' if one_order else ''})"
        self._one_order = one_order
        self._threads = torch.get_num_threads()
        self._library = library
        self._slabs = Slabs()

    @property
    def threads(self) -> int:
        """Number of threads of the native functions and of torch, which computes the rest."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads = threads
        torch.set_num_threads(threads)

    @contextmanager
    def pin_threads(self, cores: Sequence[int]) -> Iterator[None]:
        """Pin the threads within the context. A thread whose core is not allowed is not moved."""
        threads = self._threads
        places = torch.tensor(cores, dtype=torch.int64)
        assert len(places) == threads
        self._library.lorikeet_place(places.data_ptr(), threads, True)
        try:
            yield
        finally:
            self._library.lorikeet_place(places.data_ptr(), threads, False)

    def pack(self, weight: Tensor | QuantizedWeight, dtype: torch.dtype | None = None) -> Weight:
        """Pack a weight into panels.

        For one row, panels are read at memory bandwidth. For many rows, they need no shuffles.
        """
        if isinstance(weight, QuantizedWeight):
            assert dtype in DTYPES
            return self._pack_quantized(weight, dtype.itemsize)
        outputs, inputs = weight.shape
        item_bytes = weight.element_size()
        elements = self._library.lorikeet_packed_elements(outputs, inputs, item_bytes)
        packed = PanelWeight(self._slabs.allocate(elements, weight.dtype), weight.shape, item_bytes)
        self.repack(weight, packed)
        return packed

    def _pack_quantized(self, weight: QuantizedWeight, item_bytes: int) -> PanelWeight:
        """Pack codes and scales in the order in which :meth:`pack` packs elements."""
        columns = self._library.lorikeet_packed_elements(1, 2, item_bytes) // 2

        def packed(values: Tensor) -> Tensor:  # This turns [out, n, ...] into [panels, n, columns, ...].
            count = -(-len(values) // columns)
            kept = self._slabs.allocate(count * columns * values[0].numel(), values.dtype)
            ordered = kept.view(count, values.shape[1], columns, *values.shape[2:]).transpose(1, 2)
            whole = len(values) // columns
            ordered[:whole].copy_(values[: whole * columns].unflatten(0, (-1, columns)))
            if rest := len(values) % columns:
                ordered[whole, :rest].copy_(values[-rest:])
            return kept

        if weight.bits == 8:
            codes = packed(F.pad(weight.codes, (0, weight.inputs % 2)).unflatten(1, (-1, 2)))
        elif columns == _TILE_COLUMNS:
            codes = _tile_codes(weight, self._slabs)
        else:
            codes = packed(weight.codes)
        offsets = None if weight.offsets is None else packed(weight.offsets)
        quantized = QuantizedPanels(weight.bits, weight.group, weight.zero, packed(weight.scales), offsets)
        return PanelWeight(codes, weight.shape, item_bytes, quantized)

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Overwrite the panels of a weight."""
        assert isinstance(packed, PanelWeight)
        panels = packed.panels
        plain = weight.contiguous()
        if packed.quantized is not None:
            raise ValueError("a quantised weight cannot be overwritten")
        if plain.shape != packed.shape or plain.dtype != panels.dtype:
            raise ValueError(
                f"cannot write {list(plain.shape)} of {plain.dtype} over {list(packed.shape)} of {panels.dtype}"
            )
        self._library.lorikeet_pack(
            plain.data_ptr(), panels.data_ptr(), *plain.shape, plain.element_size(), self._threads
        )

    def layers_in_one_call(self, weights: Sequence[LayerWeights], shape: LayersShape) -> Layers:
        """Return all layers as one call, without the interpreter between kernels."""
        return NativeLayers(self._library, weights, shape, lambda: self._threads, one_order=self._one_order)

    def products_in_one_call(self, products: Sequence[GroupProduct], layer: int) -> GroupedProducts | None:
        """Compute all groups in one native call."""
        return NativeGroups(self._library, products, layer, lambda: self._threads)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Multiply and add the LoRA delta in one call. Einsums run in torch."""
        assert isinstance(weight, PanelWeight)
        assert x.stride(1) == 1
        rows = x.shape[0]
        out = x.new_empty(rows, weight.outputs)
        numbers = _NO_LORA
        if delta is not None and delta.lora.form is not KernelForm.EINSUM:
            # The library expects seven modules in each layer.
            layer = delta.layer * delta.targets.slots // len(LORA_MODULES)
            numbers = (delta.lora.record.address, layer, delta.targets.numbers.data_ptr())
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

    def scale_and_shift(self, out: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> None:
        """Adjust the outputs for all adapters in one call."""
        if lora.extras_record is not None:
            self._library.lorikeet_scale_and_shift(
                out.data_ptr(),
                out.stride(0),
                lora.extras_record.address,
                layer * targets.slots,
                targets.numbers.data_ptr(),
                out.element_size(),
                self._threads,
            )

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """Return fp32 logits, since the sums are fp32 already."""
        assert isinstance(weight, PanelWeight)
        out = x.new_empty(len(x), weight.outputs, dtype=torch.float32)
        self._library.lorikeet_logits(x.data_ptr(), x.stride(0), weight.address, out.data_ptr(), len(x), self._threads)
        return out

    def row_norms(self, weight: Weight) -> Tensor:
        """Compute the norms from the panels. The rows of a quantised weight come from products with the identity."""
        assert isinstance(weight, PanelWeight)
        outputs, inputs = weight.shape
        if weight.quantized is None:
            item_bytes = weight.panels.element_size()
            columns = self._library.lorikeet_packed_elements(1, 2, item_bytes) // 2
            group = self._library.lorikeet_packed_elements(1, 1, item_bytes) // columns
            panels = weight.panels.view(-1, -(-inputs // group), columns, group)
            norms = [torch.linalg.vector_norm(part.float(), dim=(1, 3)) for part in panels.split(_PANELS_AT_ONCE)]
            return torch.cat(norms).flatten()[:outputs]
        dtype = torch.bfloat16 if weight.item_bytes == 2 else torch.float32
        squares = torch.zeros(outputs)
        for first in range(0, inputs, _IDENTITY_ROWS):
            count = min(_IDENTITY_ROWS, inputs - first)
            chosen = torch.zeros(count, inputs, dtype=dtype)
            chosen[:, first : first + count].fill_diagonal_(1)
            squares += self.linear(chosen, weight, None).float().square().sum(0)
        return squares.sqrt()

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Add and normalise in one pass over memory."""
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
            offset,
            x.element_size(),
            self._threads,
        )
        return out

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Normalise, rotate and store in one pass over memory."""
        _, _, block_size, kv_heads, _ = kv.shape
        head_dim = kv_head_dim(kv)
        cos, sin, (dims, are_neighbours) = rotation
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
            0.0 if norms is None else norms.offset,
            norms is not None and norms.is_whole,
            dims,
            are_neighbours,
            kv.data_ptr(),
            kv.itemsize,
            kv.stride(0),
            block_size,
            batch.slot_blocks.data_ptr(),
            batch.slot_offsets.data_ptr(),
            rows,
            qkv.element_size(),
            self._threads,
        )

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Compute decodes and prefills in one call."""
        _, _, block_size, kv_heads, _ = kv.shape
        head_dim = kv_head_dim(kv)
        rows, columns = qkv.shape
        heads = columns // head_dim - 2 * kv_heads
        out = qkv.new_empty((rows, heads * head_dim))
        self._library.lorikeet_attention(
            qkv.data_ptr(),
            columns,
            kv.data_ptr(),
            kv.itemsize,
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
            softcap,
            self._one_order,
            qkv.element_size(),
            self._threads,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Apply the gate in one pass over memory."""
        return self._gated(self._library.lorikeet_silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Apply the gate in one pass over memory."""
        return self._gated(self._library.lorikeet_gelu_mul, gate_up)

    def _gated(self, function: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows, columns = gate_up.shape
        out = gate_up.new_empty((rows, columns // 2))
        function(gate_up.data_ptr(), out.data_ptr(), rows, columns // 2, gate_up.element_size(), self._threads)
        return out

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Convolve all sequences in one call. Threads share the channels."""
        assert x.stride(1) == 1
        assert weight.is_contiguous()
        assert tails.dtype == torch.float32
        out = x.new_empty(x.shape)
        self._library.lorikeet_causal_conv(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            _address(bias),
            tails.data_ptr(),
            out.data_ptr(),
            *_sequences(sequences, offsets),
            x.shape[1],
            len(weight),
            has_silu,
            x.element_size(),
            self._threads,
        )
        return out

    def recurrence(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        skip: Tensor | None = None,
        *,
        is_delta: bool,
    ) -> Tensor:
        """Update the states token by token in one call. Threads share heads and columns of states."""
        assert all(each.stride()[1:] == (each.shape[2], 1) for each in (queries, keys, values))
        assert all(each.is_contiguous() and each.dtype == torch.float32 for each in (decay, beta, states))
        assert skip is None or skip.dtype == torch.float32
        out = values.new_empty(values.shape)
        self._library.lorikeet_recurrence(
            queries.data_ptr(),
            queries.stride(0),
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            decay.data_ptr(),
            beta.data_ptr(),
            _address(skip),
            states.data_ptr(),
            *_sequences(sequences, offsets),
            *keys.shape[1:],
            values.shape[2],
            out.data_ptr(),
            is_delta,
            values.element_size(),
            self._threads,
        )
        return out

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool
    ) -> Tensor:
        """Normalise and gate in one pass over memory."""
        assert x.stride(1) == gate.stride(1) == 1
        rows, columns = x.shape
        out = x.new_empty(x.shape)
        self._library.lorikeet_gated_norm(
            x.data_ptr(),
            x.stride(0),
            gate.data_ptr(),
            gate.stride(0),
            weight.data_ptr(),
            len(weight),
            out.data_ptr(),
            rows,
            columns,
            group,
            eps,
            is_norm_first,
            x.element_size(),
            self._threads,
        )
        return out

    def recurrence_gates(
        self, b: Tensor | None, a: Tensor, rates: Tensor, bias: Tensor, limits: tuple[float, float] = ANY_STEP
    ) -> tuple[Tensor, Tensor]:
        """Compute both gates in one call."""
        assert a.stride(1) == 1
        assert b is None or b.stride(1) == 1
        assert rates.dtype == bias.dtype == torch.float32
        rows, heads = a.shape
        decay, beta = torch.empty(2, rows, heads)
        self._library.lorikeet_recurrence_gates(
            _address(b),
            0 if b is None else b.stride(0),
            a.data_ptr(),
            a.stride(0),
            rates.data_ptr(),
            bias.data_ptr(),
            *limits,
            decay.data_ptr(),
            beta.data_ptr(),
            rows,
            heads,
            a.element_size(),
            self._threads,
        )
        return decay, beta

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply in one pass over memory."""
        assert x.is_contiguous()
        assert gate.is_contiguous()
        out = torch.empty_like(x)
        self._library.lorikeet_sigmoid_mul(
            x.data_ptr(), gate.data_ptr(), out.data_ptr(), x.numel(), x.element_size(), self._threads
        )
        return out

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Sample without sorting. Threads share the rows."""
        return native_choose(self._library, logits, parameters, self._threads)
