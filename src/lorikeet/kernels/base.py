"""The kernels' interface and its values.

Batches, LoRA segments and sampling parameters go in; every backend computes the same functions, and the reference
backend in plain torch is what the others are checked against.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.core.geometry import KV_SCALE_BYTES, LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.extras import ExtraWeights
from lorikeet.kernels.quantized import QuantizedWeight

SLOW_HALVES = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
"""Whether torch's half-precision products on this CPU are not vectorised, and many times slower than fp32."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        ValueError: Lorikeet does not support it.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for the copy.

    The source is pinned first. A copy from pageable memory would wait for all earlier work of the device, and would
    deadlock if that work waits for the calling thread, as an assisted prefill does.
    """
    registered = tensor.pin_memory() if device.type == "cuda" else tensor
    return registered.to(device, non_blocking=True)


CANDIDATES = (128, 2048)
"""Top-p sorts only so many of the most likely tokens first; sorting the whole vocabulary is slow and rarely needed."""

GREEDY_BELOW = 1e-5
"""Lower temperatures choose the most likely token; in fp32 the probabilities of others would be 0 anyway."""


class SamplingTensors(NamedTuple):
    """Sampling parameters of each row: contiguous tensors ``[S]`` on the device of the logits.

    Attributes:
        temperature: fp32; below ``GREEDY_BELOW`` the most likely token is chosen.
        top_k: int64; 0 for all.
        top_p: fp32, at most 1; 1 for all.
        min_p: fp32, at most 1; 0 for all.
        seed: int64, the bits of an unsigned 64-bit seed.
        position: int64, of the new token.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    def on(self, device: torch.device) -> "SamplingTensors":
        """Return copies on a device. The host tensors may be changed as soon as this returns."""
        if self.seed.device == device:
            return self
        return SamplingTensors(*(to_device(values, device) for values in self))


def choose(logits: Tensor, parameters: SamplingTensors) -> Tensor:
    """Sample one token per row of ``logits [S, vocab]``, computed in fp32. Ties go to the lowest token id.

    Returns:
        int64 ``[S]`` on the device of the logits; -1 where the largest logit is not finite.
    """
    largest, most_likely = logits.max(dim=-1)
    token_ids = torch.where(torch.isfinite(largest), most_likely, -1)
    for i in torch.nonzero((parameters.temperature >= GREEDY_BELOW) & (token_ids >= 0)).flatten().tolist():
        row = SamplingTensors(*(values[i] for values in parameters))
        token_ids[i] = _draw(logits[i].float(), row)
    return token_ids


