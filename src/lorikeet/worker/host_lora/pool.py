"""Rank 0's host workers: which of them computes which rows, on a CPU rank and beside a GPU."""

import ctypes
import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.assist_costs import WORKER_TOKENS, slice_rows
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import ModelGeometry
from lorikeet.kernels.tensors import torch_dtype
from lorikeet.memory.host_arena import HostArena
from lorikeet.worker.helper_process import Helper, HelperProcess, start_helper_process
from lorikeet.worker.host_lora.ring import LOOKS, Backoff, Ring, RingShape, RingSlice
from lorikeet.worker.host_lora.worker import HostAdapter, SliceWorker
from lorikeet.worker.host_lora.worker_process import BeginStep, HostWorkerSetup
from lorikeet.worker.transfer.device import DeviceBackend, StreamEvent, StreamSignals

SLOTS = 2
"""One is written while the other drains."""

TIMEOUT_S = 5.0
"""A worker that has not answered by then is taken for lost."""

HANDOVERS = 4096
"""So many of the latest tickets' hand-over times are kept."""

OWN_CORE_SPIN_S = 5e-3
SHARED_CORE_SPIN_S = 50e-6
"""How long a worker polls without rest between two layers: about a layer's time on a core that nobody else wants."""

_RANK = -1


def start_worker_process() -> HelperProcess:
    """Start a worker process; it takes a few seconds until it can compute, in which the caller may go on.

    Raises:
        ExecutorError: the system refuses.
    """
    return start_helper_process("lorikeet.worker.host_lora.worker_process", "a host worker")


class HostRows(NamedTuple):
    """Rows of the batch for the host, ``start`` to ``stop`` (half-open), under one adapter of the step's list."""

    adapter: int
    start: int
    stop: int


class _Move(NamedTuple):
    """Bytes of x to be copied into the ring: ``size`` from ``source`` on to ``target`` on in a slot."""

    source: int
    target: int
    size: int


class RowAssignment:
    """How rows of a batch are dealt out to workers; the same for many layers of a step, so it is made once.

    Attributes:
        parts: what is dealt out.
        number: of the cut in the ring.
        slices: the cut.
        workers: those that have slices.
        moves: what is copied.
        y: of each slot, what comes back for each part.
    """

    def __init__(
        self, parts: Sequence[HostRows], number: int, slices: list[RingSlice], row_bytes: int, y: Sequence[Tensor]
    ) -> None:
        self.parts = tuple(parts)
        self.number = number
        self.slices = slices
        self.workers = tuple(dict.fromkeys(part.worker for part in slices))
        self.moves: list[_Move] = []
        self.y: list[list[Tensor]] = [[] for _ in y]
        row = 0
        for part in parts:
            rows = part.stop - part.start
            self.moves.append(_Move(part.start * row_bytes, row * row_bytes, rows * row_bytes))
            for slot, own in zip(y, self.y, strict=True):
                own.append(slot[row : row + rows])
            row += rows


def y_of(ring: Ring, rank: int) -> list[Tensor]:
    """Return what comes back to a rank, by slot: ``[rows, out]`` of the model's dtype."""
    return list(torch.from_numpy(ring.y).view(torch_dtype(ring.shape.dtype))[:, rank])


class PoolSizes(NamedTuple):
    """What a pool is made for.

    Attributes:
        dtype: of the model.
        geometry: of a rank's share of the model.
        rows: most rows of a layer.
        parts: most parts of a layer.
        timeout_s: for workers to answer.
    """

    dtype: torch.dtype
    geometry: ModelGeometry
    rows: int
    parts: int
    timeout_s: float = TIMEOUT_S


