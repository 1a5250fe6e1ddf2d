"""The body of a host worker: a process of one thread that computes what cold adapters add to prefills.

It is a process of its own so that it takes neither the interpreter nor the threads of the rank. It reads weights in
place, from the host arenas, and x and y in the ring that it shares with its rank.

Started as ``python -m lorikeet.worker.host_lora.worker_process FD``, an inherited connection. Over that come a
:class:`HostWorkerSetup`, the file descriptors of the ring and of each rank's host arena, and then a :class:`BeginStep`
for each step that needs workers. Between steps it waits for the connection; within one it polls the ring, first without
rest, then with short naps. The process ends when the connection does, which is when whoever started it has ended, in
whatever way.
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
from lorikeet.kernels.tensors import torch_dtype
from lorikeet.memory.host_arena import HostArena
from lorikeet.worker.host_lora.ring import NAP_S, Ring, RingShape
from lorikeet.worker.host_lora.worker import HostAdapter, SliceWorker

_LOOKS = 100
"""Looks at the ring between two at the clock."""

_PR_SET_TIMERSLACK = 29


class HostWorkerSetup(msgspec.Struct, frozen=True):
    """To the worker, first of all.

    Attributes:
        shape: of the ring.
        number: which worker it is.
        geometry: sizes of the rank's share of the model.
        elements: of a block of the host arena.
        cores: that it may run on, whatever whoever starts it is held to at that moment.
        spin_s: how long it polls without rest for the next ticket.
    """

    shape: RingShape
    number: int
    geometry: ModelGeometry
    elements: int
    cores: frozenset[int]
    spin_s: float


class BeginStep(msgspec.Struct, frozen=True):
    """To the worker: a step begins in which there may be something to compute.

    Attributes:
        step: counts such steps; the ring tells when it has ended.
        ticket: the first of the step.
        adapters: those that its slices name.
    """

    step: int
    ticket: int
    adapters: tuple[HostAdapter, ...]


class HostWorkerReady(msgspec.Struct, frozen=True):
    """From the worker: it is ready."""


_SETUP = msgspec.msgpack.Decoder(HostWorkerSetup)
_BEGIN = msgspec.msgpack.Decoder(BeginStep)


def run_step(
    worker: SliceWorker, ring: Ring, begin: BeginStep, number: int, spin_s: float, connection: Connection
) -> None:
    """Compute the worker's slices until the step ends, or a message shows that it has.

    Raises:
        Exception: whatever went wrong with a ticket; the ring says so, too.
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
    """Wait for a ticket of the step; False if it has ended or the connection has something to say.

    By the time that a worker looks, the next step may have begun, and the ticket may be of that one.
    """
    rest_at_s = time.monotonic() + spin_s
    while True:
        for _ in range(_LOOKS):
            if ring.has_x(ticket):
                return ring.step(ticket) == step
            if ring.ended >= step:
                return False
            os.sched_yield()
        if ring.is_shut_down:
            return False
        # Select naps, and wakes at once if the rank has ended.
        if time.monotonic() >= rest_at_s and select.select([connection], [], [], NAP_S)[0]:
            return False


def main() -> None:
    """Do what the connection says until it ends."""
    # Whoever started this process decides when it ends; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    _nap_precisely()
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
        pass  # the rank has ended


def _nap_precisely() -> None:
    """Let naps take what they are asked to, and not 50 µs more."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
