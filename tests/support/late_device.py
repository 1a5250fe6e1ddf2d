"""A device that runs queued work as late as the order of streams and events allows, and reports races.

It tracks copies, graphs, and what ``Decoder.forward`` reads and writes. Copies and graphs run when an event after them
is waited for, and copies in other streams not before :meth:`LateDevice.hold` ends. Eager steps run immediately, but
count as in flight until later work has finished. Two pieces of unordered work in flight that touch the same bytes are a
fault. So is a graph that reads values on the host, for which it would have to wait.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from torch import Tensor

from lorikeet.kernels.interface import Batch
from lorikeet.kernels.lora import LoraBatch
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.models.decoder import Decoder
from lorikeet.worker.batch import BatchRow
from lorikeet.worker.decode_graphs import DecodeGraphs
from lorikeet.worker.transfer.device import BlockCopy, Stream, StreamEvent
from tests.support.graph_watch import graph_watch, is_graph_watched


class Span(NamedTuple):
    """Addresses, half-open."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Span":
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())

    def overlaps(self, others: Iterable["Span"]) -> bool:
        return any(self.start < other.stop and other.start < self.stop for other in others)


@dataclass(eq=False)
class Work:
    """Something that a stream does."""

    name: str
    before: tuple["Work", ...]
    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()
    do: Callable[[], None] = lambda: None
    error: str | None = None
    has_no_mark: bool = False
    is_done: bool = False

    def run(self) -> None:
        """Do it, if it has not been."""
        self.do()
        self.do = lambda: None

    def all_before(self) -> set["Work"]:
        """Itself, and what must have been done before it and has not been."""
        found, open_ = {self}, [self]
        while open_:
            new = [work for work in open_.pop().before if not work.is_done and work not in found]
            found.update(new)
            open_ += new
        return found

    def conflicts_with(self, other: "Work") -> bool:
        mine, theirs = [*self.reads, *self.writes], [*other.reads, *other.writes]
        return any(span.overlaps(theirs) for span in self.writes) or any(span.overlaps(mine) for span in other.writes)


@dataclass
class LateMark:
    device: "LateDevice"
    work: Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.device.finish(self.work)


@dataclass
class LateStream:
    device: "LateDevice"
    name: str
    last: Work | None = None
    followed: list[Work] = field(default_factory=list)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.device.begin_copy(self, [(source, target)])

    def copy_blocks(self, copy: BlockCopy, until_s: float) -> None:
        source, source_blocks, target, target_blocks = copy
        missing = next((i for i, block in enumerate(target_blocks) if block >= len(target)), None)
        self.device.begin_copy(
            self,
            [(source[a], target[b]) for a, b in zip(source_blocks[:missing], target_blocks[:missing], strict=True)],
        )
        if missing is not None:
            raise RuntimeError(f"there is no block {target_blocks[missing]}")

    def wait_event(self, event: StreamEvent) -> None:
        assert isinstance(event, LateMark)
        if event.work is not None:
            self.followed.append(event.work)

    def record_event(self) -> StreamEvent:
        if self.last is not None and self.last.has_no_mark:
            raise RuntimeError("the device has failed")
        return LateMark(self.device, self.last)


@dataclass
class LateGraph:
    device: "LateDevice"
    work: Callable[[], None]

    def replay(self) -> None:
        self.device.begin_graph(self.work)


