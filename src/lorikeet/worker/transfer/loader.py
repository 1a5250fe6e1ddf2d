"""A rank's loader process, seen from the rank."""

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
    LoaderSetup,
    ReadAdapter,
    ReadEnded,
)

_LOG = logging.getLogger(__name__)
_NAME = "the loader process"


class LoaderError(RuntimeError):
    """There is no loader process; the message says why."""


def start_loader_process() -> HelperProcess:
    """Start a loader process; that takes a fraction of a second, in which the caller may go on.

    Raises:
        ExecutorError: the system refuses.
    """
    return start_helper_process("lorikeet.worker.transfer.loader_process", _NAME)


@dataclass
class _Reading:
    """What a process reads.

    Attributes:
        process: which one.
        reader: who in it.
        room: blocks that it may have filled by now.
        filled: blocks that it has.
        since_s: when it had the last word, or could go on again.
    """

    process: HelperProcess
    reader: int
    room: int
    filled: int
    since_s: float


class Loader(Helper):
    """Sends reads to a loader process.

    What was being read when a process ends unasked is reported as failed, once that process is gone and writes to no
    block any more. So is what a process reads that does not get on with one of its reads.

    Args:
        process: the first one; owned by this object from now on.
        arena: where it writes.
        setup: what it must know.
        on_filled: called, on a thread of this object, when blocks have been filled.
        on_ended: called there when a read has ended, well or not; not for what is being read when this is closed.
    """

    def __init__(
        self,
        process: HelperProcess,
        arena: HostArena,
        setup: LoaderSetup,
        on_filled: Callable[[BlocksFilled], None],
        on_ended: Callable[[ReadEnded], None],
    ) -> None:
        self._on_filled = on_filled
        self._on_ended = on_ended
        self._reading: dict[int, _Reading] = {}
        super().__init__(process, _NAME, setup, (arena.fd,))

    @property
    def process_id(self) -> int | None:
        """Process id of the loader, None while there is none."""
        running = self._running
        return None if running is None else running.process.pid

    def read(self, read: ReadAdapter) -> None:
        """Begin to read an adapter.

        Raises:
            LoaderError: there is no loader, and it is too early for another.
        """
        with self._changed:
            running = self._wake()
            if running is None:
                raise LoaderError(self._reason)
            self._reading[read.transfer_id] = _Reading(running, read.reader, read.room, 0, time.monotonic())
            running.send(read)

    def give_room(self, reader: int, blocks: int) -> None:
        """Say that so many blocks of what ``reader`` reads can be filled again."""
        with self._changed:
            for reading in self._reading.values():
                if reading.reader == reader:
                    reading.room, reading.since_s = reading.room + blocks, time.monotonic()
            if self._running is not None:
                self._running.send(BlocksFreed(reader, blocks))

    def _heard(self, content: bytes) -> None:
        match FROM_LOADER.decode(content):
            case BlocksFilled() as filled:
                with self._changed:
                    reading = self._reading[filled.transfer_id]
                    reading.filled, reading.since_s = filled.blocks, time.monotonic()
                self._on_filled(filled)
            case ReadEnded() as ended:
                with self._changed:
                    del self._reading[ended.transfer_id]
                self.worked()
                self._on_ended(ended)

    def _owes(self, process: HelperProcess, since_s: float) -> bool:
        with self._changed:
            return any(
                reading.process is process and reading.since_s <= since_s and reading.filled < reading.room
                for reading in self._reading.values()
            )

    def _gone(self, process: HelperProcess, reason: str) -> None:
        with self._changed:
            lost = sorted(number for number, reading in self._reading.items() if reading.process is process)
            for transfer_id in lost:
                del self._reading[transfer_id]
        _LOG.error("%s while it read %d adapters", reason, len(lost))
        for transfer_id in lost:
            self._on_ended(ReadEnded(transfer_id, reason, "", ()))
