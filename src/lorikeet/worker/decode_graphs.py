"""Decode steps as graphs: all that a step launches is captured once for so many rows, and replayed with one call.

What differs from one step to the next lies in tensors of the device at fixed places, the table of the batch's adapters
among them, so that any mix of sequences and adapters replays the same graph (vLLM and SGLang replay theirs likewise).
A step chooses its tokens and makes itself ready for the next one, so that the host is needed for neither.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from lorikeet.config import EngineSettings
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.base import LONG_TOKENS, Batch, LoraBatch, Segment, cut_segments, kv_view
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.worker.batch import BatchRow
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.transfer.device import DeviceBackend, Graph, StreamEvent

_SMALL = (1, 2, 4, 8)
_STEPS = ((64, 16), (128, 32), (512, 64))
"""Up to so many rows, a graph for every so many; above, for every 128."""
_LEAST_RANKS = 64
_SEGMENT_ROWS, _SEGMENTS = (1, 16), (8, 32, 128)
"""Longer segments are cut, so that a kernel need not look for more rows in any of them; there is a faster one where all
have one row. A graph has room for so many segments, or for as many as rows: what is launched for those that are empty
ends at once, but all of it is launched.
"""
_STEPS_AT_ONCE = 2
"""Whose tokens are on their way to the host."""


Array = TypeVar("Array", Tensor, npt.NDArray[Any])


class _Inputs(NamedTuple, Generic[Array]):
    """What the host gives to decode steps: tensors of the device, or numpy's arrays of the host.

    Attributes:
        token_ids: int64 ``[rows]``, newest token of each sequence.
        contexts: int64 ``[rows]``, tokens with that one; 0 for rows that only fill a graph.
        segments: int64 ``[rows, 4]``, see ``LoraBatch``.
        temperature, top_k, top_p, min_p, seed: ``[rows]``, see ``SamplingTensors``.
    """

    token_ids: Array
    contexts: Array
    segments: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array


def _inputs_within(memory: Tensor, rows: int) -> _Inputs[Tensor]:
    """See inputs at the beginning of int64 ``memory``, in ``10 * rows`` of its numbers."""
    token_ids, contexts, top_k, seed = memory[: 4 * rows].view(4, rows)
    temperature, top_p, min_p, _ = memory[8 * rows : 10 * rows].view(torch.float32).view(4, rows)
    segments = memory[4 * rows : 8 * rows].view(rows, 4)
    return _Inputs(token_ids, contexts, segments, temperature, top_k, top_p, min_p, seed)


class _Variant(NamedTuple):
    """Which graph.

    Attributes:
        rows: that it computes.
        modules: which adapters may touch; none: the base model's exact path.
        form: how mixed ranks are computed.
        ranks: of the largest adapter; of ``PADDED`` ones, that to which all are padded.
        segments: at most.
        segment_rows: of any segment, at most.
        is_aligned: whether their weights all lie at multiples of 16 bytes.
        is_long: whether any context may be.
    """

    rows: int
    modules: frozenset[str] = frozenset()
    form: KernelForm = KernelForm.UNPADDED
    ranks: int = 0
    segments: int = 0
    segment_rows: int = 0
    is_aligned: bool = True
    is_long: bool = False

    @classmethod
    def of(cls, rows: int, lora: LoraBatch | None, segments: int) -> "_Variant":
        """Return that for a batch, whose segments are so many when they have been cut."""
        padded = padded_rows(rows)
        if lora is None:
            return cls(padded)
        ranks = lora.largest_rank
        if lora.form is not KernelForm.PADDED:
            ranks = max(_LEAST_RANKS, 1 << (ranks - 1).bit_length())
        most = next((most for most in _SEGMENTS if segments <= most), padded)
        segment_rows = _segment_rows(lora.segment_rows)
        return cls(padded, lora.modules, lora.form, ranks, min(most, padded), segment_rows, lora.is_aligned)


class DecodeGraphs:
    """One rank's decode steps. A graph is captured when it is first needed.

    Args:
        device: computes.
        model: the rank's, whose kernels fit graphs.
        kv: see ``Decoder.forward``.
        most_rows: sequences of a step at most.
        sequence_blocks: blocks of a sequence at most.

    Attributes:
        logits: ``[rows, vocab]``, of the last step; at least ``most_rows``.
    """

    def __init__(
        self,
        device: DeviceBackend,
        model: RankModel,
        kv: Tensor,
        most_rows: int,
        sequence_blocks: int,
    ) -> None:
        self._device = device
        self._model = model
        self._kv = kv
        place = model.device
        rows, zeros = padded_rows(most_rows), partial(torch.zeros, dtype=torch.int64, device=place)
        # One piece of host memory, registered once: inputs, block tables as dense as may be, and tokens of two steps.
        sent, told = (10 + sequence_blocks) * rows, _STEPS_AT_ONCE * rows
        self._host = torch.zeros(sent + told, dtype=torch.int64)
        self._unregister = device.register(self._host)
        self._given = _Inputs(*(each.numpy() for each in _inputs_within(self._host, rows)))
        self._told = self._host[sent:].view(_STEPS_AT_ONCE, rows)
        self._sent = zeros(sent)
        self._inputs = _inputs_within(self._sent, rows)
        self._tables = zeros(rows, sequence_blocks)
        self._short_blocks = max(1, LONG_TOKENS // kv.shape[3])
        self._row_starts = torch.arange(rows + 1, device=place)
        self._chosen = zeros(rows)
        self.logits = torch.zeros(rows, model.config.vocab_size, dtype=model.dtype, device=place)
        self._graphs: dict[_Variant, Graph] = {}
        self._graph: Graph | None = None
        self._lora: LoraBatch | None = None
        self._rows = 0
        self._launched = 0
        self._begun: deque[StreamEvent] = deque()

    def start(self, rows: Sequence[BatchRow], lora: LoraBatch | None, parameters: SamplingTensors) -> None:
        """Make ready for steps of these sequences; all tokens of steps before have been taken.

        Args:
            rows: sequences in batch order; each decodes.
            lora: their adapters, None if none has any; not as einsums.
            parameters: how their tokens are chosen; positions are known.
        """
        assert not self._begun
        self._rows = len(rows)
        self._lora = lora  # the table names its weights: they are read until the last step has been taken
        most = 0 if lora is None else _segment_rows(lora.segment_rows)
        segments = [] if lora is None else cut_segments(lora.rows_on(self._model.device), most)
        is_long = max(len(row.sequence.blocks) for row in rows) > self._short_blocks
        variant = _Variant.of(len(rows), lora, len(segments))._replace(is_long=is_long)
        if variant not in self._graphs:
            self._graphs[variant] = self._capture(variant)
        self._graph = self._graphs[variant]
        self._give(rows, segments, parameters)

    def launch(self) -> None:
        """Begin the next step, and have its tokens sent. Does not wait for the device."""
        assert self._graph is not None
        assert len(self._begun) < _STEPS_AT_ONCE
        self._graph.replay()
        told = self._told[self._launched % _STEPS_AT_ONCE]
        self._device.steps.copy(self._chosen[: self._rows], told[: self._rows])
        self._begun.append(self._device.steps.mark())
        self._launched += 1

    def take(self) -> list[int]:
        """Wait for the oldest step that was launched and not taken; return its tokens, -1 where there is none.

        Raises:
            RuntimeError: the device has failed.
        """
        at = (self._launched - len(self._begun)) % _STEPS_AT_ONCE
        self._begun.popleft().wait()
        return self._told[at, : self._rows].tolist()

    def close(self) -> None:
        """Let go of the host memory; nothing is under way."""
        self._unregister()

    def _give(self, rows: Sequence[BatchRow], segments: Sequence[Segment], parameters: SamplingTensors) -> None:
        """Write the inputs and send them. The device has read the last ones: tokens that it made of them were taken."""
        given, count, host = self._given, len(rows), self._host.numpy()
        inputs = 10 * len(given.token_ids)
        host[:inputs] = 0
        given.token_ids[:count] = [row.sequence.token_ids.values[row.start] for row in rows]
        given.contexts[:count] = [row.start + 1 for row in rows]
        if segments:
            given.segments[: len(segments)] = segments
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(given, name)[:count] = getattr(parameters, name).numpy()
        blocks = [row.sequence.blocks.values for row in rows]
        width = max(map(len, blocks))
        used = inputs + count * width
        for table, own in zip(host[inputs:used].reshape(count, width), blocks, strict=True):
            table[: len(own)] = own
        steps = self._device.steps
        steps.copy(self._host[:used], self._sent[:used])
        steps.copy(self._sent[inputs:used].view(count, width), self._tables[:count, :width])

    def _capture(self, variant: _Variant) -> Graph:
        """Capture a step of rows that stand for no sequence: nothing is stored."""
        self._sent.zero_()
        lora = None
        if variant.modules:
            table = self._inputs.segments[: variant.segments]
            lora = LoraBatch.from_table(
                table,
                variant.form,
                variant.modules,
                variant.ranks,
                variant.segment_rows,
                is_aligned=variant.is_aligned,
            )
        return self._device.capture(self._step(variant, lora))

    def _step(self, variant: _Variant, lora: LoraBatch | None) -> Callable[[], None]:
        rows, blocks = variant.rows, self._tables.shape[1] if variant.is_long else self._short_blocks
        inputs = _Inputs(*(each[:rows] for each in self._inputs))
        tables, row_starts = self._tables[:rows, :blocks], self._row_starts[: rows + 1]
        block_size = self._kv.shape[3]

        def step() -> None:
            is_real = inputs.contexts.clamp(max=1)
            positions = inputs.contexts - is_real
            blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0]
            batch = Batch(
                token_ids=inputs.token_ids,
                positions=positions,
                slot_blocks=blocks.masked_fill_(is_real == 0, -1),
                slot_offsets=positions % block_size,
                row_starts=row_starts,
                contexts=inputs.contexts,
                block_tables=tables,
                sample_rows=row_starts[:rows],
                lora=lora,
            )
            logits = self._model.decoder.forward(batch, self._kv)
            parameters = SamplingTensors(
                inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.contexts
            )
            chosen = self._model.kernels.choose(logits, parameters)
            self.logits[:rows].copy_(logits)
            self._chosen[:rows].copy_(chosen)
            torch.clamp(chosen, min=0, out=inputs.token_ids)
            inputs.contexts.add_(is_real)

        return step


def _segment_rows(longest: int) -> int:
    """Return how many rows segments have at most, of which the longest would have so many."""
    return next((most for most in _SEGMENT_ROWS if longest <= most), _SEGMENT_ROWS[-1])


def build_graphs(
    engine: EngineSettings, model: RankModel, arena: Tensor, device: DeviceBackend, longest_tokens: int
) -> DecodeGraphs | None:
    """Return a rank's graphs; None where device or kernels have none, several ranks compute, or none are wanted."""
    fits = device.has_graphs and model.kernels.fits_graphs and engine.tensor_parallel == 1
    if not fits or engine.enforce_eager:
        return None
    geometry = model.geometry
    kv = kv_view(arena, geometry.layers, engine.block_size, geometry.kv_heads, geometry.head_dim)
    return DecodeGraphs(device, model, kv, engine.max_num_seqs, -(-longest_tokens // engine.block_size))


def padded_rows(rows: int) -> int:
    """Return how many rows the graph has that computes so many."""
    for small in _SMALL:
        if rows <= small:
            return small
    size = next((size for most, size in _STEPS if rows <= most), 128)
    return -(-rows // size) * size
