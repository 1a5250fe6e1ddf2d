"""Recordings of an engine: all that its plans depend on, in order, and the files that hold them."""

import logging
from collections.abc import Iterator
from io import FileIO
from itertools import count
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import msgspec

from lorikeet.config import EngineSettings
from lorikeet.core.events import AdapterEvent, RequestEvent
from lorikeet.core.executor import EngineSizes
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import Abort, DropAdapter, ExportRequest, ImportKv, RegisterAdapters, Submit
from lorikeet.core.plan import StepPlan, StepResult, TransferDone


class Header(msgspec.Struct, frozen=True):
    """The first record: which engine it was.

    Attributes:
        version: Lorikeet's version.
        engine: its settings, the row by its full name.
        sizes: of its executor.
    """

    version: str
    engine: EngineSettings
    sizes: EngineSizes


class RequestExported(msgspec.Struct, frozen=True, tag=True):
    """A request was taken out, to go on elsewhere or later."""

    request_id: RequestId


Message = Submit | Abort | ExportRequest | ImportKv | RegisterAdapters | DropAdapter | RequestExported
"""Of ``ImportKv`` only what plans depend on, the keys: a replay needs no bytes."""


class Received(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine was told something.

    Attributes:
        at_s: the engine's clock, as in all records.
        message: what.
    """

    at_s: float
    message: Message


class Transferred(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine took finished transfers in, failed ones among them."""

    at_s: float
    transfers: tuple[TransferDone, ...]


class Planned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine is about to run a plan. One is written for every turn of the loop; an empty plan is not run.

    Attributes:
        at_s: the time that it was planned with.
        until_s: argument of ``Engine.step``.
        plan: what was decided.
    """

    at_s: float
    until_s: float | None
    plan: StepPlan


class PlanRan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The plan of the record before has run; ``at_s`` is the time that its result was committed with."""

    at_s: float
    result: StepResult


class EventsSent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The events that a turn of the loop brought."""

    events: tuple[RequestEvent, ...]
    adapter_events: tuple[AdapterEvent, ...]


Record = Received | Transferred | Planned | PlanRan | EventsSent


class Recorder(Protocol):
    """Is told of everything as it happens."""

    def note(self, record: Record) -> None:
        """Keep a record."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


class NoRecorder:
    """Keeps nothing."""

    def note(self, record: Record) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing is held."""


FORMAT = b"lorikeet recording 3\n"
"""Rises with every change to the records that older readers would misunderstand."""

_LENGTH_BYTES = 4
_LOG = logging.getLogger(__name__)


class RecordingError(ValueError):
    """A recording cannot be used; the message names the file and why."""


class FileRecorder:
    """Writes every record at once, so that a process that dies leaves all that it noted.

    Args:
        file: positioned after the header.
        path: of the file.
    """

    def __init__(self, file: FileIO, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = file
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def create(cls, path: Path, header: Header) -> Self:
        """Begin a recording in a new file: ``path``, or if that exists ``path.1`` and so on.

        An engine that is started again after its death must not overwrite the recording of it.

        Raises:
            OSError: it cannot be written.
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
        """See ``Recorder``. If the disk is full the recording ends, and the engine goes on."""
        if self._file is None:
            return
        try:
            _write(self._file, _framed(self._encoder.encode(record)))
        except OSError as error:
            _LOG.warning("the recording %s ends here: %s", self.path, error)
            self.close()

    def close(self) -> None:
        """See ``Recorder``."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Recording:
    """A recording to be read from its begin, once or several times.

    Attributes:
        header: which engine it was.

    Args:
        path: of the file.

    Raises:
        RecordingError: it cannot be read, or is of another format.
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
        """Yield the records up to the last whole one.

        Raises:
            RecordingError: one of them is none.
        """
        decoder = msgspec.msgpack.Decoder(Record)
        with self._path.open("rb") as file:
            file.seek(self._first_record)
            at = self._first_record
            while (frame := _next_frame(file)) is not None:
                try:
                    yield decoder.decode(frame)
                except msgspec.MsgspecError as error:
                    raise RecordingError(f"{self._path}: no record at byte {at}: {error}") from error
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
    """Return the next record, None at the end or if the file was cut short within it."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    record = file.read(size)
    return record if len(record) == size else None
