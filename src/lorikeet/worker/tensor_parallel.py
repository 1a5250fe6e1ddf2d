"""Runs the ranks above 0 in processes that follow rank 0 step by step."""

import logging
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import cast

import msgspec
import torch

from lorikeet.config import EngineSettings, Settings
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.core.plan import StepPlan, TransferDone
from lorikeet.core.process_tuning import frozen_gc
from lorikeet.memory.host_arena import HostArena
from lorikeet.models.config import max_model_len
from lorikeet.models.parallel import DistributedRankGroup, RankGroup
from lorikeet.presets import resolve_preset
from lorikeet.worker.host_lora.assisted_step import HostLoraFollower
from lorikeet.worker.host_lora.ring import Ring, RingShape
from lorikeet.worker.host_lora.start import wanted_workers
from lorikeet.worker.memory_profiling import measured_step_bytes
from lorikeet.worker.rank import Rank, sampling_steps
from lorikeet.worker.rank_setup import allocate_arena, load_rank
from lorikeet.worker.remote_ranks import wait_for_ranks
from lorikeet.worker.threads import CpuBudget, requested_threads
from lorikeet.worker.transfer.finished import FinishedTransfers
from lorikeet.worker.transfer.loader import start_loader_process
from lorikeet.worker.transfer.transfers import TransferManager

_LOG = logging.getLogger(__name__)


class ArenaSizes(msgspec.Struct, frozen=True, tag=True):
    """A message to a rank: allocate arenas with these numbers of blocks."""

    device_blocks: int
    host_blocks: int


class RunPlan(msgspec.Struct, frozen=True, tag=True):
    """A message to a rank: run this plan."""

    plan: StepPlan


class ReadHost(msgspec.Struct, frozen=True, tag=True):
    """A message to a rank: send the bytes of these host blocks, once the plans before it have run."""

    blocks: tuple[BlockId, ...]


class WriteHost(msgspec.Struct, frozen=True, tag=True):
    """A message to a rank: write these host blocks."""

    blocks: tuple[BlockId, ...]
    contents: tuple[bytes, ...]


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """A message to a rank: stop."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank that has finished a stage of its start."""


