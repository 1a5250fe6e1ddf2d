"""The interface of a kernel backend, and the batch and the layer weights that it computes on."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.tensors import to_device

LONG_TOKENS = 8192
"""A context that may be longer is worth more programs, whoever shares its step; graphs for such are others."""


class BatchPart(NamedTuple):
    """Some sequences of a batch.

    Attributes:
        numbers: int64 on the device, which of the batch's they are; None: all of them.
        sequences: how many they are.
        most_rows: of any of them, at most.
        longest: context of any of them, at most; None if nobody knows before the device does.
    """

    numbers: Tensor | None
    sequences: int
    most_rows: int
    longest: int | None


def split_batch(row_starts: Tensor, contexts: Tensor, device: torch.device) -> tuple[BatchPart, ...]:
    """Part a batch of which the host knows this; the numbers are sent to the device, which is not waited for."""
    rows = row_starts.diff()
    ones = int((rows == 1).sum())
    if not len(rows):
        return ()
    if ones in (0, len(rows)):
        return (BatchPart(None, len(rows), int(rows.amax()), int(contexts.amax())),)
    order = (rows != 1).argsort(stable=True)
    numbers, ordered = to_device(order, device), contexts[order]
    return (
        BatchPart(numbers[:ones], ones, 1, int(ordered[:ones].amax())),
        BatchPart(numbers[ones:], len(rows) - ones, int(rows.amax()), int(ordered[ones:].amax())),
    )


Segment = tuple[int, int, int, int]
"""First row, the row after the last, address of the table of its adapter's weights, address of their index."""

MOST_ROWS = 64
"""Of a segment in a table on a device: a launch has as many programs for each as the longest has work for."""


