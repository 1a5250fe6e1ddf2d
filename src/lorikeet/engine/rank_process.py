"""The body of a tensor-parallel rank above 0: a process that follows rank 0 in lock-step."""

import logging
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import msgspec
import torch

from lorikeet.config import Settings
from lorikeet.core.garbage import long_lived
from lorikeet.core.plan import StepPlan, TransferDone
from lorikeet.engine.arena_sizes import measured_step_bytes
from lorikeet.engine.cores import CoreShare, asked_threads
from lorikeet.engine.host_lora.follower import HostFollower
from lorikeet.engine.host_lora.layout import Ring, RingShape
from lorikeet.engine.host_lora.start import wanted_workers
from lorikeet.engine.loader import start_loader_process
from lorikeet.engine.rank import Rank, sampling_steps
from lorikeet.engine.rank_setup import allocate_arena, load_rank, max_model_len
from lorikeet.engine.transfers import Transfers
from lorikeet.models.parallel import DistributedGroup, Group
from lorikeet.presets import resolve_preset

_LOG = logging.getLogger(__name__)


class ArenaSizes(msgspec.Struct, frozen=True, tag=True):
    """To a rank: its arenas have so many blocks."""

    device_blocks: int
    host_blocks: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """To a rank: run this plan."""

    plan: StepPlan


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a rank: end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it has reached the next stage of its start."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """From a rank: a transfer has ended."""

    done: TransferDone


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its last words."""

    error: str


ToRank = ArenaSizes | Run | Stop
FromRank = Ready | Moved | Failed
TO_RANK = msgspec.msgpack.Decoder(ToRank)
FROM_RANK = msgspec.msgpack.Decoder(FromRank)

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What joins the ranks, by device."""


def run_rank(connection: Connection, settings: Settings, folder: Path, rank: int, meet_at: str) -> None:
    """Be rank ``rank`` until told to stop, or until rank 0 is gone. The body of a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches every process; rank 0 decides what it means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = _Reporter(connection)
    try:
        _serve(connection, report, settings, folder, rank, meet_at)
    except EOFError:
        _LOG.info("rank %d: rank 0 has gone", rank)
    except Exception as error:
        _LOG.exception("rank %d", rank)
        report(Failed(f"{type(error).__name__}: {error}"))
        # Threads or collectives may hang by now; nothing is left here that could be saved.
        os._exit(1)


def _serve(
    connection: Connection, report: "_Reporter", settings: Settings, folder: Path, rank: int, meet_at: str
) -> None:
    engine = settings.engine
    cores = CoreShare(asked_threads(engine.threads))
    loader = start_loader_process()
    report(Ready())
    group = DistributedGroup(rank, engine.tensor_parallel, meet_at, BACKENDS[engine.device])
    model = load_rank(settings, folder, group)
    report(Ready())
    measured_step_bytes(settings, model, max_model_len(settings, model.config))
    message = TO_RANK.decode(connection.recv_bytes())
    if not isinstance(message, ArenaSizes):
        return
    arena = allocate_arena(model, message.device_blocks, engine)
    transfers = Transfers(
        arena, message.host_blocks, model.geometry, rank, group.size, loader, engine, lambda done: report(Moved(done))
    )
    transfers.loader.wait_until_ready()
    report(Ready())
    host_lora = None
    if wanted_workers(engine, resolve_preset(engine.preset)[1]):
        host_lora = _join_ring(connection, transfers, rank)
    own = Rank(model, arena, engine.block_size, transfers, cores, host_lora)
    with long_lived():
        while isinstance(message := TO_RANK.decode(connection.recv_bytes()), Run):
            follow(own, message.plan, group)
    if host_lora is not None:
        host_lora.close()
    transfers.close()
    cores.close()
    group.close()


def _join_ring(connection: Connection, transfers: Transfers, rank: int) -> HostFollower:
    """Give rank 0 this rank's host tier, and follow it in its ring from now on."""
    send_handle(connection, transfers.host_arena.fd, os.getppid())
    shape = msgspec.msgpack.decode(connection.recv_bytes(), type=RingShape)
    ring = Ring.attached(recv_handle(connection), shape)
    transfers.on_arrival = partial(ring.note_arrived, rank)
    return HostFollower(ring, rank)


def follow(rank: Rank, plan: StepPlan, group: Group) -> None:
    """Run a plan as rank 0 does, with the tokens that rank 0 samples."""
    rank.apply(plan)
    steps = sampling_steps(plan)
    with rank.at_work(plan):
        for ran in range(plan.repeat if plan.sequences else 0):
            rank.forward(plan, ran, logits=False)
            told = group.broadcast(torch.zeros(1 + len(steps), dtype=torch.int64, device=rank.device)).tolist()
            rank.append(steps, told[1:])
            if not told[0]:
                break


class _Reporter:
    """Sends messages to rank 0 from any thread; there may be nobody left to hear them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, message: FromRank) -> None:
        with self._lock, suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))


def _end_with_parent() -> None:
    """A rank must not outlive rank 0, and one that waits inside a collective would not notice."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
