"""Runs decode steps as CUDA graphs.

A step is captured once per number of rows and replayed with one call.

Inputs that change between steps, the table of the batch's adapters among them, are in device tensors at fixed
addresses, so any mix of sequences and adapters replays the same graph (as in vLLM and SGLang). A graph also samples the
tokens and prepares the inputs of the next step, so the next step can start without the host.
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
from lorikeet.kernels.interface import LONG_TOKENS, Batch
from lorikeet.kernels.lora import LoraBatch, Segment, split_segments
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.worker.batch import BatchRow
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.transfer.device import DeviceBackend, Graph, StreamEvent

_SMALL_ROWS = (1, 2, 4, 8)
_ROW_STEPS = ((64, 16), (128, 32), (512, 64))
"""(limit, step): up to ``limit`` rows there is a graph for every multiple of ``step``; above, of 128."""
_MIN_GRAPH_RANK = 64
_SEGMENT_ROWS = (1, 16)
"""Most rows of a segment."""
_SEGMENTS = (8, 32, 128)
"""Capacities of the segment table.

Longer segments are split, so that a kernel handles a bounded number of rows per segment; the kernel for one row is
faster. A graph has a table of one of these sizes, or of as many segments as rows. Programs of unused segments are
launched too, and return immediately.
"""
_MAX_INFLIGHT = 2
"""Most steps whose tokens have not been taken."""


Array = TypeVar("Array", Tensor, npt.NDArray[Any])


class _Inputs(NamedTuple, Generic[Array]):
    """Inputs of decode steps, as device tensors or as numpy arrays of the host.

    Attributes:
        token_ids: int64 ``[rows]``, the newest token of each sequence.
        contexts: int64 ``[rows]``, number of tokens including the newest one; 0 for padding rows.
        segments: int64 ``[rows, 4]``, the table of ``LoraBatch``.
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
    """Return inputs as views of the first ``10 * rows`` elements of int64 ``memory``."""
    token_ids, contexts, top_k, seed = memory[: 4 * rows].view(4, rows)
    temperature, top_p, min_p, _ = memory[8 * rows : 10 * rows].view(torch.float32).view(4, rows)
    segments = memory[4 * rows : 8 * rows].view(rows, 4)
    return _Inputs(token_ids, contexts, segments, temperature, top_k, top_p, min_p, seed)