class TransferEnded(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank: a transfer has ended."""

    done: TransferDone


class HostRead(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank: the bytes of the host blocks of a ``ReadHost``."""

    contents: tuple[bytes, ...]


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank that has failed and ends."""

    error: str


ToRank = ArenaSizes | RunPlan | ReadHost | WriteHost | StopRank
FromRank = RankReady | TransferEnded | HostRead | RankFailed
TO_RANK = msgspec.msgpack.Decoder(ToRank)
FROM_RANK = msgspec.msgpack.Decoder(FromRank)

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Backend of torch.distributed by device."""


def run_rank(
    connection: Connection, settings: Settings, folder: Path, rank: int, init_url: str, gpu: int | None = None
) -> None:
    """Run rank ``rank`` until ``StopRank`` arrives or rank 0 has ended.

    This is the main function of the rank's process.

    Args:
        connection: connection to rank 0.
        settings: settings of the engine.
        folder: folder of the model.
        rank: its number.
        init_url: address at which the ranks meet for ``torch.distributed``.
        gpu: number of the GPU on this machine, if it differs from the rank's number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process, and rank 0 handles it.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = _Reporter(connection)
    try:
        _serve(connection, report, settings, folder, rank, init_url, gpu)
    except EOFError:
        _LOG.info("rank %d stops: rank 0 has ended", rank)
    except Exception as error:
        _LOG.exception("rank %d failed", rank)
        report(RankFailed(f"{type(error).__name__}: {error}"))
        # Threads or collective operations may hang by now, so the process ends without cleaning up.
        os._exit(1)


def _serve(
    connection: Connection,
    report: "_Reporter",
    settings: Settings,
    folder: Path,
    rank: int,
    init_url: str,
    gpu: int | None,
) -> None:
    engine = settings.engine
    cores = CpuBudget(requested_threads(engine.threads))
    loader = start_loader_process()
    report(RankReady())
    group = _join(rank, engine, init_url)
    model = load_rank(settings, folder, group, gpu=gpu)
    report(RankReady())
    measured_step_bytes(settings, model, max_model_len(settings, model.config))
    message = TO_RANK.decode(connection.recv_bytes())
    if not isinstance(message, ArenaSizes):
        return
    arena = allocate_arena(model, message.device_blocks, engine)
    transfers = TransferManager(
        arena,
        message.host_blocks,
        model.geometry,
        group.rank,
        group.size,
        loader,
        engine,
        lambda done: report(TransferEnded(done)),
        whole=model.whole_geometry,
    )
    transfers.loader.wait_until_ready()
    report(RankReady())
    host_lora = None
    if wanted_workers(engine, resolve_preset(engine.preset)[1]):
        host_lora = _join_ring(connection, transfers, rank, model.geometry)
    own = Rank(model, arena, engine.block_size, transfers, cores, host_lora)
    with frozen_gc():
        while True:
            match TO_RANK.decode(connection.recv_bytes()):
                case RunPlan(plan):
                    follow(own, plan, group)
                case ReadHost(blocks):
                    report(HostRead(transfers.host_arena.read(blocks)))
                case WriteHost(blocks, contents):
                    transfers.host_arena.write(blocks, contents)
                case _:
                    break
    if host_lora is not None:
        host_lora.close()
    transfers.close()
    cores.close()
    group.close()


def _join(number: int, engine: EngineSettings, init_url: str) -> DistributedRankGroup:
    backend = BACKENDS[engine.device]
    stages = engine.pipeline_parallel
    return DistributedRankGroup(number, engine.tensor_parallel, init_url, backend, stages=stages)


def _join_ring(
    connection: Connection, transfers: TransferManager, rank: int, geometry: ModelGeometry
) -> HostLoraFollower:
    """Send the file descriptor of this rank's host arena to rank 0, and attach to the ring of host workers."""
    send_handle(connection, transfers.host_arena.fd, os.getppid())
    shape = msgspec.msgpack.decode(connection.recv_bytes(), type=RingShape)
    ring = Ring.attached(recv_handle(connection), shape)
    transfers.on_arrival = partial(ring.note_arrived, rank)
    return HostLoraFollower(ring, rank, geometry)


def follow(rank: Rank, plan: StepPlan, group: RankGroup) -> None:
    """Run a plan in step with rank 0, using the tokens that rank 0 samples."""
    rank.apply(plan)
    steps = sampling_steps(plan)
    with rank.pin_threads(plan):
        for ran in range(plan.repeat if plan.sequences else 0):
            rank.forward(plan, ran, samples=False)
            received = group.broadcast(torch.zeros(1 + len(steps), dtype=torch.int64, device=rank.device)).tolist()
            rank.append(steps, received[1:])
            if not received[0]:
                break


class _Reporter:
    """Sends messages to rank 0 from any thread. Messages are dropped if rank 0 has ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, message: FromRank) -> None:
        with self._lock, suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))


def _end_with_parent() -> None:
    """End this process when rank 0 has ended. A rank that waits in a collective operation would not notice the end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_CLOSE_TIMEOUT_S = 5.0


class RankProcesses:
    """Rank 0's handle of ranks 1 and above.

    The ranks end with rank 0's process, even if it is killed.

    The ranks are processes on this machine or, with ``rank_address``, on other machines (see ``worker.remote_ranks``).

    Args:
        settings: the engine's settings.
        folder: folder of the model.
        finished: the collector of the ranks' finished transfers.

    Attributes:
        size: number of ranks, rank 0 included.
        group: rank 0's process group; None after closing.

    Raises:
        ExecutorError: a rank did not start.
    """

    def __init__(self, settings: Settings, folder: Path, finished: FinishedTransfers) -> None:
        self.size = settings.engine.ranks
        self._finished = finished
        self._device = torch.device("cuda", 0) if settings.engine.device == "cuda" else torch.device("cpu")
        self._failure: str | None = None
        self._closing = False
        self._failed = threading.Event()
        self._listener: threading.Thread | None = None
        self.group: DistributedRankGroup | None = None
        self._connections: list[Connection] = []
        self._host_reads: queue.SimpleQueue[tuple[int, HostRead | None]] = queue.SimpleQueue()
        self._processes: list[BaseProcess] = []
        self._store = tempfile.TemporaryDirectory(prefix="lorikeet-ranks-")
        if settings.engine.rank_address:
            self._connections, init_url = wait_for_ranks(settings, folder)
        else:
            init_url = f"file://{self._store.name}/store"
            self._start_processes(settings, folder, init_url)
        try:
            self.wait_until_ready()
            try:
                self.group = _join(0, settings.engine, init_url)
            except RuntimeError:  # A rank may have failed during the rendezvous. If so, its error is raised.
                if wait(self._connections, _CLOSE_TIMEOUT_S):
                    self.wait_until_ready()
                raise
        except BaseException:
            self.close()
            raise

    def _start_processes(self, settings: Settings, folder: Path, init_url: str) -> None:
        """Start the ranks on this machine. Its host name need not resolve."""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        spawn = multiprocessing.get_context("spawn")
        for rank in range(1, self.size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=run_rank, args=(theirs, settings, folder, rank, init_url), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Block until every rank has finished the next stage of its start.

        Raises:
            ExecutorError: a rank has died. The message has the rank's error.
        """
        pending = self._ranks()
        while pending:
            for connection in cast("list[Connection]", wait(list(pending))):
                message = _receive(connection)
                rank = pending.pop(connection)
                if isinstance(message, RankFailed):
                    raise ExecutorError(f"rank {rank} did not start: {message.error}")

    def allocate(self, device_blocks: int, host_blocks: int) -> None:
        """Make the ranks allocate their arenas, and wait until all have done so.

        Raises:
            ExecutorError: a rank could not allocate its arenas.
        """
        with suppress(OSError):  # A rank sends its error before it ends.
            self._send(ArenaSizes(device_blocks, host_blocks))
        self.wait_until_ready()

    def host_arenas(self, block_bytes: int) -> list[HostArena]:
        """Return the ranks' host arenas, in blocks of ``block_bytes``.

        Ranks send their arenas if prefills are assisted.

        Raises:
            ExecutorError: a rank has died.
        """
        found: list[HostArena] = []
        try:
            for connection in self._connections:
                found.append(HostArena.attached(recv_handle(connection), block_bytes))
        except (EOFError, OSError, RuntimeError) as error:
            for arena in found:
                arena.close()
            raise ExecutorError(f"rank {len(found) + 1} did not start: {error}") from error
        return found

    def send_ring(self, ring: Ring) -> None:
        """Send the ring of host workers, in which rank 0 publishes its decisions, to the ranks.

        Call it after :meth:`host_arenas`.

        Raises:
            ExecutorError: a rank has died.
        """
        try:
            self._send(ring.shape)
            for connection, process in zip(self._connections, self._processes, strict=True):
                assert process.pid is not None
                send_handle(connection, ring.fd, process.pid)
        except OSError as error:
            raise ExecutorError(f"a rank did not start: {error}") from error

    def watch(self) -> None:
        """Start the thread that watches the other ranks. Call it once the ranks are ready."""
        self._listener = threading.Thread(target=self._listen, name="rank-listener", daemon=True)
        self._listener.start()

    def send(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Each rank starts it immediately."""
        self._send(RunPlan(plan))

    def broadcast(self, token_ids: Sequence[int], *, has_more: bool) -> None:
        """Send a step's tokens to every rank, and whether another step of the plan follows."""
        assert self.group is not None
        self.group.broadcast(torch.tensor([int(has_more), *token_ids], device=self._device))

    def read_host(self, blocks: Sequence[BlockId]) -> list[tuple[bytes, ...]]:
        """Return the bytes of host blocks of each rank, by rank.

        Raises:
            ExecutorError: a rank has died.
        """
        with suppress(OSError):  # The listener reports the death of a rank.
            self._send(ReadHost(tuple(blocks)))
        found: dict[int, tuple[bytes, ...]] = {}
        while len(found) < len(self._connections):
            self.check()
            rank, read = self._host_reads.get()
            if read is not None:
                found[rank] = read.contents
        return [found[rank] for rank in sorted(found)]

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[Sequence[bytes]]) -> None:
        """Write host blocks of each rank, by rank.

        Raises:
            ExecutorError: a rank has died.
        """
        try:
            for connection, parts in zip(self._connections, contents, strict=True):
                connection.send_bytes(msgspec.msgpack.encode(WriteHost(tuple(blocks), tuple(parts))))
        except OSError as error:
            raise ExecutorError(f"a rank has died: {error}") from error

    def check(self, grace_s: float = 0.0) -> None:
        """Check that no rank has died or dies within ``grace_s`` seconds.

        Raises:
            ExecutorError: a rank has died. The message names the rank and the reason.
        """
        if self._failed.wait(grace_s) if grace_s else self._failed.is_set():
            raise ExecutorError(self._failure)

    def close(self) -> None:
        """Stop the ranks, and kill every rank that does not stop in time."""
        self._closing = True
        if self._listener is not None:
            stop = msgspec.msgpack.encode(StopRank())
            for connection in self._connections:
                with suppress(OSError):  # The rank has ended already.
                    connection.send_bytes(stop)
        for process in self._processes:
            process.join(_CLOSE_TIMEOUT_S if self._listener is not None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        if self._listener is not None:
            self._listener.join(None if self._processes else _CLOSE_TIMEOUT_S)  # The rank's machine may be cut off.
        for connection in self._connections:
            connection.close()
        if self.group is not None:
            self.group.close()
            self.group = None
        self._store.cleanup()

    def _ranks(self) -> dict[Connection, int]:
        return {connection: rank for rank, connection in enumerate(self._connections, start=1)}

    def _send(self, message: ToRank | RingShape) -> None:
        encoded = msgspec.msgpack.encode(message)
        for connection in self._connections:
            connection.send_bytes(encoded)

    def _listen(self) -> None:
        """Report the ranks' transfers until every rank has failed or ended. This runs on its own thread."""
        ranks = self._ranks()
        while ranks:
            for connection in cast("list[Connection]", wait(list(ranks))):
                message = _receive(connection)
                if isinstance(message, TransferEnded):
                    self._finished.report(message.done)
                elif isinstance(message, HostRead):
                    self._host_reads.put((ranks[connection], message))
                elif isinstance(message, RankFailed):
                    self._note_failure(ranks.pop(connection), message.error)

    def _note_failure(self, rank: int, error: str) -> None:
        if self._closing or self._failure is not None:
            return
        self._failure = f"rank {rank} has died: {error}"
        self._failed.set()
        self._host_reads.put((0, None))  # This wakes a reader, which then finds the failure.
        self._finished.break_off()


def _receive(connection: Connection) -> FromRank:
    """Return a rank's next message, or ``RankFailed`` if its process has ended."""
    try:
        return FROM_RANK.decode(connection.recv_bytes())
    except (EOFError, OSError):
        return RankFailed("it ended without an error message")
