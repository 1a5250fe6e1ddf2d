"""Rank 0's host workers beside a device that computes behind the rank's thread.

TOPPINGS, section 4.1: the base model's process never waits for the device to hand rows over; signals are work of its
stream, as copies are. For each ticket the stream copies x into the ring, writes ``x_ready``, goes on with the base
product, waits for ``y_ready``, and adds y.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.engine.device import Device, Exchange, Mark
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.helper_process import HelperProcess
from lorikeet.engine.host_lora.pool import SLOTS, Deal, HostPool, PoolSizes
from lorikeet.memory.host_arena import HostArena


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
    deal: Deal
    x_is_there: Mark
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
        device: Device,
        exchange: Exchange,
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

    def submit(self, layer: int, x: Tensor, deal: Deal) -> None:
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
        self._open.append(_Given(ticket, layer, deal, self._stream.mark(), at_ns))

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
        self._stream.mark().wait()
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
