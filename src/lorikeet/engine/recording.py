"""Recordings as files: written as things happen, read record by record.

A file begins with one line of text that names the format. Records follow, the header first, each as MessagePack behind
its length in four bytes, little-endian. docs/recording.md describes them.
"""

import logging
from collections.abc import Iterator
from io import FileIO
from itertools import count
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from lorikeet.engine.records import Header, Record

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