class _Variant(NamedTuple):
    """Key of a captured graph.

    Attributes:
        rows: number of rows, padding included.
        modules: the modules that adapters may change. Empty for the base model without LoRA.
        form: how mixed ranks are computed.
        ranks: largest rank of an adapter; with ``PADDED``, the rank to which all are padded.
        segments: number of segments in the table.
        segment_rows: maximum number of rows of a segment.
        is_aligned: whether all weights start at multiples of 16 bytes.
        is_long: whether a context may have more than ``LONG_TOKENS`` tokens.
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
        """Return the variant for these numbers of rows and of segments after splitting."""
        padded = padded_rows(rows)
        if lora is None:
            return cls(padded)
        ranks = lora.largest_rank
        if lora.form is not KernelForm.PADDED:
            ranks = max(_MIN_GRAPH_RANK, 1 << (ranks - 1).bit_length())
        most = next((most for most in _SEGMENTS if segments <= most), padded)
        segment_rows = _segment_rows(lora.segment_rows)
        return cls(padded, lora.modules, lora.form, ranks, min(most, padded), segment_rows, lora.is_aligned)


class DecodeGraphs:
    """One rank's decode graphs.

    Each graph is captured when a step first needs it.

    Args:
        device: captures and replays graphs.
        model: the rank's model. Its kernels can be captured in graphs.
        kv: KV view of the arena, as for ``Decoder.forward``.
        most_rows: maximum number of sequences in a step.
        sequence_blocks: maximum number of blocks of a sequence.

    Attributes:
        logits: the last step's logits, ``[>= most_rows, vocab]``.
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
        rows = padded_rows(most_rows)
        zeros = partial(torch.zeros, dtype=torch.int64, device=place)
        # One registered piece of host memory holds inputs, block tables without gaps, and the tokens of two steps.
        sent = (10 + sequence_blocks) * rows
        received = _MAX_INFLIGHT * rows
        self._host = torch.zeros(sent + received, dtype=torch.int64)
        self._unregister = device.register(self._host)
        self._host_inputs = _Inputs(*(each.numpy() for each in _inputs_within(self._host, rows)))
        self._received = self._host[sent:].view(_MAX_INFLIGHT, rows)
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
        self._inflight: deque[StreamEvent] = deque()

    def start(self, rows: Sequence[BatchRow], lora: LoraBatch | None, parameters: SamplingTensors) -> None:
        """Prepare steps of these sequences.

        The caller must have taken all tokens of earlier steps.

        Args:
            rows: the decoding sequences in batch order.
            lora: the sequences' adapters, None if they have none. The einsum form is not supported.
            parameters: sampling parameters; positions are taken from the rows.
        """
        assert not self._inflight
        self._rows = len(rows)
        self._lora = lora  # The reference keeps the weights alive, which the device reads through the table.
        most = 0 if lora is None else _segment_rows(lora.segment_rows)
        segments = [] if lora is None else split_segments(lora.rows_on(self._model.device), most)
        is_long = max(len(row.sequence.blocks) for row in rows) > self._short_blocks
        variant = _Variant.of(len(rows), lora, len(segments))._replace(is_long=is_long)
        if variant not in self._graphs:
            self._graphs[variant] = self._capture(variant)
        self._graph = self._graphs[variant]
        self._send_inputs(rows, segments, parameters)

    def launch(self) -> None:
        """Queue the next step and the copy of its tokens to the host, without waiting for the device."""
        assert self._graph is not None
        assert len(self._inflight) < _MAX_INFLIGHT
        self._graph.replay()
        received = self._received[self._launched % _MAX_INFLIGHT]
        self._device.steps.copy(self._chosen[: self._rows], received[: self._rows])
        self._inflight.append(self._device.steps.record_event())
        self._launched += 1

    def take(self) -> list[int]:
        """Wait for the oldest launched step whose tokens were not taken yet, and return its tokens.

        A token is -1 if the logits were not finite.

        Raises:
            RuntimeError: the device has failed.
        """
        at = (self._launched - len(self._inflight)) % _MAX_INFLIGHT
        self._inflight.popleft().wait()
        return self._received[at, : self._rows].tolist()

    def close(self) -> None:
        """Unregister the host memory. No step may be running during the call."""
        self._unregister()

    def _send_inputs(self, rows: Sequence[BatchRow], segments: Sequence[Segment], parameters: SamplingTensors) -> None:
        """Write the inputs and copy them to the device.

        The device has read the previous inputs, since their tokens were taken.
        """
        inputs = self._host_inputs
        count = len(rows)
        host = self._host.numpy()
        input_words = 10 * len(inputs.token_ids)
        host[:input_words] = 0
        inputs.token_ids[:count] = [row.sequence.token_ids.values[row.start] for row in rows]
        inputs.contexts[:count] = [row.start + 1 for row in rows]
        if segments:
            inputs.segments[: len(segments)] = segments
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(inputs, name)[:count] = getattr(parameters, name).numpy()
        blocks = [row.sequence.blocks.values for row in rows]
        width = max(map(len, blocks))
        used = input_words + count * width
        for table, own in zip(host[input_words:used].reshape(count, width), blocks, strict=True):
            table[: len(own)] = own
        steps = self._device.steps
        steps.copy(self._host[:used], self._sent[:used])
        steps.copy(self._sent[input_words:used].view(count, width), self._tables[:count, :width])

    def _capture(self, variant: _Variant) -> Graph:
        """Capture a step that has only padding rows, which store no keys and values."""
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
        rows = variant.rows
        blocks = self._tables.shape[1] if variant.is_long else self._short_blocks
        inputs = _Inputs(*(each[:rows] for each in self._inputs))
        tables = self._tables[:rows, :blocks]
        row_starts = self._row_starts[: rows + 1]
        block_size = self._kv.shape[3]

        def step() -> None:
            is_used = inputs.contexts.clamp(max=1)
            positions = inputs.contexts - is_used
            blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0]
            batch = Batch(
                token_ids=inputs.token_ids,
                positions=positions,
                slot_blocks=blocks.masked_fill_(is_used == 0, -1),
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
            inputs.contexts.add_(is_used)

        return step


def _segment_rows(longest: int) -> int:
    """Return the maximum number of rows of a segment after splitting, for segments of up to ``longest`` rows."""
    return next((most for most in _SEGMENT_ROWS if longest <= most), _SEGMENT_ROWS[-1])


def build_graphs(
    engine: EngineSettings, model: RankModel, arena: Tensor, device: DeviceBackend, longest_tokens: int
) -> DecodeGraphs | None:
    """Return a rank's decode graphs. None if graphs are off or unsupported, or if there are several ranks."""
    can_capture = device.has_graphs and model.kernels.fits_graphs and model.decoder.fits_graphs
    fits = can_capture and engine.ranks == 1
    if not fits or engine.enforce_eager:
        return None
    kv = model.decoder.view_kv(arena, engine.block_size)
    return DecodeGraphs(device, model, kv, engine.max_num_seqs, -(-longest_tokens // engine.block_size))


def padded_rows(rows: int) -> int:
    """Return the number of rows of the graph that runs a batch of ``rows`` rows."""
    for small in _SMALL_ROWS:
        if rows <= small:
            return small
    size = next((size for most, size in _ROW_STEPS if rows <= most), 128)
    return -(-rows // size) * size