class HostPool:
    """Hands rows out to workers and collects what they make of them. Used by one thread.

    Between :meth:`begin` and :meth:`end` lies a step; in it each :meth:`submit` is followed, after whatever the caller
    has to do meanwhile, by :meth:`add_to`. No rows are ever lost: those of a worker that ends, fails or does not answer
    are computed by the caller itself, once that worker writes nothing any more.

    Args:
        processes: the workers; owned by this object from now on.
        cores: where each is to run, None for any core.
        arenas: the memory of each rank's host tier, this one's first; the others' are owned by this object from now on.
        sizes: what it is made for.

    Attributes:
        worker_tokens: rows of one request that a worker takes while there are enough workers.
        handovers_s: of the latest tickets: from x in the batch to the first worker's start, and from the last worker's
            end to the sums in the batch, without the time of computing and of whatever the caller did meanwhile.
        computed_s: how long workers took to compute the latest ticket.
        rescued_slices: those that the rank has computed itself.
        ring: see ``layout``.
        ticket: the latest.
    """

    def __init__(
        self,
        processes: Sequence[HelperProcess],
        cores: Sequence[int | None],
        arenas: Sequence[HostArena],
        sizes: PoolSizes,
    ) -> None:
        dtype, geometry, rows, parts, timeout_s = sizes
        q = geometry.modules["q"]
        blocks = [torch.from_numpy(arena.bytes).view(dtype) for arena in arenas]
        shape = RingShape(
            slots=SLOTS,
            descriptors=2 * geometry.layers,
            rows=rows,
            inputs=q.in_features,
            outputs=sum(geometry.modules[module].out_features for module in ("q", "k", "v")),
            ranks=len(arenas),
            workers=len(processes),
            cuts=2 * geometry.layers,  # a step has one for each layer at most
            slices=parts + len(processes),
            dtype=str(dtype).removeprefix("torch."),
        )
        self.worker_tokens = WORKER_TOKENS
        self.handovers_s: deque[float] = deque(maxlen=HANDOVERS)
        self.computed_s = 0.0
        self.rescued_slices = 0
        self.ring = Ring.create(shape)
        self._timeout_s = timeout_s
        self._y = y_of(self.ring, 0)
        self._others = tuple(arenas[1:])
        self._row_bytes = self.ring.x[0, :1].nbytes
        self._slots = [int(x.ctypes.data) for x in self.ring.x]
        self._own = SliceWorker(self.ring, _RANK, blocks, geometry)
        every_core = frozenset(os.sched_getaffinity(0))
        self._helpers = [
            Helper(
                process,
                f"host worker {number}",
                HostWorkerSetup(
                    shape,
                    number,
                    geometry,
                    blocks[0].shape[1],
                    every_core if core is None else frozenset((core,)),
                    SHARED_CORE_SPIN_S if core is None else OWN_CORE_SPIN_S,
                ),
                (self.ring.fd, *(arena.fd for arena in arenas)),
            )
            for number, (process, core) in enumerate(zip(processes, cores, strict=True))
        ]
        self._steps = 0
        self._cuts = 0
        self.ticket = 0
        self._at_work: dict[int, HelperProcess] = {}
        self._submitted: tuple[int, RowAssignment] | None = None
        self._submitted_ns = 0

    @property
    def workers(self) -> int:
        """How many there are to be."""
        return len(self._helpers)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that can compute now."""
        return [worker.process.pid for helper in self._helpers if (worker := helper.ready) is not None]

    @property
    def lost_workers(self) -> int:
        """How many have ended unasked."""
        return sum(helper.lost for helper in self._helpers)

    def wait_until_ready(self) -> None:
        """Block until all workers can compute.

        Raises:
            ExecutorError: one could not be started.
        """
        for helper in self._helpers:
            helper.wait_until_ready()

    def begin(self, adapters: Sequence[HostAdapter]) -> None:
        """Begin a step: wake the workers, and tell them where its adapters lie."""
        self._steps += 1
        self._own.begin(adapters)
        message = BeginStep(self._steps, self.ticket + 1, tuple(adapters))
        self._at_work = {
            number: worker for number, helper in enumerate(self._helpers) if (worker := helper.ready) is not None
        }
        for worker in self._at_work.values():
            worker.send(message)

    def end(self) -> None:
        """End the step."""
        self._collect_all()
        self.ring.ended = self._steps
        for number in self._at_work:
            self._helpers[number].note_success()

    def deal(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Deal rows out to the workers that are at work; it holds for the step."""
        numbers = list(self._at_work) or [_RANK]
        rows = [part.stop - part.start for part in parts]
        starts = list(accumulate(rows, initial=0))
        slices = [
            RingSlice(numbers[worker], parts[cut.request].adapter, starts[cut.request] + cut.first_row, cut.rows)
            for worker, cuts in enumerate(slice_rows(rows, self.worker_tokens, len(numbers)))
            for cut in cuts
        ]
        self._cuts += 1
        self.ring.write_cut(self._cuts, slices)
        return RowAssignment(parts, self._cuts, slices, self._row_bytes, self._y)

    def submit(self, layer: int, x: Tensor, deal: RowAssignment) -> None:
        """Let workers compute what adapters add to q, k and v of a layer.

        This and :meth:`add_to` are what assistance costs the rank on every layer, with cold caches; so little is done.

        Args:
            layer: of the model.
            x: ``[T, in]`` of the batch, contiguous.
            deal: which of its rows are meant.
        """
        self._submitted_ns = time.monotonic_ns()
        ticket = self.ticket = self.ticket + 1
        ring = self.ring
        ring.check_free(ticket)
        source, target = x.data_ptr(), self._slots[ticket % SLOTS]
        for move in deal.moves:
            ctypes.memmove(target + move.target, source + move.source, move.size)
        ring.describe(ticket, self._steps, layer, deal.number)
        ring.signal_x(ticket)
        self._submitted = layer, deal

    def add_to(self, qkv: Tensor) -> None:
        """Wait for what was submitted, and add it to its rows of ``qkv [T, out]``."""
        collecting_ns = time.monotonic_ns()
        assert self._submitted is not None
        layer, deal = self._submitted
        ticket = self.ticket
        sums = [qkv[part.start : part.stop] for part in deal.parts]  # while workers may still be at it
        is_whole = self._finish(ticket, layer, deal)
        self.ring.signal_collected(ticket)
        for total, y in zip(sums, deal.y[ticket % SLOTS], strict=True):
            total.add_(y)
        self.ring.free(ticket)
        now_ns = time.monotonic_ns()
        self._submitted = None
        if is_whole:
            self._note_times(ticket, deal, self._submitted_ns, collecting_ns, now_ns)

    def settle(self) -> None:
        """Block until all that was added is there. It is."""

    def close(self) -> None:
        """End the workers."""
        self.ring.shut_down()
        for helper in self._helpers:
            helper.close()
        for arena in self._others:
            arena.close()
        self.ring.close()

    def _collect_all(self) -> None:
        """Wait for workers that may still be at it."""
        if self._submitted is not None:  # the step has failed
            _, deal = self._submitted
            self.add_to(torch.empty(max(part.stop for part in deal.parts), self.ring.shape.outputs))

    def _finish(self, ticket: int, layer: int, deal: RowAssignment) -> bool:
        """Wait until all of a ticket's y is there; False if this thread had to compute some of it."""
        lost = [worker for worker in deal.workers if not self._wait_for(ticket, worker)]
        slices = [part for part in deal.slices if part.worker in lost]
        began_ns = time.monotonic_ns()
        for part in slices:
            self._own.compute(ticket, layer, part)
        for worker in lost:
            self.ring.signal_y(ticket, worker, began_ns, time.monotonic_ns())
        self.rescued_slices += len(slices)
        return not lost

    def _note_times(self, ticket: int, deal: RowAssignment, submitted_ns: int, collecting_ns: int, now_ns: int) -> None:
        began_ns, ended_ns = zip(*(self.ring.times_ns(ticket, worker) for worker in deal.workers), strict=True)
        self.computed_s = max(end - begin for begin, end in zip(began_ns, ended_ns, strict=True)) / 1e9
        handover_ns = min(began_ns) - submitted_ns + now_ns - max(*ended_ns, collecting_ns)
        self.handovers_s.append(handover_ns / 1e9)

    def _wait_for(self, ticket: int, number: int) -> bool:
        """Wait for a worker's part of a ticket; False if it is lost, in which case it has ended."""
        worker = self._at_work.get(number)
        if worker is None:
            return self.ring.has_y(ticket, number)
        rests, gives_up_at_s = Backoff(), time.monotonic() + self._timeout_s
        while True:
            for _ in range(LOOKS):
                if self.ring.has_y(ticket, number):
                    return True
            has_ended = worker.has_ended.is_set() and not self.ring.has_y(
                ticket, number
            )  # its last act may have been y
            if has_ended or time.monotonic() >= gives_up_at_s or self.ring.has_error(ticket, number):
                worker.end()
                del self._at_work[number]
                return False
            rests.rest()


