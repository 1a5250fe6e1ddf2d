"""Ranks beside rank 0: processes that run every plan in lock-step.

Plans go down a pipe to each rank. What has to be the same everywhere inside a step, the sampled tokens and whether
another step follows, is broadcast from rank 0 by the group that also sums the partial results.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import cast

import msgspec
import torch

from lorikeet.config import Settings
from lorikeet.core.plan import StepPlan
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.finished_transfers import FinishedTransfers
from lorikeet.engine.host_lora.layout import Ring, RingShape
from lorikeet.engine.rank_process import (
    BACKENDS,
    FROM_RANK,
    ArenaSizes,
    Failed,
    FromRank,
    Moved,
    Run,
    Stop,
    ToRank,
    run_rank,
)
from lorikeet.memory.host_arena import HostArena
from lorikeet.models.parallel import DistributedGroup

_CLOSE_S = 5.0


class RankProcesses:
    """The ranks 1 and above, as rank 0 sees them. They end with this process, however it ends.

    Args:
        settings: as rank 0 has them.
        folder: the model's.
        finished: where the ranks' transfers are counted.

    Attributes:
        size: ranks in all.
        group: rank 0's place in the group; None once closed.

    Raises:
        ExecutorError: a rank did not start.
    """

    def __init__(self, settings: Settings, folder: Path, finished: FinishedTransfers) -> None:
        self.size = settings.engine.tensor_parallel
        self._finished = finished
        self._device = torch.device("cuda", 0) if settings.engine.device == "cuda" else torch.device("cpu")
        self._failure: str | None = None
        self._closing = False
        self._failed = threading.Event()
        self._listener: threading.Thread | None = None
        self.group: DistributedGroup | None = None
        if sys.platform == "linux":
            # All ranks are on this machine, and its name need not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._meeting = tempfile.TemporaryDirectory(prefix="lorikeet-ranks-")
        meet_at = f"file://{self._meeting.name}/store"
        spawn = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(1, self.size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=run_rank, args=(theirs, settings, folder, rank, meet_at), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self.wait_until_ready()
            try:
                self.group = DistributedGroup(0, self.size, meet_at, BACKENDS[settings.engine.device])
            except RuntimeError:  # a rank may have met the others, failed and gone before they had all met
                if wait(self._connections, _CLOSE_S):
                    self.wait_until_ready()
                raise
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Block until every rank has reached the next stage of its start.

        Raises:
            ExecutorError: one has died; the message has its reason.
        """
        pending = self._ranks()
        while pending:
            for connection in cast("list[Connection]", wait(list(pending))):
                message, rank = _receive(connection), pending.pop(connection)
                if isinstance(message, Failed):
                    raise ExecutorError(f"rank {rank} did not start: {message.error}")

    def allocate(self, device_blocks: int, host_blocks: int) -> None:
        """Let the ranks allocate their arenas.

        Raises:
            ExecutorError: one could not.
        """
        with suppress(OSError):  # one that has ended has said why
            self._send(ArenaSizes(device_blocks, host_blocks))
        self.wait_until_ready()

    def host_arenas(self, block_bytes: int) -> list[HostArena]:
        """Return the memory of the ranks' host tiers, of such blocks; they offer it where prefills are assisted.

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

    def lead(self, ring: Ring) -> None:
        """Give the ranks the ring in which rank 0 says who computes what, once they have offered their memory.

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
        """Let the ranks serve, and watch them from now on."""
        self._listener = threading.Thread(target=self._listen, name="rank-listener", daemon=True)
        self._listener.start()

    def send(self, plan: StepPlan) -> None:
        """Let every rank begin the plan."""
        self._send(Run(plan))

    def tell(self, token_ids: Sequence[int], *, go_on: bool) -> None:
        """Give every rank the tokens of a step, and whether another step follows."""
        assert self.group is not None
        self.group.broadcast(torch.tensor([int(go_on), *token_ids], device=self._device))

    def check(self, grace_s: float = 0.0) -> None:
        """Do nothing if all ranks are well, and still are after ``grace_s``.

        Raises:
            ExecutorError: one has died; the message says which and why.
        """
        if self._failed.wait(grace_s) if grace_s else self._failed.is_set():
            raise ExecutorError(self._failure)

    def close(self) -> None:
        """End the ranks; those that do not listen are killed."""
        self._closing = True
        if self._listener is not None:
            stop = msgspec.msgpack.encode(Stop())
            for connection in self._connections:
                with suppress(OSError):  # a rank that has ended need not be told to
                    connection.send_bytes(stop)
        for process in self._processes:
            process.join(_CLOSE_S if self._listener is not None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        if self._listener is not None:
            self._listener.join()
        for connection in self._connections:
            connection.close()
        if self.group is not None:
            self.group.close()
            self.group = None
        self._meeting.cleanup()

    def _ranks(self) -> dict[Connection, int]:
        return {connection: rank for rank, connection in enumerate(self._connections, start=1)}

    def _send(self, message: ToRank | RingShape) -> None:
        encoded = msgspec.msgpack.encode(message)
        for connection in self._connections:
            connection.send_bytes(encoded)

    def _listen(self) -> None:
        """Count transfers until every rank has said its last words or ended."""
        ranks = self._ranks()
        while ranks:
            for connection in cast("list[Connection]", wait(list(ranks))):
                message = _receive(connection)
                if isinstance(message, Moved):
                    self._finished.report(message.done)
                elif isinstance(message, Failed):
                    self._note_failure(ranks.pop(connection), message.error)

    def _note_failure(self, rank: int, error: str) -> None:
        if self._closing or self._failure is not None:
            return
        self._failure = f"rank {rank} has died: {error}"
        self._failed.set()
        self._finished.break_off()


def _receive(connection: Connection) -> FromRank:
    """Return a rank's next message; the end of its process counts as one."""
    try:
        return FROM_RANK.decode(connection.recv_bytes())
    except (EOFError, OSError):
        return Failed("it ended without a word")
