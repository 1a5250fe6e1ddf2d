"""Rank 0's pools of host workers for CPU ranks and for a GPU: they assign rows and collect the results."""

import ctypes
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.machine import usable_cores
from lorikeet.costs.assist_costs import WORKER_TOKENS, slice_rows
from lorikeet.kernels.devices import torch_dtype
from lorikeet.memory.host_arena import HostArena
from lorikeet.worker.helper_process import Helper, HelperProcess, start_helper_process
from lorikeet.worker.host_lora.ring import POLLS, Backoff, Ring, RingShape, RingSlice
from lorikeet.worker.host_lora.worker import HostAdapter, ProductWidths, SliceWorker, narrowed, site_of
from lorikeet.worker.host_lora.worker_process import BeginStep, HostWorkerSetup
from lorikeet.worker.transfer.device import DeviceBackend, StreamEvent, StreamSignals

SLOTS = 2
"""Slots of the ring; one slot is written while another is read."""

TIMEOUT_S = 5.0
"""A worker that has not answered after this time counts as lost."""

HANDOVERS = 4096
"""Number of latest tickets whose hand-over times are kept."""

OWN_CORE_SPIN_S = 5e-3
SHARED_CORE_SPIN_S = 50e-6
"""Time for which a worker polls busily between two layers: about a layer's time if it has its own core."""

_RANK = -1


def start_worker_process() -> HelperProcess:
    """Start a worker process.

    The process becomes ready in the background within a few seconds.

    Raises:
        ExecutorError: the process cannot be started.
    """
    return start_helper_process("lorikeet.worker.host_lora.worker_process", "a host worker")


class HostRows(NamedTuple):
    """Rows ``start`` to ``stop`` (half-open) for the host. ``adapter`` is an index in the step's list of adapters."""

    adapter: int
    start: int
    stop: int


class _RowCopy(NamedTuple):
    """A copy of ``size`` bytes from byte ``source`` of x to byte ``target`` of a slot."""

    source: int
    target: int
    size: int


class RowAssignment:
    """An assignment of a batch's rows to workers.

    Many layers of a step share an assignment, so it is made once.

    Attributes:
        parts: the assigned rows.
        number: number of the cut in the ring.
        slices: the cut's slices.
        workers: numbers of the workers that have slices.
    """

    def __init__(
        self,
        parts: Sequence[HostRows],
        number: int,
        slices: list[RingSlice],
        row_bytes: Mapping[str, int],
        y: Mapping[str, Tensor],
    ) -> None:
        self.parts = tuple(parts)
        self.number = number
        self.slices = slices
        self.workers = tuple(dict.fromkeys(part.worker for part in slices))
        self._row_bytes = row_bytes
        self._all_y = y
        self._copies: dict[str, list[_RowCopy]] = {}
        self._y: dict[tuple[str, int], list[Tensor]] = {}
        self._first_rows = list(accumulate((part.stop - part.start for part in parts), initial=0))

    def copies(self, product: str) -> list[_RowCopy]:
        """Return the copies that put the rows of a product's x into a slot."""
        if product not in self._copies:
            size = self._row_bytes[product]
            self._copies[product] = [
                _RowCopy(part.start * size, row * size, (part.stop - part.start) * size)
                for part, row in zip(self.parts, self._first_rows, strict=False)
            ]
        return self._copies[product]

    def y(self, product: str, slot: int) -> list[Tensor]:
        """Return views of each part's results in a slot."""
        if (product, slot) not in self._y:
            y = self._all_y[product][slot]
            self._y[product, slot] = [y[first:stop] for first, stop in pairwise(self._first_rows)]
        return self._y[product, slot]


def y_of(ring: Ring, rank: int, outputs: Mapping[str, int]) -> dict[str, Tensor]:
    """Return a rank's y by product: ``[slots, rows, out]`` of the model's dtype.

    ``outputs`` has the widths of the products.
    """
    y = torch.from_numpy(ring.y).view(torch_dtype(ring.shape.dtype))[:, rank]
    return {product: narrowed(y, width) for product, width in outputs.items()}


class PoolSizes(NamedTuple):
    """Sizes of a pool.

    Attributes:
        dtype: dtype of the model.
        geometry: sizes of a rank's share of the model.
        rows: maximum number of rows in a step.
        parts: maximum number of parts (sequences) in a step.
        timeout_s: seconds without an answer after which a worker counts as lost.
    """

    dtype: torch.dtype
    geometry: ModelGeometry
    rows: int
    parts: int
    timeout_s: float = TIMEOUT_S