def cut_segments(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Cut segments of more than ``most`` rows."""
    return [
        (start, min(stop, start + most), table, index)
        for first, stop, table, index in segments
        for start in range(first, stop, most)
    ]


LoraPieces = Mapping[tuple[int, str], tuple[tuple[Tensor, Tensor], ...]]
"""(layer, module) → pieces (A rows ``[r, in]``, Bᵀ rows ``[r, out]``), views into pool blocks; scaling is in B."""


class LoraWeights:
    """Where one adapter's weights lie.

    Args:
        pieces: as tensors.
        layers: of the model.

    Attributes:
        rank: the largest of any module on any layer.
        modules: those it touches.
        table: int64 ``[pieces, 3]``, the pieces as numbers: address of the A rows, address of the Bᵀ rows, how many.
            Ordered by layer, then module as in ``LORA_MODULES``.
        index: int64 ``[layers * modules + 1]``, the first piece of each (layer, module).
    """

    def __init__(self, pieces: LoraPieces, layers: int) -> None:
        rows: list[tuple[int, int, int]] = []
        index, rank = [0], 0
        for layer in range(layers):
            for module in LORA_MODULES:
                found = pieces.get((layer, module), ())
                rows.extend((a.data_ptr(), bt.data_ptr(), len(a)) for a, bt in found)
                index.append(len(rows))
                rank = max(rank, sum(len(a) for a, _ in found))
        self.rank = rank
        self.modules = frozenset(module for _, module in pieces)
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        self.index = torch.tensor(index, dtype=torch.int64)
        self._make_pieces: Callable[[], LoraPieces] = lambda: pieces
        self._on_device: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_table(
        cls, rank: int, modules: frozenset[str], table: Tensor, index: Tensor, make_pieces: Callable[[], LoraPieces]
    ) -> "LoraWeights":
        """Make one of numbers: tensors of hundreds of pieces take milliseconds, and native kernels need none."""
        made = cls.__new__(cls)
        made.rank, made.modules, made.table, made.index = rank, modules, table, index
        made._make_pieces, made._on_device = make_pieces, None
        return made

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all addresses are multiples of 16 bytes."""
        return not bool((self.table[:, :2] & 15).any())

    @cached_property
    def pieces(self) -> LoraPieces:
        """As tensors."""
        return self._make_pieces()

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return table and index where kernels on a device can read them; copied once."""
        if device.type == "cpu":
            return self.table, self.index
        if self._on_device is None:
            self._on_device = to_device(self.table, device), to_device(self.index, device)
        return self._on_device


class LoraSegment(NamedTuple):
    """Rows ``start`` to ``stop`` (half-open) of the batch run under one adapter."""

    start: int
    stop: int
    weights: LoraWeights


class LoraTarget(NamedTuple):
    """A module whose output begins at ``column`` of a fused product and has ``outputs`` columns."""

    module: str
    column: int
    outputs: int


class LoraTargets:
    """The modules of one product: those that read the same input.

    Attributes:
        each: what was given.
        modules: their names.
        numbers: int64 ``[1 + 3 * targets]``: how many, then of each its place in ``LORA_MODULES``, column, outputs.
        are_even: whether all columns and outputs are multiples of 16.
    """

    def __init__(self, *targets: LoraTarget) -> None:
        self.each = targets
        self.modules = frozenset(target.module for target in targets)
        rows = ((LORA_MODULES.index(module), column, outputs) for module, column, outputs in targets)
        self.numbers = torch.tensor([len(targets), *chain.from_iterable(rows)], dtype=torch.int64)
        self.are_even = not any(target.column % 16 or target.outputs % 16 for target in targets)
        self._on_device: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`numbers` where kernels on a device can read them; copied once."""
        if self._on_device is None:
            self._on_device = to_device(self.numbers, device)
        return self._on_device


class LoraBatch:
    """The adapters of one step.

    Attributes:
        segments: disjoint, in row order.
        form: how mixed ranks are computed.
        modules: those that any of the adapters touches, on any layer.
        largest_rank: what a ``padded`` batch pads to.
        segment_rows: rows of the longest segment.
    """

    def __init__(self, segments: Sequence[LoraSegment], form: KernelForm = KernelForm.UNPADDED) -> None:
        self.segments = tuple(segments)
        self.form = form
        self.modules = frozenset[str]().union(*(segment.weights.modules for segment in segments))
        self.segment_rows = max((segment.stop - segment.start for segment in segments), default=0)
        self.largest_rank = max((segment.weights.rank for segment in segments), default=0)
        self._on_device: Tensor | None = None

    @cached_property
    def table(self) -> Tensor:
        """Int64 ``[segments, 4]``: start, stop, address of the weights' table, address of their index; on the host."""
        rows = [(s.start, s.stop, s.weights.table.data_ptr(), s.weights.index.data_ptr()) for s in self.segments]
        return torch.tensor(rows, dtype=torch.int64)

    @cached_property
    def numbers(self) -> Tensor:
        """Int64 ``[3]``: address of the table, segments, and the rank to pad to, 0 if none."""
        padded_rank = self.largest_rank if self.form is KernelForm.PADDED else 0
        return torch.tensor([self.table.data_ptr(), len(self.segments), padded_rank], dtype=torch.int64)

    @classmethod
    def from_table(
        cls,
        table: Tensor,
        form: KernelForm,
        modules: frozenset[str],
        largest_rank: int,
        segment_rows: int,
        *,
        is_aligned: bool,
    ) -> "LoraBatch":
        """Make one for kernels that read nothing but the table, whose content may change from one replay to another.

        Args:
            table: as :meth:`on` returns it; segments without rows are none.
            form: how mixed ranks are computed, but not ``EINSUM``.
            modules: those that any adapter which ever stands in the table touches.
            largest_rank: of any of these adapters; of ``PADDED`` ones, that to which all are padded.
            segment_rows: of any segment that ever stands in the table, at most.
            is_aligned: whether all weights that they name lie at multiples of 16 bytes.
        """
        made = cls((), form)
        made.segment_rows, made.is_aligned = segment_rows, is_aligned
        made.modules, made._on_device, made.largest_rank = modules, table, largest_rank
        return made

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all weights lie at multiples of 16 bytes."""
        return all(segment.weights.is_aligned for segment in self.segments)

    def touches(self, targets: LoraTargets) -> bool:
        """Whether any of the adapters changes any of these modules, on any layer."""
        return not self.modules.isdisjoint(targets.modules)

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`table` where kernels on a device can read it and what it names; cut and copied once."""
        if self._on_device is None:
            rows = cut_segments(self.rows_on(device), MOST_ROWS)
            self._on_device = to_device(torch.tensor(rows, dtype=torch.int64).view(-1, 4), device)
        return self._on_device

    def rows_on(self, device: torch.device) -> list[Segment]:
        """Return the rows of :attr:`table`; what they name can be read on the device."""
        found = [(segment, *segment.weights.on(device)) for segment in self.segments]
        return [(s.start, s.stop, table.data_ptr(), index.data_ptr()) for s, table, index in found]

    def of_rows(self, rows: Sequence[int]) -> "LoraBatch | None":
        """Return the adapters of a batch that consists of ``presets`` of this one, None if none of them has any."""
        segments: list[LoraSegment] = []
        for row, was in enumerate(rows):
            place = bisect_right(self.segments, was, key=lambda segment: segment.start) - 1
            if place < 0 or was >= (own := self.segments[place]).stop:
                continue
            if segments and segments[-1].weights is own.weights and segments[-1].stop == row:
                segments[-1] = segments[-1]._replace(stop=row + 1)
            else:
                segments.append(LoraSegment(row, row + 1, own.weights))
        return LoraBatch(segments, self.form) if segments else None


class LoraDelta(NamedTuple):
    """What the adapters of a batch do to some modules of a layer."""

    lora: LoraBatch
    layer: int
    targets: LoraTargets


class Assist(Protocol):
    """What the executor does while q, k and v are computed, for adapters that are not all on the device."""

    def begin(self, layer: int, x: Tensor) -> LoraBatch | None:
        """Begin to compute what some adapters add, elsewhere; return the others, None if there are none.

        Args:
            layer: of the model; called for each in turn.
            x: ``[T, hidden]``, what q, k and v are computed of.
        """
        ...

    def finish(self, qkv: Tensor) -> None:
        """Add what was computed elsewhere to ``qkv [T, (heads + 2 * kv_heads) * head_dim]``, changed in place."""
        ...


class HostFacts(NamedTuple):
    """What the host knows of a batch, so that nobody has to ask the device: the same as in ``Batch``."""

    row_starts: Tensor
    contexts: Tensor
    block_tables: Tensor
    sample_rows: Tensor


@dataclass(frozen=True)
class Batch:
    """One step's metadata, built once per step.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``.
        slot_blocks: int64 ``[T]``, block that receives the row's KV. Kernels that fit graphs store nothing for -1.
        slot_offsets: int64 ``[T]``, token index inside that block.
        row_starts: int64 ``[n + 1]``; sequence i computes rows ``row_starts[i]`` to ``row_starts[i + 1]``.
        contexts: int64 ``[n]``, tokens in a sequence's KV with the step's own; its last row is at ``contexts[i] - 1``.
        block_tables: int64 ``[n, N]``, padded with block 0.
        sample_rows: int64 ``[S]``, rows whose logits are wanted, each once; in row order if it is all of them.
        lora: the adapters, None if no row has one.
        assist: for adapters of ``lora`` that change q, k and v alone and are not all on the device; None if all are.
        host: what the host knows of it; None for a step of a graph.
    """

    token_ids: Tensor
    positions: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    row_starts: Tensor
    contexts: Tensor
    block_tables: Tensor
    sample_rows: Tensor
    lora: LoraBatch | None = None
    assist: Assist | None = None
    host: HostFacts | None = None

    @cached_property
    def parts(self) -> tuple[BatchPart, ...]:
        """Its sequences of one row, and those of more; of a graph's step all of them, as the host knows nothing."""
        if self.host is None:
            return (BatchPart(None, len(self.contexts), len(self.token_ids) - len(self.contexts) + 1, None),)
        return split_batch(self.host.row_starts, self.host.contexts, self.contexts.device)

    @cached_property
    def sample_lora(self) -> LoraBatch | None:
        """The adapters of the sample rows alone."""
        if self.lora is None or len(self.sample_rows) == len(self.token_ids):
            return self.lora
        rows = self.sample_rows if self.host is None else self.host.sample_rows
        return self.lora.of_rows(rows.tolist())


class PackedWeight(Protocol):
    """A linear weight in a backend's own layout."""

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        ...


Weight = Tensor | PackedWeight
"""What ``Kernels.pack`` returns."""


class Kernels(Protocol):
    """One backend. Arguments are never changed unless the docstring says so."""

    name: str
    threads: int
    """Of every call; whoever owns the backend may change it between calls."""
    fits_graphs: bool
    """Whether calls can be captured once and replayed: none waits for the device, but for adapters as einsums."""

    def apart(self, cores: Sequence[int]) -> AbstractContextManager[None]:
        """Return what, while entered, keeps each of the threads on one of as many cores; later all may run on any."""
        ...

    def pack(self, weight: Tensor) -> Weight:
        """Return ``weight [out, in]`` in the layout that :meth:`linear` wants, the tensor itself if that is plain."""
        ...

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Let ``packed`` hold ``weight``, of the shape and dtype that it was packed from, where it lies."""
        ...

    def layers_in_one_call(self, weights: Sequence["LayerWeights"], shape: "LayersShape") -> "Layers | None":
        """Return what computes a decoder's layers in one call, to the same bits as kernel by kernel, or None."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """``x [T, in] @ weight [out, in]ᵀ + bias [out]``; rows of ``x`` are contiguous.

        With a ``delta``, ``x[rows] @ Aᵀ @ Bᵀ`` is added in columns ``[column, column + outputs)`` for each segment and
        target. Segments whose adapter leaves (layer, module) alone are skipped. Ranks may differ.
        """
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta`` to ``x`` in place, if there is one; return the RMS norm of the sum times ``weight``.

        Both are ``[T, hidden]``; the norm is computed in fp32.
        """
        ...

    def rotary_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch, norms: "HeadNorms | None"
    ) -> None:
        """Rotate the queries in ``qkv`` in place; write rotated keys, and values, into ``kv`` at the batch's slots.

        Args:
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``, changed; its keys are of no use afterwards.
            cos, sin: ``[T, head_dim]`` (halves, as in Llama).
            kv: this layer's view of the arena, ``[blocks, 2, block_size, kv_heads, head_dim]``, changed.
            batch: the step.
            norms: RMS norms over each head before it is rotated, or None.
        """
        ...

    def attention(self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Causal attention of the queries in ``qkv`` over the paged ``kv``; grouped heads.

        ``window`` limits a token to the ``window`` latest positions, its own included.
        Returns ``[T, heads * head_dim]``.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``gate_up [T, 2 * n]``; returns ``[T, n]``."""
        ...

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Choose one token per row of ``logits [S, vocab]``; see ``kernels.choose.choose``."""
        ...


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys, ``[head_dim]`` each (Qwen3)."""

    q: Tensor
    k: Tensor
    eps: float


def kv_view(arena: Tensor, layers: int, block_size: int, kv_heads: int, head_dim: int) -> Tensor:
    """See ``arena [blocks, elements]`` as ``[layers, blocks, 2, block_size, kv_heads, head_dim]`` without a copy."""
    blocks = arena.shape[0]
    return arena.view(blocks, layers, 2, block_size, kv_heads, head_dim).transpose(0, 1)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; ``None`` where the model has no such tensor.

    Linear weights are ``[out, in]``, plain as they are loaded or packed by ``Kernels.pack``.

    Attributes:
        input_norm, post_norm: ``[hidden]``, before attention and before the MLP.
        qkv, qkv_bias: queries, keys and values, one below the other.
        q_norm, k_norm: ``[head_dim]``.
        o, o_bias: split by input; the bias is held by rank 0 alone, since partial products are summed.
        gate_up, gate_up_bias: gate, and up below it.
        down, down_bias: as ``o``.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class LayersShape(NamedTuple):
    """What the weights of layers do not tell.

    Attributes:
        heads, kv_heads, head_dim: of attention.
        eps: of all norms.
        scale: of attention's scores.
        windows: of each layer; None where a token sees all before it.
        targets: what adapters change, of q, k and v, of o, of gate and up, and of down.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    windows: tuple[int | None, ...]
    targets: tuple[LoraTargets, ...]


Layers = Callable[[Tensor, Tensor, Tensor, Tensor, Batch], tuple[Tensor, Tensor]]
"""Computes the layers of a batch that :func:`fits_one_call`.

Arguments are x ``[T, hidden]``, changed, cos and sin ``[T, head_dim]``, the arena as ``kernels.base.kv_view`` shows it,
changed, and the batch. Of its sample rows it returns x before the last layer's MLP is added, and what that adds, both
``[S, hidden]``.
"""


def fits_one_call(batch: Batch) -> bool:
    """Whether nothing in the batch has to be done between kernels."""
    return batch.assist is None and (batch.lora is None or batch.lora.form is not KernelForm.EINSUM)
