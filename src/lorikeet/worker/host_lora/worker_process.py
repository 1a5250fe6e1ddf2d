"""The host worker process: one thread that computes the LoRA delta of adapters that are being loaded.

It is a separate process so that it uses neither the interpreter lock nor the threads of the rank. It reads weights in
place from the host arenas, and exchanges x and y through the ring that it shares with its rank.

Started as ``python -m lorikeet.worker.host_lora.worker_process FD``, where FD is an inherited connection. It receives a
:class:`HostWorkerSetup`, the file descriptors of the ring and of each rank's host arena, and then a :class:`BeginStep`
for each step with assisted prefills. Between steps it waits for the connection; within a step it polls the ring, first
busily, then with short sleeps. It ends when the connection is closed, which also happens when its parent is killed.
"""

import ctypes
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import msgspec
import torch

from lorikeet.core.geometry import ModelGeometry
from lorikeet.kernels.devices import torch_dtype
from lorikeet.memory.host_arena import HostArena
from lorikeet.worker.host_lora.ring import SLEEP_S, Ring, RingShape
from lorikeet.worker.host_lora.worker import HostAdapter, SliceWorker

_POLLS = 100
"""Polls of the ring between two reads of the clock."""

_PR_SET_TIMERSLACK = 29


class HostWorkerSetup(msgspec.Struct, frozen=True):
    """The first message to a worker.

    Attributes:
        shape: shape of the ring.
        number: number of the worker.
        geometry: sizes of the rank's share of the model.
        elements: elements of a block of the host arena.
        cores: cores that the worker may run on. They replace the affinity that the process inherits.
        spin_s: seconds for which the worker polls busily for the next ticket.
    """

    shape: RingShape
    number: int
    geometry: ModelGeometry
    elements: int
    cores: frozenset[int]
    spin_s: float


class BeginStep(msgspec.Struct, frozen=True):
    """A message to a worker: a step with assisted prefills begins.

    Attributes:
        step: number of the step. The ring's ``ended`` shows when the step is over.
        ticket: first ticket of the step.
        adapters: the adapters that slices refer to.
    """

    step: int
    ticket: int
    adapters: tuple[HostAdapter, ...]


class HostWorkerReady(msgspec.Struct, frozen=True):
    """A message from a worker that is ready."""


_SETUP = msgspec.msgpack.Decoder(HostWorkerSetup)
_BEGIN = msgspec.msgpack.Decoder(BeginStep)


def run_step(
    worker: SliceWorker, ring: Ring, begin: BeginStep, number: int, spin_s: float, connection: Connection
) -> None:
    """Compute the worker's slices until the step ends or a new message arrives, which means the same.

    Raises:
        Exception: a ticket failed. The error has been signalled in the ring.
    """
    worker.begin(begin.adapters)
    worker.prepare()
    ticket = begin.ticket
    while _await(ring, ticket, begin.step, spin_s, connection):
        try:
            worker.run(ticket)
        except Exception:
            ring.signal_error(ticket, number)
            raise
        ticket += 1


def _await(ring: Ring, ticket: int, step: int, spin_s: float, connection: Connection) -> bool:
    """Wait for a ticket of the step.

    Return False if the step has ended or a message has arrived.

    If the next step has begun, the ticket may belong to that step.
    """
    sleep_at_s = time.monotonic() + spin_s
    while True:
        for _ in range(_POLLS):
            if ring.has_x(ticket):
                return ring.step(ticket) == step
            if ring.ended >= step:
                return False
            os.sched_yield()
        if ring.is_shut_down:
            return False
        # select sleeps, but returns immediately if the rank has ended.
        if time.monotonic() >= sleep_at_s and select.select([connection], [], [], SLEEP_S)[0]:
            return False


def main() -> None:
    """Run steps until the connection is closed."""
    # The rank decides when this process ends; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    _sleep_precisely()
    connection = Connection(int(sys.argv[1]))
    try:
        setup = _SETUP.decode(connection.recv_bytes())
        os.sched_setaffinity(0, setup.cores)
        ring = Ring.attached(recv_handle(connection), setup.shape)
        dtype = torch_dtype(setup.shape.dtype)
        block_bytes = setup.elements * dtype.itemsize
        arenas = [HostArena.attached(recv_handle(connection), block_bytes) for _ in range(setup.shape.ranks)]
        blocks = [torch.from_numpy(arena.bytes).view(dtype) for arena in arenas]
        worker = SliceWorker(ring, setup.number, blocks, setup.geometry)
        connection.send_bytes(msgspec.msgpack.encode(HostWorkerReady()))
        while not ring.is_shut_down:
            begin = _BEGIN.decode(connection.recv_bytes())
            run_step(worker, ring, begin, setup.number, setup.spin_s, connection)
    except (EOFError, ConnectionError):
        pass  # The rank has ended.


def _sleep_precisely() -> None:
    """Set the timer slack to 1 ns, so that short sleeps do not take 50 µs longer."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