class HostPool:
    """Sends rows to workers and collects the results, on a CPU rank.

    One thread uses the pool. A step is enclosed by :meth:`begin` and :meth:`end`. Within a step each :meth:`submit` is
    followed by :meth:`add_to`, and the caller computes the base model in between. No rows are lost: if a worker dies,
    fails or does not answer, the caller computes its rows once the worker has ended and cannot write any more.

    Args:
        processes: the worker processes. The pool owns them.
        cores: the core of each worker, None for any core.
        arenas: the host arena of each rank, starting with this rank's. The pool owns the other ranks' arenas.
        sizes: sizes of the pool.

    Attributes:
        worker_tokens: number of rows of one request that a worker gets while there are enough workers.
        handovers_s: seconds spent on hand-over for the latest tickets: from x in the batch to the first worker's start,
            plus from the last worker's end to the sums in the batch. The caller's other work in between does not count.
        computed_s: compute time of the latest ticket in seconds, the maximum over workers.
        rescued_slices: number of slices that the rank has computed itself because their worker was lost.
        ring: shared memory with the workers.
        ticket: number of the latest ticket.
    """

    def __init__(
        self,
        processes: Sequence[HelperProcess],
        cores: Sequence[int | None],
        arenas: Sequence[HostArena],
        sizes: PoolSizes,
    ) -> None:
        dtype, geometry, rows, parts, timeout_s = sizes
        widths = self._widths = ProductWidths(geometry)
        blocks = [torch.from_numpy(arena.bytes).view(dtype) for arena in arenas]
        shape = RingShape(
            slots=SLOTS,
            descriptors=2 * geometry.layers * len(PRODUCTS),
            rows=rows,
            inputs=max(widths.inputs.values()),
            outputs=max(widths.outputs.values()),
            ranks=len(arenas),
            workers=len(processes),
            cuts=4 * geometry.layers,  # A step has at most one cut per layer, and one for the rows that sample.
            slices=parts + len(processes),
            dtype=str(dtype).removeprefix("torch."),
        )
        self.worker_tokens = WORKER_TOKENS
        self.handovers_s: deque[float] = deque(maxlen=HANDOVERS)
        self.computed_s = 0.0
        self.rescued_slices = 0
        self.ring = Ring.create(shape)
        self._timeout_s = timeout_s
        self._y = y_of(self.ring, 0, widths.outputs)
        self._others = tuple(arenas[1:])
        self._row_bytes = {product: width * dtype.itemsize for product, width in widths.inputs.items()}
        self._slots = [int(x.ctypes.data) for x in self.ring.x]
        self._fallback = SliceWorker(self.ring, _RANK, blocks, geometry)
        every_core = frozenset(usable_cores())
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
        self._active: dict[int, HelperProcess] = {}
        self._submitted: tuple[int, str, RowAssignment] | None = None
        self._submitted_ns = 0

    @property
    def workers(self) -> int:
        """Number of workers, ready or not."""
        return len(self._helpers)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        return [worker.process.pid for helper in self._helpers if (worker := helper.ready) is not None]

    @property
    def lost_workers(self) -> int:
        """Number of worker processes that died."""
        return sum(helper.lost for helper in self._helpers)

    def wait_until_ready(self) -> None:
        """Block until all workers are ready.

        Raises:
            ExecutorError: a worker could not be started.
        """
        for helper in self._helpers:
            helper.wait_until_ready()

    def begin(self, adapters: Sequence[HostAdapter]) -> None:
        """Begin a step: wake the workers and send them the step's adapters."""
        self._steps += 1
        self._fallback.begin(adapters)
        message = BeginStep(self._steps, self.ticket + 1, tuple(adapters))
        self._active = {
            number: worker for number, helper in enumerate(self._helpers) if (worker := helper.ready) is not None
        }
        for worker in self._active.values():
            worker.send(message)

    def end(self) -> None:
        """End the step."""
        self._collect_all()
        self.ring.ended = self._steps
        for number in self._active:
            self._helpers[number].note_success()

    def assign(self, parts: Sequence[HostRows]) -> RowAssignment:
        """Assign rows to the workers of this step. The assignment is valid until the end of the step."""
        numbers = list(self._active) or [_RANK]
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

    def submit(self, product: str, layer: int, x: Tensor, assignment: RowAssignment) -> None:
        """Let workers compute the LoRA delta of a product of a layer.

        The rank pays for this call and for :meth:`add_to` on every layer, so both do little work.

        Args:
            product: a key of ``core.geometry.PRODUCTS``.
            layer: index of the layer.
            x: ``[rows, in]`` of the batch, contiguous.
            assignment: the rows of x that each worker computes.
        """
        self._submitted_ns = time.monotonic_ns()
        ticket = self.ticket = self.ticket + 1
        ring = self.ring
        ring.check_free(ticket)
        source = x.data_ptr()
        target = self._slots[ticket % SLOTS]
        for copy in assignment.copies(product):
            ctypes.memmove(target + copy.target, source + copy.source, copy.size)
        site = site_of(layer, product)
        ring.describe(ticket, self._steps, site, assignment.number)
        ring.signal_x(ticket)
        self._submitted = site, product, assignment

    def add_to(self, out: Tensor) -> None:
        """Wait for the results of the latest :meth:`submit`, and add them to the rows of ``out [rows, out]``."""
        collecting_ns = time.monotonic_ns()
        assert self._submitted is not None
        site, product, assignment = self._submitted
        ticket = self.ticket
        sums = [out[part.start : part.stop] for part in assignment.parts]  # Workers may still be computing here.
        is_whole = self._finish(ticket, site, assignment)
        self.ring.signal_collected(ticket)
        for total, y in zip(sums, assignment.y(product, ticket % SLOTS), strict=True):
            total.add_(y)
        self.ring.free(ticket)
        now_ns = time.monotonic_ns()
        self._submitted = None
        if is_whole:
            self._note_times(ticket, assignment, self._submitted_ns, collecting_ns, now_ns)

    def settle(self) -> None:
        """Do nothing: :meth:`add_to` has added all results when it returns."""

    def close(self) -> None:
        """Stop the workers."""
        self.ring.shut_down()
        for helper in self._helpers:
            helper.close()
        for arena in self._others:
            arena.close()
        self.ring.close()

    def _collect_all(self) -> None:
        """Wait for workers that may still be computing."""
        if self._submitted is not None:  # The step failed between submit and add_to.
            _, product, assignment = self._submitted
            self.add_to(torch.empty(max(part.stop for part in assignment.parts), self._widths.outputs[product]))

    def _finish(self, ticket: int, site: int, assignment: RowAssignment) -> bool:
        """Wait until y of a ticket is complete. Return False if this thread computed a part of y."""
        lost = [worker for worker in assignment.workers if not self._wait_for(ticket, worker)]
        slices = [part for part in assignment.slices if part.worker in lost]
        began_ns = time.monotonic_ns()
        for part in slices:
            self._fallback.compute(ticket, site, part)
        for worker in lost:
            self.ring.signal_y(ticket, worker, began_ns, time.monotonic_ns())
        self.rescued_slices += len(slices)
        return not lost

    def _note_times(
        self, ticket: int, assignment: RowAssignment, submitted_ns: int, collecting_ns: int, now_ns: int
    ) -> None:
        began_ns, ended_ns = zip(*(self.ring.times_ns(ticket, worker) for worker in assignment.workers), strict=True)
        self.computed_s = max(end - begin for begin, end in zip(began_ns, ended_ns, strict=True)) / 1e9
        handover_ns = min(began_ns) - submitted_ns + now_ns - max(*ended_ns, collecting_ns)
        self.handovers_s.append(handover_ns / 1e9)

    def _wait_for(self, ticket: int, number: int) -> bool:
        """Wait for a worker's slices of a ticket. Return False if the worker is lost; its process has ended then."""
        worker = self._active.get(number)
        if worker is None:
            return self.ring.has_y(ticket, number)
        backoff = Backoff()
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            for _ in range(POLLS):
                if self.ring.has_y(ticket, number):
                    return True
            has_ended = worker.has_ended.is_set() and not self.ring.has_y(
                ticket, number
            )  # The worker may have written y before it ended.
            if has_ended or time.monotonic() >= deadline_s or self.ring.has_error(ticket, number):
                worker.end()
                del self._active[number]
                return False
            backoff.pause()


