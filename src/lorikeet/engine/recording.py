"""Recordings of an engine: everything that its plans depend on, in order, and the files of recordings."""

import logging
from collections.abc import Iterator
from io import FileIO
from itertools import count
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import msgspec

from lorikeet.config import EngineSettings
from lorikeet.core.events import AdapterEvent, RequestEvent
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import Abort, DropAdapter, ExportRequest, ImportKv, PinAdapters, RegisterAdapters, Submit
from lorikeet.core.plan import StepPlan, StepResult, TransferDone
from lorikeet.costs.engine_sizes import EngineSizes


class Header(msgspec.Struct, frozen=True):
    """The first record, which identifies the recorded engine.

    Attributes:
        version: Lorikeet's version.
        engine: the engine's settings, with the preset's full name.
        sizes: sizes of the engine's executor.
    """

    version: str
    engine: EngineSettings
    sizes: EngineSizes


class RequestExported(msgspec.Struct, frozen=True, tag=True):
    """A request was exported, to be resumed elsewhere or later."""

    request_id: RequestId


Message = Submit | Abort | ExportRequest | ImportKv | RegisterAdapters | PinAdapters | DropAdapter | RequestExported
"""``ImportKv`` is recorded with its keys only, since plans do not depend on the bytes."""


class Received(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine received a message.

    Attributes:
        at_s: time on the engine's clock, like in all records.
        message: the message, without bytes of KV.
    """

    at_s: float
    message: Message


class Transferred(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine applied finished transfers, including failed ones."""

    at_s: float
    transfers: tuple[TransferDone, ...]


class Planned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine made a plan.

    Every turn of the loop makes one. An empty plan is not executed.

    Attributes:
        at_s: the time with which the scheduler was called.
        until_s: the argument of ``Engine.step``.
        plan: the executed plan.
    """

    at_s: float
    until_s: float | None
    plan: StepPlan


class PlanRan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The plan of the previous record was executed. ``at_s`` is the time with which the result was committed."""

    at_s: float
    result: StepResult


class EventsSent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The events of one turn of the loop."""

    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]


Record = Received | Transferred | Planned | PlanRan | EventsSent


class Recorder(Protocol):
    """Receives every record when it is made."""

    def note(self, record: Record) -> None:
        """Store a record."""
        ...

    def close(self) -> None:
        """End the recording."""
        ...


class NoRecorder:
    """A recorder that discards everything."""

    def note(self, record: Record) -> None:
        """Discard the record."""

    def close(self) -> None:
        """Do nothing."""


FORMAT = b"lorikeet recording 4\n"
"""First line of a file. The number rises with every change to the records that older readers would misread."""

_LENGTH_BYTES = 4
_LOG = logging.getLogger(__name__)


class RecordingError(ValueError):
    """Raised when a recording cannot be used. The message names the file and the reason."""


class FileRecorder:
    """Writes every record immediately and unbuffered, so that a process that dies leaves a complete recording.

    Args:
        file: the open file, positioned after the header.
        path: path of the file.
    """

    def __init__(self, file: FileIO, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = file
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """Start a recording in a new file: ``path``, or ``path.1`` and so on if the file exists.

        A restarted engine thus does not overwrite the recording of the engine that died.

        Raises:
            OSError: the file cannot be created or written.
        """
        for number in count():
            free = path.with_name(f"{path.name}.{number}") if number else path
            try:
                file = free.open("xb", buffering=0)
            except FileExistsError:
                continue
            _write(file, FORMAT + _framed(msgspec.msgpack.encode(header)))
            return cls(file, free)
        raise AssertionError("count() has no end")

    def note(self, record: Record) -> None:
        """Write a record. If writing fails, for example on a full disk, the recording ends and the engine continues."""
        if self._file is None:
            return
        try:
            _write(self._file, _framed(self._encoder.encode(record)))
        except OSError as error:
            _LOG.warning("the recording %s ends here: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """Close the file. Later records are discarded."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Recording:
    """A recording in a file.

    It can be iterated several times, each time from the start.

    Args:
        path: path of the file.

    Attributes:
        header: the record that identifies the recorded engine.

    Raises:
        RecordingError: the file cannot be read, or has another format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._check_format(file.readline(2 * len(FORMAT)))
                header = _next_frame(file)
                self._first_record = file.tell()
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}") from error
        if header is None:
            raise RecordingError(f"{path}: the recording ends within its header")
        try:
            self.header = msgspec.msgpack.decode(header, type=Header)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{path}: its header is of another version of Lorikeet: {error}") from error

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, except a record that is cut short at the end of the file.

        Raises:
            RecordingError: a record cannot be decoded.
        """
        decoder = msgspec.msgpack.Decoder(Record)
        with self._path.open("rb") as file:
            file.seek(self._first_record)
            at = self._first_record
            while (frame := _next_frame(file)) is not None:
                try:
                    yield decoder.decode(frame)
                except msgspec.MsgspecError as error:
                    raise RecordingError(f"{self._path}: invalid record at byte {at}: {error}") from error
                at = file.tell()

    def _check_format(self, line: bytes) -> None:
        if line != FORMAT:
            found = line.decode(errors="replace").strip() if line.startswith(FORMAT.split()[0]) else "no recording"
            raise RecordingError(f"{self._path}: found {found}, expected {FORMAT.decode().strip()}")


def _write(file: FileIO, frame: bytes) -> None:
    if file.write(frame) != len(frame):
        raise OSError("the disk is full")


def _framed(record: bytes) -> bytes:
    return len(record).to_bytes(_LENGTH_BYTES, "little") + record


def _next_frame(file: BinaryIO) -> bytes | None:
    """Return the bytes of the next record; None at the end of the file, or if the record is cut short."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    record = file.read(size)
    return record if len(record) == size else None