class LateDevice:
    """Runs work late and collects faults. Implements ``DeviceBackend``.

    Args:
        copies_ahead: as of a device; CUDA's has 8.

    Attributes:
        faults: races that could occur on a real device.
        copies: number of groups that were copied.
        graphs: that were captured.
        replays, replayed: graphs that have begun, and those that were done.
        touched: what the next graphs read and write of the arena.
        copied_beside_steps: those of them that were in flight while a step began.
        copied_beside_graphs: those of them that were in flight while a graph began.
        failing: groups, by their number, whose copies fail.
        unmarked: those behind which no mark can be set.
    """

    has_graphs = True

    def __init__(self, copies_ahead: int = 2) -> None:
        self.copies_ahead = copies_ahead
        self.faults: list[str] = []
        self.copies = self.copied_beside_steps = self.copied_beside_graphs = 0
        self.graphs = self.replays = self.replayed = 0
        self.touched: tuple[Sequence[Span], Sequence[Span]] = ((), ())
        self.failing: set[int] = set()
        self.unmarked: set[int] = set()
        self._awaiting = 0
        self._begun = 0
        self._changed = threading.Condition()
        self._is_held = False
        self._registered: list[Span] = []
        self._in_flight: list[Work] = []
        self._steps = LateStream(self, "steps")
        self.steps: Stream = self._steps

    @property
    def steps_in_flight(self) -> int:
        return sum(work.name == "steps" for work in self._in_flight)

    def stream(self) -> Stream:
        return LateStream(self, "copies")

    def signals(self) -> None:
        """Hands nothing over to other processes."""

    def register(self, memory: Tensor) -> Callable[[], None]:
        span = Span.of(memory)
        self._registered.append(span)
        return lambda: self._unregister(span)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let nothing be done meanwhile; whoever waits for it waits."""
        with self._changed:
            self._is_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def wait_until_awaited(self) -> None:
        """Return when somebody waits for something."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._awaiting > 0, 60.0)

    def capture(self, work: Callable[[], None]) -> LateGraph:
        with graph_watch(self.faults):
            work()
        self.graphs += 1
        return LateGraph(self, work)

    def begin_graph(self, work: Callable[[], None]) -> None:
        """A graph is to be replayed that touches what was said."""

        def do() -> None:
            with graph_watch(self.faults):
                work()
            self.replayed += 1

        with self._changed:
            self.replays += 1
            self.copied_beside_graphs += self._copies_in_flight()
            self._begin_step(*self.touched, do)

    def compute(self, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """A step is computed now that touches these; nobody knows yet that what comes before it is done."""
        with self._changed:
            for work in self._in_flight:
                if work.name == "steps":
                    work.run()
            self._begin_step(reads, writes, lambda: None)

    def begin_copy(self, stream: LateStream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy from the first of each pair to the second."""

        def do() -> None:
            for source, target in pairs:
                target.copy_(source)

        reads, writes = ([Span.of(pair[side]) for pair in pairs] for side in (0, 1))
        with self._changed:
            for source, target in zip(reads, writes, strict=True):
                ends = source.overlaps(self._registered) + target.overlaps(self._registered)
                if ends == 2 or (ends == 0 and stream is not self._steps):
                    self.faults.append("a copy is not between registered memory and the device")
            work = self._begin(stream, reads, writes, do)
            if self._begun in self.failing:
                work.error = "the copy has failed"
            work.has_no_mark = self._begun in self.unmarked
            self._begun += 1

    def finish(self, work: Work) -> None:
        """Do something, and what comes before it."""
        with self._changed:
            if work.name == "copies":
                self._awaiting += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_held)
                self._awaiting -= 1
            due = work.all_before()
            for each in [each for each in self._in_flight if each in due]:  # in the order in which they began
                each.run()
                each.is_done = True
                self.copies += each.name == "copies"
            self._in_flight = [each for each in self._in_flight if not each.is_done]
            if work.error is not None:
                raise RuntimeError(work.error)

    def _begin_step(self, reads: Sequence[Span], writes: Sequence[Span], do: Callable[[], None]) -> None:
        self.copied_beside_steps += self._copies_in_flight()
        self._begin(self._steps, reads, writes, do)

    def _copies_in_flight(self) -> int:
        return sum(not work.is_done and work.name == "copies" for work in self._in_flight)

    def _begin(self, stream: LateStream, reads: Sequence[Span], writes: Sequence[Span], do: Callable[[], None]) -> Work:
        before = (*stream.followed, *(() if stream.last is None else (stream.last,)))
        work = Work(stream.name, before, reads, writes, do)
        ordered = work.all_before()
        for other in self._in_flight:
            if other not in ordered and work.conflicts_with(other):
                self.faults.append(f"{work.name} touch what {other.name} touch, and neither waits for the other")
        self._in_flight.append(work)
        stream.last, stream.followed = work, []
        return work

    def _unregister(self, span: Span) -> None:
        with self._changed:
            self._registered.remove(span)
            if any(span.overlaps([*work.reads, *work.writes]) for work in self._in_flight if work.name == "copies"):
                self.faults.append("memory that copies touch is registered no longer")


@contextmanager
def steps_seen_by(device: LateDevice) -> Iterator[None]:
    """Tell a device which blocks each step touches."""
    hidden, start = Decoder.hidden, DecodeGraphs.start

    def told(self: Decoder, batch: Batch, kv: Tensor) -> Tensor:
        if not is_graph_watched():
            block_size = kv.shape[3]
            tables = [
                table[: -(-context // block_size)].tolist()
                for table, context in zip(batch.block_tables, batch.contexts.tolist(), strict=True)
            ]
            device.compute(
                [*_blocks(itertools.chain(*tables), kv), *_weights(batch.lora)],
                _blocks(batch.slot_blocks.tolist(), kv),
            )
        return hidden(self, batch, kv)

    def started(
        self: DecodeGraphs, rows: Sequence[BatchRow], lora: LoraBatch | None, parameters: SamplingTensors
    ) -> None:
        kv = self._kv
        block_size = kv.shape[3]
        tables = [row.sequence.blocks.values.tolist() for row in rows]
        ahead = [table[row.start // block_size :] for row, table in zip(rows, tables, strict=True)]
        start(self, rows, lora, parameters)
        device.touched = (
            [*_blocks(itertools.chain(*tables), kv), *_weights(lora)],
            _blocks(itertools.chain(*ahead), kv),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "hidden", told)
        patch.setattr(DecodeGraphs, "start", started)
        yield


def _blocks(blocks: Iterable[int], kv: Tensor) -> list[Span]:
    block_bytes = kv.stride(1) * kv.element_size()
    starts = [kv.data_ptr() + block * block_bytes for block in sorted(set(blocks))]
    return [Span(start, start + block_bytes) for start in starts]


def _weights(lora: LoraBatch | None) -> list[Span]:
    segments = () if lora is None else lora.segments
    return [
        Span.of(rows)
        for segment in segments
        for pieces in segment.weights.pieces.values()
        for piece in pieces
        for rows in piece
    ]