class _OpenTicket(NamedTuple):
    """A submitted ticket whose y may not be complete yet.

    Attributes:
        ticket: its number.
        site: product of a layer.
        product: a key of ``core.geometry.PRODUCTS``.
        assignment: rows of each worker.
        x_copied: the event after the copy of x.
        at_ns: time at which the ticket was queued, in nanoseconds of the monotonic clock.
    """

    ticket: int
    site: int
    product: str
    assignment: RowAssignment
    x_copied: StreamEvent
    at_ns: int


class DevicePool(HostPool):
    """A pool for a GPU.

    The stream of steps copies x, waits for y and adds it, so the calling thread need not wait.

    The calling thread runs at most ``SLOTS`` tickets ahead of the workers. At this limit, and at the end of a step, the
    thread waits for the workers. The thread computes and signals the rows of a lost worker itself, since the stream
    waits for the signal. A slot can be reused without a check, since the stream reads y before it writes the next x.

    Args:
        device: the device. Its stream of steps is the calling thread's stream.
        signals: the signals of the stream of steps.
        processes, cores, arenas, sizes: see ``HostPool``. There is one arena.

    Raises:
        ExecutorError: the device cannot register the ring.

    Attributes:
        handovers_s: hand-over seconds of the tickets for which only :meth:`settle` waited.
    """

    def __init__(
        self,
        device: DeviceBackend,
        signals: StreamSignals,
        processes: Sequence[HelperProcess],
        cores: Sequence[int | None],
        arenas: Sequence[HostArena],
        sizes: PoolSizes,
    ) -> None:
        super().__init__(processes, cores, arenas, sizes)
        self._stream = device.steps
        self._signals = signals
        x = torch.from_numpy(self.ring.x).view(sizes.dtype)
        self._x = {product: narrowed(x, width) for product, width in self._widths.inputs.items()}
        self._open: deque[_OpenTicket] = deque()
        self._last: _OpenTicket | None = None
        try:
            self._unregister = device.register(torch.from_numpy(self.ring.memory))
        except RuntimeError as error:
            super().close()
            raise ExecutorError(f"the device cannot register the shared memory of host workers: {error}") from error

    def submit(self, product: str, layer: int, x: Tensor, assignment: RowAssignment) -> None:
        """Submit rows of ``x``, which is on the device. The stream copies the rows."""
        while len(self._open) >= SLOTS:
            self._collect()
        at_ns = time.monotonic_ns()
        ticket = self.ticket = self.ticket + 1
        slot = self._x[product][self.ring.slot(ticket)]
        site = site_of(layer, product)
        self.ring.describe(ticket, self._steps, site, assignment.number)
        row = 0
        for part in assignment.parts:
            rows = part.stop - part.start
            self._stream.copy(x[part.start : part.stop], slot[row : row + rows])
            row += rows
        self._signals.signal(torch.from_numpy(self.ring.x_word(ticket)), ticket)
        self._open.append(_OpenTicket(ticket, site, product, assignment, self._stream.record_event(), at_ns))

    def add_to(self, out: Tensor) -> None:
        """Queue the wait for the results and their addition to the rows of ``out [rows, out]``."""
        ticket, _, product, assignment, _, _ = self._open[-1]
        for worker in assignment.workers:
            self._signals.wait_for(torch.from_numpy(self.ring.y_word(ticket, worker)), ticket)
        for part, y in zip(assignment.parts, assignment.y(product, self.ring.slot(ticket)), strict=True):
            self._signals.add(y, out[part.start : part.stop])

    def settle(self) -> None:
        """Block until all results are added.

        Raises:
            RuntimeError: the device has failed.
        """
        self._collect_all()
        self._stream.record_event().wait()
        if self._last is not None:
            self._note_times(self._last.ticket, self._last.assignment, self._last.at_ns, 0, time.monotonic_ns())
            self._last = None

    def close(self) -> None:
        """Stop the workers. The device must have finished all steps before."""
        self._unregister()
        super().close()

    def _collect_all(self) -> None:
        while self._open:
            self._collect()

    def _collect(self) -> None:
        """Wait for the workers of the oldest ticket, and compute the slices of lost workers."""
        ticket = self._open.popleft()
        ticket.x_copied.wait()
        self._last = ticket if self._finish(ticket.ticket, ticket.site, ticket.assignment) else None
