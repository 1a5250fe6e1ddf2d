"""The rank's interface to its loader process."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from lorikeet.memory.host_arena import HostArena
from lorikeet.worker.helper_process import Helper, HelperProcess, start_helper_process
from lorikeet.worker.transfer.loader_process import (
    FROM_LOADER,
    BlocksFilled,
    BlocksFreed,
    LoaderAlive,
    LoaderSetup,
    ReadAdapter,
    ReadEnded,
)

_LOG = logging.getLogger(__name__)
_NAME = "the loader process"


class LoaderError(RuntimeError):
    """Raised when no loader process is running.

    The message gives the reason.

    Args:
        message: the reason.
        rest_s: seconds until another process may be started.
    """

    def __init__(self, message: str, rest_s: float) -> None:
        super().__init__(message)
        self.rest_s = rest_s


def start_loader_process() -> HelperProcess:
    """Start a loader process.

    It becomes ready in the background, within a fraction of a second.

    Raises:
        ExecutorError: the process cannot be started.
    """
    return start_helper_process("lorikeet.worker.transfer.loader_process", _NAME)


@dataclass
class _Reading:
    """A read in progress.

    Attributes:
        process: the process that does the reading.
        reader: number of the reader in the process.
        allowed: number of blocks that the reader may fill so far.
        filled: number of blocks that the reader has filled.
        since_s: time at which the reader last reported, or was allowed to fill more blocks.
    """

    process: HelperProcess
    reader: int
    allowed: int
    filled: int
    since_s: float


class Loader(Helper):
    """Sends reads to a loader process, and replaces the process when it dies.

    When a process dies, its reads are reported as lost once it has ended and cannot write to blocks any more. A process
    that makes no progress with one of its reads, or sends no heartbeats, is killed.

    Args:
        process: the first process. This object owns it.
        arena: the host arena, to which the process writes.
        setup: the first message to every process.
        on_filled: function called on this object's thread when blocks have been filled.
        on_ended: function called on the same thread when a read has ended or failed, but not for reads in progress at
            :meth:`close`.
        on_lost: function called on the same thread when a read was lost with its process, with the transfer's id and
            the reason.
    """

    silence_timeout_s = 30.0

    def __init__(
        self,
        process: HelperProcess,
        arena: HostArena,
        setup: LoaderSetup,
        on_filled: Callable[[BlocksFilled], None],
        on_ended: Callable[[ReadEnded], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._on_filled = on_filled
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._reading: dict[int, _Reading] = {}
        super().__init__(process, _NAME, setup, (arena.fd,))

    @property
    def process_id(self) -> int | None:
        """Process id of the loader process; None if there is no process."""
        running = self._running
        return None if running is None else running.process.pid

    def read(self, read: ReadAdapter) -> None:
        """Start reading an adapter.

        Raises:
            LoaderError: no process is running, and it is too early to start another.
        """
        with self._changed:
            running = self._ensure_started()
            if running is None:
                raise LoaderError(self._reason, max(0.0, self._next_start_s - time.monotonic()))
            self._reading[read.transfer_id] = _Reading(running, read.reader, read.free_blocks, 0, time.monotonic())
            running.send(read)

    def free_blocks(self, reader: int, blocks: int) -> None:
        """Allow ``reader`` to fill ``blocks`` more blocks, since the same number of blocks has been copied."""
        with self._changed:
            for reading in self._reading.values():
                if reading.reader == reader:
                    reading.allowed += blocks
                    reading.since_s = time.monotonic()
            if self._running is not None:
                self._running.send(BlocksFreed(reader, blocks))

    def _on_message(self, content: bytes) -> None:
        match FROM_LOADER.decode(content):
            case LoaderAlive():
                pass
            case BlocksFilled() as filled:
                with self._changed:
                    reading = self._reading[filled.transfer_id]
                    reading.filled = filled.blocks
                    reading.since_s = time.monotonic()
                self._on_filled(filled)
            case ReadEnded() as ended:
                with self._changed:
                    del self._reading[ended.transfer_id]
                self.note_success()
                self._on_ended(ended)

    def _is_reply_overdue(self, process: HelperProcess, since_s: float) -> bool:
        with self._changed:
            return any(
                reading.process is process and reading.since_s <= since_s and reading.filled < reading.allowed
                for reading in self._reading.values()
            )

    def _on_death(self, process: HelperProcess, reason: str) -> None:
        with self._changed:
            lost = sorted(number for number, reading in self._reading.items() if reading.process is process)
            for transfer_id in lost:
                del self._reading[transfer_id]
        _LOG.error("%s while it read %d adapters", reason, len(lost))
        for transfer_id in lost:
            self._on_lost(transfer_id, reason)