class _Given(NamedTuple):
    """A ticket whose y may not all be there.

    Attributes:
        ticket: which.
        layer: of the model.
        deal: whose rows are whose.
        x_is_there: a mark.
        at_ns: when it was given to the device.
    """

    ticket: int
    layer: int
    deal: RowAssignment
    x_is_there: StreamEvent
    at_ns: int


class DevicePool(HostPool):
    """See the module, and ``HostPool``.

    The thread is no more than ``SLOTS`` tickets ahead of the workers. Before it gets further, and at the end of a step,
    it looks after them: rows of a worker that is lost it computes and signals in that worker's stead, since the stream
    waits until somebody does. A slot is used again without asking: the stream reads y before it writes the next x.

    Args:
        device: computes; its steps' stream is that of the calling thread.
        exchange: its own.
        processes, cores, arenas, sizes: see ``HostPool``; there is one arena.

    Raises:
        ExecutorError: the device does not take the ring.

    Attributes:
        handovers_s: of tickets that were waited for with :meth:`settle`.
    """

    def __init__(
        self,
        device: DeviceBackend,
        exchange: StreamSignals,
        processes: Sequence[HelperProcess],
        cores: Sequence[int | None],
        arenas: Sequence[HostArena],
        sizes: PoolSizes,
    ) -> None:
        super().__init__(processes, cores, arenas, sizes)
        self._stream, self._exchange = device.steps, exchange
        self._x = torch.from_numpy(self.ring.x).view(sizes.dtype)
        self._open: deque[_Given] = deque()
        self._last: _Given | None = None
        try:
            self._unregister = device.register(torch.from_numpy(self.ring.memory))
        except RuntimeError as error:
            super().close()
            raise ExecutorError(f"the device does not take the memory of host workers: {error}") from error

    def submit(self, layer: int, x: Tensor, deal: RowAssignment) -> None:
        """See ``HostPool``; ``x`` is the device's, and rows of it are copied when the stream comes to it."""
        while len(self._open) >= SLOTS:
            self._collect()
        at_ns = time.monotonic_ns()
        ticket = self.ticket = self.ticket + 1
        slot = self._x[self.ring.slot(ticket)]
        self.ring.describe(ticket, self._steps, layer, deal.number)
        row = 0
        for part in deal.parts:
            rows = part.stop - part.start
            self._stream.copy(x[part.start : part.stop], slot[row : row + rows])
            row += rows
        self._exchange.signal(torch.from_numpy(self.ring.x_word(ticket)), ticket)
        self._open.append(_Given(ticket, layer, deal, self._stream.record_event(), at_ns))

    def add_to(self, qkv: Tensor) -> None:
        """Let the stream wait for what was submitted, and add it to its rows of ``qkv [T, out]``."""
        ticket, _, deal, _, _ = self._open[-1]
        for worker in deal.workers:
            self._exchange.wait_for(torch.from_numpy(self.ring.y_word(ticket, worker)), ticket)
        for part, y in zip(deal.parts, deal.y[self.ring.slot(ticket)], strict=True):
            self._exchange.add(y, qkv[part.start : part.stop])

    def settle(self) -> None:
        """Block until all that was added is there.

        Raises:
            RuntimeError: the device has failed.
        """
        self._collect_all()
        self._stream.record_event().wait()
        if self._last is not None:
            self._note_times(self._last.ticket, self._last.deal, self._last.at_ns, 0, time.monotonic_ns())
            self._last = None

    def close(self) -> None:
        """End the workers; the device has done all steps."""
        self._unregister()
        super().close()

    def _collect_all(self) -> None:
        while self._open:
            self._collect()

    def _collect(self) -> None:
        """Wait for the workers of the oldest ticket, and do what those that are lost have not done."""
        given = self._open.popleft()
        given.x_is_there.wait()
        self._last = given if self._finish(given.ticket, given.layer, given.deal) else None
