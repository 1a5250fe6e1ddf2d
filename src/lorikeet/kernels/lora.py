"""The LoRA adapters of a batch: weights in arena blocks, rows, and the tables of addresses that kernels read."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.devices import to_device
from lorikeet.kernels.extra_weights import ExtraWeights
from lorikeet.kernels.native_records import AdaptersRecord, ExtrasRecord

Segment = tuple[int, int, int, int]
"""First row, row after the last, address of the adapter's piece table, address of its piece index."""


MAX_SEGMENT_ROWS = 64
"""Longest segment in a table on a device. A launch has as many programs per segment as the longest one needs."""


def split_segments(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Split segments of more than ``most`` rows."""
    return [
        (start, min(stop, start + most), table, index)
        for first, stop, table, index in segments
        for start in range(first, stop, most)
    ]


LoraPieces = Mapping[tuple[int, str], tuple[tuple[Tensor, Tensor], ...]]
"""(layer, module) → pieces (A rows ``[r, in]``, Bᵀ rows ``[r, out]``), views into pool blocks; scaling is in B."""


class LoraWeights:
    """The weights of one adapter, as views into arena blocks and as a table of addresses.

    Args:
        pieces: the views.
        layers: number of layers of the model.
        modules: all modules of a layer, in packing order.

    Attributes:
        rank: the largest rank of any module on any layer.
        modules: modules that the adapter changes.
        extras: the tensors of the adapter besides A and B; None if there are none.
        table: int64 ``[pieces, 3]``: address of the A rows, address of the Bᵀ rows, number of rows. Pieces are ordered
            by layer, then by module in the geometry's order.
        index: int64 ``[layers * slots + 1]``, the first piece of each (layer, module). See ``LoraTargets`` for slots.
        score: rows of the score head, together ``[labels, hidden]``; empty without a head.
        bits: 8 if A and Bᵀ are stored as codes, with the scales of a piece before its A
            (``memory.packing.write_pieces``); 0 if they are stored in the dtype. ``pieces`` always have the dtype.
    """

    score: tuple[Tensor, ...] = ()
    bits = 0

    def __init__(self, pieces: LoraPieces, layers: int, modules: Sequence[str] = LORA_MODULES) -> None:
        rows: list[tuple[int, int, int]] = []
        index = [0]
        rank = 0
        unused = ("",) * (-len(modules) % len(LORA_MODULES))  # see ``ModelGeometry.module_slots``
        for layer in range(layers):
            for module in (*modules, *unused):
                found = pieces.get((layer, module), ())
                rows.extend((a.data_ptr(), bt.data_ptr(), len(a)) for a, bt in found)
                index.append(len(rows))
                rank = max(rank, sum(len(a) for a, _ in found))
        self.rank = rank
        self.extras: ExtraWeights | None = None
        self.modules = frozenset(module for _, module in pieces)
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        self.index = torch.tensor(index, dtype=torch.int64)
        self._make_pieces: Callable[[], LoraPieces] = lambda: pieces
        self._on_device: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_table(
        cls,
        rank: int,
        modules: frozenset[str],
        table: Tensor,
        index: Tensor,
        make_pieces: Callable[[], LoraPieces],
        *,
        bits: int = 0,
    ) -> "LoraWeights":
        """Create the weights from addresses.

        Views of hundreds of pieces take milliseconds, and native kernels do not need them.
        """
        made = cls.__new__(cls)
        made.rank = rank
        made.modules = modules
        made.table = table
        made.index = index
        made._make_pieces = make_pieces
        made._on_device = None
        made.extras = None
        made.bits = bits
        return made

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all addresses are multiples of 16 bytes."""
        return not bool((self.table[:, :2] & 15).any())

    @cached_property
    def pieces(self) -> LoraPieces:
        """The weights as views, created on first use."""
        return self._make_pieces()

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return table and index on a device. They are copied once."""
        if device.type == "cpu":
            return self.table, self.index
        if self._on_device is None:
            self._on_device = to_device(self.table, device), to_device(self.index, device)
        return self._on_device


class LoraSegment(NamedTuple):
    """Rows ``start`` to ``stop`` (half-open) of the batch, all of one adapter."""

    start: int
    stop: int
    weights: LoraWeights


class ExtrasSegment(NamedTuple):
    """Rows ``start`` to ``stop`` of the batch, whose adapter has extras."""

    start: int
    stop: int
    extras: ExtraWeights


class LoraTarget(NamedTuple):
    """A module whose output begins at ``column`` of a fused product and has ``outputs`` columns."""

    module: str
    column: int
    outputs: int


class LoraTargets:
    """The modules of one fused product, which read the same input.

    Args:
        targets: each module's columns.
        modules: all modules of a layer, in packing order.
        slots: see ``ModelGeometry.module_slots``.

    Attributes:
        each: the targets.
        modules: names of their modules.
        numbers: int64 ``[1 + 3 * targets]``: the number of targets, then each target's index in a layer, column and
            outputs.
        slots: number of entries of one layer in the index of ``LoraWeights``.
        are_aligned: whether all columns and outputs are multiples of 16.
    """

    def __init__(
        self, *targets: LoraTarget, modules: Sequence[str] = LORA_MODULES, slots: int = len(LORA_MODULES)
    ) -> None:
        self.each = targets
        self.modules = frozenset(target.module for target in targets)
        self.slots = slots
        rows = ((modules.index(module), column, outputs) for module, column, outputs in targets)
        self.numbers = torch.tensor([len(targets), *chain.from_iterable(rows)], dtype=torch.int64)
        self.are_aligned = not any(target.column % 16 or target.outputs % 16 for target in targets)
        self._on_device: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`numbers` on a device. They are copied once."""
        if self._on_device is None:
            self._on_device = to_device(self.numbers, device)
        return self._on_device


class LoraBatch:
    """The adapters of one step.

    Attributes:
        segments: disjoint ranges of rows, in row order.
        form: form in which mixed ranks are computed.
        modules: modules that any of the adapters changes on any layer.
        largest_rank: largest rank of the adapters, to which a ``padded`` batch pads.
        segment_rows: number of rows of the longest segment.
    """

    def __init__(self, segments: Sequence[LoraSegment], form: KernelForm = KernelForm.UNPADDED) -> None:
        self.segments = tuple(segments)
        self.form = form
        self.modules = frozenset[str]().union(*(segment.weights.modules for segment in segments))
        self.segment_rows = max((segment.stop - segment.start for segment in segments), default=0)
        self.largest_rank = max((segment.weights.rank for segment in segments), default=0)
        self._on_device: Tensor | None = None
        self._with_kinds: dict[tuple[str, ...], list[ExtrasSegment]] = {}

    @cached_property
    def has_extras(self) -> bool:
        """Whether any of the adapters has more than A and B."""
        return any(segment.weights.extras is not None for segment in self.segments)

    def segments_with(self, *kinds: str) -> list[ExtrasSegment]:
        """Return the segments whose adapters have extras of any of these kinds for linear modules or vectors."""
        if kinds not in self._with_kinds:
            self._with_kinds[kinds] = [
                ExtrasSegment(start, stop, weights.extras)
                for start, stop, weights in self.segments
                if weights.extras is not None and not weights.extras.kinds.isdisjoint(kinds)
            ]
        return self._with_kinds[kinds]

    @property
    def layer_segments(self) -> list[ExtrasSegment]:
        """The segments whose adapters have extras inside layers."""
        return self.segments_with("scale", "shift", "vector", "weight", "input")

    def vocabulary_segments(self, *modules: str) -> list[ExtrasSegment]:
        """Return the segments whose adapters have extras of any of ``modules`` (embedding, head)."""
        return [
            ExtrasSegment(start, stop, weights.extras)
            for start, stop, weights in self.segments
            if weights.extras is not None and not weights.extras.vocabulary.isdisjoint(modules)
        ]

    @cached_property
    def extras_record(self) -> ExtrasRecord | None:
        """The changes to linear modules and norms besides LoRA, for native kernels; None without such changes."""
        rows = [
            (start, stop, *extras.tables()) for start, stop, extras in self.segments_with("scale", "shift", "vector")
        ]
        if not rows:
            return None
        # The array is kept alive, since the record has its address.
        self._extras_rows = torch.tensor(rows, dtype=torch.int64)
        return ExtrasRecord(segments=self._extras_rows.data_ptr(), count=len(rows))

    @cached_property
    def table(self) -> Tensor:
        """Segments on the host, int64 ``[segments, 4]``: start, stop, addresses of piece table and piece index."""
        rows = [(s.start, s.stop, s.weights.table.data_ptr(), s.weights.index.data_ptr()) for s in self.segments]
        return torch.tensor(rows, dtype=torch.int64)

    @cached_property
    def record(self) -> AdaptersRecord:
        """The adapters as a record for native kernels. All adapters of a batch are stored in the same form."""
        return AdaptersRecord(
            segments=self.table.data_ptr(),
            count=len(self.segments),
            padded_rank=self.largest_rank if self.form is KernelForm.PADDED else 0,
            bits=self.segments[0].weights.bits if self.segments else 0,
        )

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
        """Create a batch for a graph.

        Its kernels read only the table, whose content may change between replays.

        Args:
            table: the result of :meth:`on`. Unused segments have no rows.
            form: form in which mixed ranks are computed. ``EINSUM`` is not supported.
            modules: modules that any adapter in the table may change.
            largest_rank: largest rank of any adapter in the table; with ``PADDED``, the rank to which all are padded.
            segment_rows: maximum number of rows of a segment in the table.
            is_aligned: whether all weights start at multiples of 16 bytes.
        """
        made = cls((), form)
        made.segment_rows = segment_rows
        made.is_aligned = is_aligned
        made.modules = modules
        made._on_device = table
        made.largest_rank = largest_rank
        return made

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all weights start at multiples of 16 bytes."""
        return all(segment.weights.is_aligned for segment in self.segments)

    def changes(self, targets: LoraTargets) -> bool:
        """Return whether any of the adapters changes any of these modules on any layer."""
        return not self.modules.isdisjoint(targets.modules)

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`table` on a device, with the device's addresses and long segments split. It is copied once."""
        if self._on_device is None:
            rows = split_segments(self.rows_on(device), MAX_SEGMENT_ROWS)
            self._on_device = to_device(torch.tensor(rows, dtype=torch.int64).view(-1, 4), device)
        return self._on_device

    def rows_on(self, device: torch.device) -> list[Segment]:
        """Return the rows of :attr:`table` with addresses on a device."""
        found = [(segment, *segment.weights.on(device)) for segment in self.segments]
        return [(s.start, s.stop, table.data_ptr(), index.data_ptr()) for s, table, index in found]

    def select_rows(self, rows: Sequence[int]) -> "LoraBatch | None":
        """Return the adapters for a batch of only these ``rows``; None if no row has an adapter."""
        segments: list[LoraSegment] = []
        for row, old_row in enumerate(rows):
            index = bisect_right(self.segments, old_row, key=lambda segment: segment.start) - 1
            if index < 0 or old_row >= (own := self.segments[index]).stop:
                continue
            if segments and segments[-1].weights is own.weights and segments[-1].stop == row:
                segments[-1] = segments[-1]._replace(stop=row + 1)
            else:
                segments.append(LoraSegment(row, row + 1, own.weights))
        return LoraBatch(segments, self.form) if segments else None


class LoraDelta(NamedTuple):
    """The LoRA delta of a batch for the modules of one fused product on one layer."""

    lora: LoraBatch
    layer: int
    targets: LoraTargets