def lowest_kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the lowest logit that min-p, top-k and top-p keep, applied in this order. Equal logits are kept together.

    Each filter applies to the tokens that the previous one kept: top-p is the mass among the tokens of top-k. It
    computes one row at a time: torch sums the rows of a batch in another order than a single row, so the last bit of a
    sum would depend on the rest of the batch.

    Args:
        logits: fp32 ``[vocab]``, already divided by the temperature.
        top_k, top_p, min_p: the filters, as of ``SamplingTensors``.

    Returns:
        fp32 scalar, ``-inf`` if nothing is filtered.
    """
    vocab = len(logits)
    lowest = logits.new_tensor(-torch.inf)
    if min_p > 0:
        lowest = logits.max() + math.log(min_p)
    if 0 < top_k < vocab:
        lowest = torch.maximum(lowest, logits.topk(top_k).values[-1])
    if top_p < 1:
        mass = torch.where(logits >= lowest, logits, -torch.inf).logsumexp(dim=-1)
        for width in sorted({min(width, vocab) for width in (*CANDIDATES, vocab)}):
            ordered = logits.topk(width).values
            probabilities = (ordered - mass).exp()
            kept = int((probabilities.cumsum(dim=-1) - probabilities < top_p).sum())
            if kept < width:
                break
        lowest = torch.maximum(lowest, ordered[max(kept, 1) - 1])
    return lowest


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return standard Gumbel noise for tokens at one position: fp32 ``[len(token_ids)]``.

    Each value is a function of (seed, position, token id). ``random_raw`` is the stream that numpy promises not to
    change between versions. The position is in a high word of the counter, as the low word counts the draws.
    """
    generator = np.random.Philox(key=seed % 2**64, counter=position << 64)
    raw: npt.NDArray[np.uint64] = np.asarray(generator.random_raw(int(token_ids.max()) // 2 + 1))
    uniform = (raw.view(np.uint32)[token_ids] + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float32)


def _draw(logits: Tensor, row: SamplingTensors) -> int:
    """Sample for one row ``logits [vocab]``, whose largest logit is finite."""
    scaled = (logits - logits.max()) / float(row.temperature)
    scaled = torch.where(scaled.isnan(), -torch.inf, scaled)  # -inf divided by a temperature that is infinite in fp32
    lowest = lowest_kept(scaled, int(row.top_k), float(row.top_p), float(row.min_p))
    kept = torch.nonzero(scaled >= lowest).flatten()
    noise = gumbel_noise(int(row.seed), int(row.position), kept.cpu().numpy())
    return int(kept[(scaled[kept] + torch.from_numpy(noise).to(scaled)).argmax()])


LONG_TOKENS = 8192
"""Longer contexts are split among more programs. Graphs for longer contexts are captured separately."""


class BatchPart(NamedTuple):
    """Some sequences of a batch, for which attention is launched together.

    Attributes:
        numbers: int64 on the device, indices of the sequences in the batch; None: all of them.
        sequences: number of sequences.
        most_rows: most rows of a sequence.
        longest: longest context; None if only the device knows.
    """

    numbers: Tensor | None
    sequences: int
    most_rows: int
    longest: int | None


def split_batch(row_starts: Tensor, contexts: Tensor, device: torch.device) -> tuple[BatchPart, ...]:
    """Split a batch into decodes (one row) and prefills (more rows).

    Args:
        row_starts: as of ``Batch``, on the host.
        contexts: as of ``Batch``, on the host.
        device: gets the indices, by a copy that is not waited for.
    """
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
    """The weights of one adapter, as views into pool blocks and as a table of addresses.

    Args:
        pieces: the views.
        layers: layers of the model.

    Attributes:
        rank: the largest rank of any module on any layer.
        modules: modules that the adapter changes.
        extras: what the adapter has beside A and B; None: nothing.
        table: int64 ``[pieces, 3]``: address of the A rows, address of the Bᵀ rows, number of rows. Ordered by layer,
            then module as in the geometry; here as in ``LORA_MODULES``.
        index: int64 ``[layers * slots + 1]``, the first piece of each (layer, module); slots as of ``LoraTargets``.
        score: rows of the score head, ``[labels, hidden]`` together; empty if the adapter has none.
        bits: 8 if A and Bᵀ are codes, with the scales of a piece before its A (``memory.packing.write_pieces``); 0 if
            they are of the dtype. ``pieces`` are of the dtype in any case.
    """

    score: tuple[Tensor, ...] = ()
    bits = 0

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
        """Make it from addresses. Views of hundreds of pieces take milliseconds; native kernels do not need them."""
        made = cls.__new__(cls)
        made.rank, made.modules, made.table, made.index = rank, modules, table, index
        made._make_pieces, made._on_device, made.extras, made.bits = make_pieces, None, None, bits
        return made

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all addresses are multiples of 16 bytes."""
        return not bool((self.table[:, :2] & 15).any())

    @cached_property
    def pieces(self) -> LoraPieces:
        """The weights as views, made on first use."""
        return self._make_pieces()

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return table and index on a device; copied once."""
        if device.type == "cpu":
            return self.table, self.index
        if self._on_device is None:
            self._on_device = to_device(self.table, device), to_device(self.index, device)
        return self._on_device


class LoraSegment(NamedTuple):
    """Rows ``start`` to ``stop`` (half-open) of the batch, which use one adapter."""

    start: int
    stop: int
    weights: LoraWeights


class Adjusted(NamedTuple):
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
        slots: as of ``ModelGeometry.module_slots``.

    Attributes:
        each: the targets.
        modules: names of their modules.
        numbers: int64 ``[1 + 3 * targets]``: their number, then each one's index in a layer, column, outputs.
        slots: entries of one layer in the index of ``LoraWeights``.
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
        """Return :attr:`numbers` on a device; copied once."""
        if self._on_device is None:
            self._on_device = to_device(self.numbers, device)
        return self._on_device


class LoraBatch:
    """The adapters of one step.

    Attributes:
        segments: disjoint, in row order.
        form: how mixed ranks are computed.
        modules: modules that any of the adapters changes on any layer.
        largest_rank: of all adapters; a ``padded`` batch pads to it.
        segment_rows: rows of the longest segment.
    """

    def __init__(self, segments: Sequence[LoraSegment], form: KernelForm = KernelForm.UNPADDED) -> None:
        self.segments = tuple(segments)
        self.form = form
        self.modules = frozenset[str]().union(*(segment.weights.modules for segment in segments))
        self.segment_rows = max((segment.stop - segment.start for segment in segments), default=0)
        self.largest_rank = max((segment.weights.rank for segment in segments), default=0)
        self._on_device: Tensor | None = None
        self._adjusted: dict[tuple[str, ...], list[Adjusted]] = {}

    @cached_property
    def has_extras(self) -> bool:
        """Whether any of the adapters has more than A and B."""
        return any(segment.weights.extras is not None for segment in self.segments)

    def adjusted(self, *kinds: str) -> list[Adjusted]:
        """Return the segments whose adapters have any of these kinds for linear modules or vectors."""
        if kinds not in self._adjusted:
            self._adjusted[kinds] = [
                Adjusted(start, stop, weights.extras)
                for start, stop, weights in self.segments
                if weights.extras is not None and not weights.extras.kinds.isdisjoint(kinds)
            ]
        return self._adjusted[kinds]

    @property
    def adjusted_layers(self) -> list[Adjusted]:
        """The segments whose adapters have extras inside layers."""
        return self.adjusted("scale", "shift", "vector", "weight", "input")

    def adjusted_vocabulary(self, *modules: str) -> list[Adjusted]:
        """Return the segments whose adapters have extras of any of these: embedding, head."""
        return [
            Adjusted(start, stop, weights.extras)
            for start, stop, weights in self.segments
            if weights.extras is not None and not weights.extras.vocabulary.isdisjoint(modules)
        ]

    @cached_property
    def adjusts(self) -> Tensor | None:
        """What adapters change beside A and B in linear modules and norms, as ``native/adjusts.h`` has it; or None."""
        rows = [(*found[:2], *found.extras.tables()) for found in self.adjusted("scale", "shift", "vector")]
        if not rows:
            return None
        segments = torch.tensor(rows, dtype=torch.int64)
        self._adjusted_rows = segments  # kept, since its address is in the other
        return torch.tensor([segments.data_ptr(), len(rows)], dtype=torch.int64)

    @cached_property
    def table(self) -> Tensor:
        """Int64 ``[segments, 4]`` on the host: start, stop, address of the piece table, address of the piece index."""
        rows = [(s.start, s.stop, s.weights.table.data_ptr(), s.weights.index.data_ptr()) for s in self.segments]
        return torch.tensor(rows, dtype=torch.int64)

    @cached_property
    def numbers(self) -> Tensor:
        """Int64 ``[4]``: address of :attr:`table`, number of segments, the rank to pad to, 0 for none, and the bits.

        All adapters of a batch are kept in the same form.
        """
        padded_rank = self.largest_rank if self.form is KernelForm.PADDED else 0
        bits = self.segments[0].weights.bits if self.segments else 0
        return torch.tensor([self.table.data_ptr(), len(self.segments), padded_rank, bits], dtype=torch.int64)

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
        """Make a batch for a graph, whose kernels read only the table; its content may change between replays.

        Args:
            table: as returned by :meth:`on`; unused segments have no rows.
            form: how mixed ranks are computed; not ``EINSUM``.
            modules: modules that any adapter in the table may change.
            largest_rank: largest rank of any adapter in the table; with ``PADDED`` the rank to which all are padded.
            segment_rows: most rows of a segment in the table.
            is_aligned: whether all weights start at multiples of 16 bytes.
        """
        made = cls((), form)
        made.segment_rows, made.is_aligned = segment_rows, is_aligned
        made.modules, made._on_device, made.largest_rank = modules, table, largest_rank
        return made

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all weights start at multiples of 16 bytes."""
        return all(segment.weights.is_aligned for segment in self.segments)

    def changes(self, targets: LoraTargets) -> bool:
        """Return whether any of the adapters changes any of these modules on any layer."""
        return not self.modules.isdisjoint(targets.modules)

    def on(self, device: torch.device) -> Tensor:
        """Return :attr:`table` on a device, with addresses on that device and long segments split; copied once."""
        if self._on_device is None:
            rows = split_segments(self.rows_on(device), MAX_SEGMENT_ROWS)
            self._on_device = to_device(torch.tensor(rows, dtype=torch.int64).view(-1, 4), device)
        return self._on_device

    def rows_on(self, device: torch.device) -> list[Segment]:
        """Return the rows of :attr:`table` with addresses on a device."""
        found = [(segment, *segment.weights.on(device)) for segment in self.segments]
        return [(s.start, s.stop, table.data_ptr(), index.data_ptr()) for s, table, index in found]

    def select_rows(self, rows: Sequence[int]) -> "LoraBatch | None":
        """Return the adapters of a batch that consists of ``rows`` of this one; None if none of the rows has one."""
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


class Assist(Protocol):
    """Host LoRA for adapters of which not all layers are on the device."""

    def begin(self, product: str, layer: int, x: Tensor, lora: LoraBatch | None) -> LoraBatch | None:
        """Start host LoRA for some adapters; return those for the device, None if there are none.

        Args:
            product: a key of ``core.geometry.PRODUCTS``; they are called in that order.
            layer: of the model; called for each layer in order.
            x: ``[rows, in]``, the input of the product.
            lora: all adapters of these rows: ``lora`` or ``sample_lora`` of the batch.
        """
        ...

    def finish(self, out: Tensor) -> None:
        """Add the host's delta to the product of the last :meth:`begin`, ``[rows, out]``, in place."""
        ...


class HostMetadata(NamedTuple):
    """Copies on the host of fields of ``Batch``, so that they need not be read from the device."""

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
        slot_blocks: int64 ``[T]``, block that receives the row's KV; -1 for padding rows of graphs, which store none.
        slot_offsets: int64 ``[T]``, token index inside that block.
        row_starts: int64 ``[n + 1]``; sequence i computes rows ``row_starts[i]`` to ``row_starts[i + 1]``.
        contexts: int64 ``[n]``, tokens in a sequence's KV including the step's; its last row is at ``contexts[i] - 1``.
        block_tables: int64 ``[n, N]``, padded with block 0.
        sample_rows: int64 ``[S]``, rows that need logits, each once; in row order if these are all rows.
        lora: the adapters, None if no row has one.
        assist: host LoRA, if adapters of ``lora`` are in flight. None if all are loaded.
        embeds: rows, int64 ``[E]``, and the embeddings that they have instead of their tokens', ``[E, hidden]``; None
            if no row has.
        host: copies on the host; None in a graph.
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
    embeds: tuple[Tensor, Tensor] | None = None
    host: HostMetadata | None = None

    @cached_property
    def parts(self) -> tuple[BatchPart, ...]:
        """Its decodes and its prefills; in a graph one part with all sequences, as the host has no metadata."""
        if self.host is None:
            return (BatchPart(None, len(self.contexts), len(self.token_ids) - len(self.contexts) + 1, None),)
        return split_batch(self.host.row_starts, self.host.contexts, self.contexts.device)

    @cached_property
    def sample_lora(self) -> LoraBatch | None:
        """The adapters of the sample rows only."""
        if self.lora is None or len(self.sample_rows) == len(self.token_ids):
            return self.lora
        rows = self.sample_rows if self.host is None else self.host.sample_rows
        return self.lora.select_rows(rows.tolist())

    @property
    def head_lora(self) -> LoraBatch | None:
        """The adapters of the sample rows, if any of them has more than A and B."""
        lora = self.sample_lora
        return lora if lora is not None and lora.has_extras else None


class PackedWeight(Protocol):
    """A linear weight in a backend's own layout, or quantised."""

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        ...


Weight = Tensor | PackedWeight
"""A linear weight as returned by ``Kernels.pack``."""


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys.

    Attributes:
        q, k: weights, ``[head_dim]`` each, of heads by themselves (Qwen3), or ``[heads * head_dim]`` and
            ``[kv_heads * head_dim]``, of all heads of a token together (OLMo 2).
        eps: is added to the mean square.
        offset: is added to the weights, in fp32.
        is_whole: whether all heads of a token are normalised together.
    """

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0
    is_whole: bool = False


class RotaryPairs(NamedTuple):
    """Which elements of a head a rotary embedding rotates.

    Attributes:
        dims: number of elements that are rotated, the first ones; the others stay as they are.
        are_neighbours: whether element 2i is rotated with 2i + 1 (GLM), and not i with ``dims / 2 + i``.
    """

    dims: int
    are_neighbours: bool = False


class Rotation(NamedTuple):
    """The rotary embedding of a step's rows on a layer.

    Attributes:
        cos, sin: ``[T, head_dim]``: of each pair, then, from ``head_dim / 2`` on, of each pair again.
        pairs: which elements of a head are rotated.
    """

    cos: Tensor
    sin: Tensor
    pairs: RotaryPairs


class Kernels(Protocol):
    """A kernel backend. Arguments are not changed unless the docstring says so."""

    name: str
    threads: int
    """Number of threads of each call. The owner may change it between calls."""
    fits_graphs: bool
    """Whether calls can be captured in a CUDA graph: no call waits for the device, except LoRA by einsum."""
    reads_codes: bool
    """Whether adapters may be kept as codes (``LoraWeights.bits``), and keys and values (:func:`kv_view`)."""

    def pin_threads(self, cores: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which each thread is pinned to one of ``cores``, which are as many as threads."""
        ...

    def pack(self, weight: "Tensor | QuantizedWeight", dtype: torch.dtype | None = None) -> Weight:
        """Return ``weight [out, in]`` in the layout of :meth:`linear`; the weight itself if the layout is plain.

        ``dtype`` is that of the products with a quantised weight, which is needed for such only. The product is that
        of the weight dequantised to this dtype.
        """
        ...

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Overwrite ``packed``, which is not quantised, with ``weight``, of the same shape and dtype, in place."""
        ...

    def layers_in_one_call(self, weights: Sequence["LayerWeights"], shape: "LayersShape") -> "Layers | None":
        """Return a function that computes all layers in one call, with the same bits as single kernels, or None."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """``x [T, in] @ weight [out, in]ᵀ + bias [out]``; rows of ``x`` are contiguous.

        With a ``delta``, ``x[rows] @ Aᵀ @ Bᵀ`` is added in columns ``[column, column + outputs)`` for each segment and
        target. Segments whose adapter does not change (layer, module) are skipped. Ranks may differ.
        """
        ...

    def scale_and_shift(self, out: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> None:
        """Multiply outputs of a product by the factors of adapters, and add their summands, in place.

        ``out [T, out]`` is that of :meth:`linear`, with the delta. Sums are fp32, and rounded once.
        """
        ...

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """Return the output layer ``x [S, hidden] @ weight [vocab, hidden]ᵀ``, ``[S, vocab]``.

        It is fp32 where that costs no more than the weights' dtype. bfloat16 has steps of 0.125 between 16 and 32,
        where the best logits of many models lie, so it makes ties among tokens that differ.
        """
        ...

    def row_norms(self, weight: Weight) -> Tensor:
        """Return the norm of each row of ``weight [out, in]``, fp32 ``[out]``."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Add ``delta`` to ``x`` in place, if there is one; return the RMS norm of the sum times ``weight + offset``.

        Both are ``[T, hidden]``; the norm, and ``weight + offset``, are computed in fp32.
        """
        ...

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Rotate the queries in ``qkv`` in place; write rotated keys, and values, into ``kv`` at the batch's slots.

        Args:
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``, changed; its keys are undefined afterwards.
            rotation: how queries and keys are rotated.
            kv: this layer's view of the arena, ``[blocks, 2, block_size, kv_heads, head_dim]``, changed; or of codes,
                see :func:`kv_view`.
            batch: the step.
            norms: RMS norms of queries and keys before the rotation, or None.
        """
        ...

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention of the queries in ``qkv`` over the paged ``kv``, with grouped heads.

        ``window`` limits a token to the ``window`` latest positions, its own included. With a ``softcap`` the scaled
        scores are ``softcap * tanh(score / softcap)``.
        Returns ``[T, heads * head_dim]``.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``gate_up [T, 2 * n]``; returns ``[T, n]``."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up`` likewise, with the approximation of GELU by tanh."""
        ...

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Sample one token per row of ``logits [S, vocab]``, as ``kernels.sampling.choose``."""
        ...


def kv_head_dim(kv: Tensor) -> int:
    """Return the elements of a head of a layer's keys and values, as viewed by :func:`kv_view`."""
    return kv.shape[-1] - (KV_SCALE_BYTES if kv.dtype == torch.int8 else 0)


def kv_view(arena: Tensor, layers: int, block_size: int, kv_heads: int, head_dim: int, *, bits: int = 0) -> Tensor:
    """View ``arena [blocks, elements]`` as ``[layers, blocks, 2, block_size, kv_heads, head_dim]``, without a copy.

    With 8 ``bits`` it is a view of int8 ``[…, head_dim + 2]``: the codes of a head, and their scale in bfloat16.
    """
    blocks = arena.shape[0]
    if bits:
        arena, head_dim = arena.view(torch.int8), head_dim + KV_SCALE_BYTES
    return arena.view(blocks, layers, 2, block_size, kv_heads, head_dim).transpose(0, 1)


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer; ``None`` where the model has no such tensor.

    Linear weights are ``[out, in]``, as loaded or packed by ``Kernels.pack``.

    Attributes:
        input_norm, post_norm: ``[hidden]``, before attention and before the MLP.
        attention_norm, mlp_norm: ``[hidden]``, of what attention and MLP add to the residual stream.
        qkv, qkv_bias: queries, keys and values, stacked.
        q_norm, k_norm: as of ``HeadNorms``.
        o, o_bias: split by input over ranks. Only rank 0 has the bias, since partial products are summed.
        gate_up, gate_up_bias: gate and up, stacked.
        down, down_bias: split like ``o``.
    """

    input_norm: Tensor | None
    post_norm: Tensor | None
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
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None


class LayersShape(NamedTuple):
    """Parameters of layers beside their weights.

    Attributes:
        heads, kv_heads, head_dim: of attention.
        eps: of all norms.
        scale: of attention scores.
        windows: sliding window of each layer; None for full attention.
        targets: LoRA targets of the four fused products: qkv, o, gate_up, down.
        rotations: by layer, the index of its rotary embedding in cos and sin.
        pairs: as of :class:`Rotation`.
        norm_offset: is added to the weights of norms.
        has_whole_norms: whether all heads of a token are normalised together.
        softcap: of attention scores; 0: none.
        has_gelu: whether the MLP is gated by GELU, and not by SiLU.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    windows: tuple[int | None, ...]
    targets: tuple[LoraTargets, ...]
    rotations: tuple[int, ...]
    pairs: RotaryPairs
    norm_offset: float = 0.0
    has_whole_norms: bool = False
    softcap: float = 0.0
    has_gelu: bool = False


Layers = Callable[[Tensor, Tensor, Tensor, Tensor, Batch], tuple[Tensor, Tensor]]
"""Computes all layers of a batch for which :func:`fits_one_call` holds.

Arguments are x ``[T, hidden]``, changed; cos and sin ``[rotations, T, head_dim]``; the arena as viewed by
:func:`kv_view`, changed; and the batch. It returns, for the sample rows, x before the last layer's MLP is added, and
the MLP's output, both ``[S, hidden]``.
"""


def fits_one_call(batch: Batch) -> bool:
    """Whether a batch needs nothing between kernels: neither host LoRA, nor einsums, nor whole weights of adapters."""
    lora = batch.lora
    if batch.assist is not None or (lora is not None and lora.form is KernelForm.EINSUM):
        return False
    return lora is None or not lora.has_extras or all(found.extras.fits_one_call for found in lora.adjusted_layers)
