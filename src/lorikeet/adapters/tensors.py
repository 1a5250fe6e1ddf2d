"""Reads headers and raw bits of safetensors files without torch (numpy has no bfloat16)."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from lorikeet.adapters.errors import AdapterError

_CHUNK_BYTES = 4 * 2**20
_HEADER_LENGTH_BYTES = 8

EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""For each dtype, the integer type of its size and the mask of its exponent; all bits set means infinity or NaN."""

_DISGUISES = {
    b"PK": "a zip archive (as torch.save writes)",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x80\x05": "a Python pickle",
    b"\x1f\x8b": "a gzip file",
    b"GGUF": "a GGUF file",
}


class TensorEntry(NamedTuple):
    """One tensor of a safetensors file.

    Attributes:
        name: its key.
        dtype: as safetensors writes it (``BF16``, ``F16``, ``F32``, ...).
        shape: sizes of its dimensions.
        start, stop: byte range in the file, half-open.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file.

    The safetensors library checks lengths, offsets, overlaps and coverage. Duplicate names, which it accepts, are
    refused here.

    Raises:
        AdapterError: the file is missing, truncated, in another format, or its header is wrong.
    """
    try:
        with safe_open(file, framework="numpy"):
            pass
    except FileNotFoundError as error:
        raise AdapterError(f"{file.name}: there is no such file in {file.parent}") from error
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file.name}: {_what_it_is(file)} ({error})") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        pairs = json.loads(stream.read(length), object_pairs_hook=_Pairs)
    start = _HEADER_LENGTH_BYTES + length
    entries: dict[str, TensorEntry] = {}
    for name, value in pairs:
        if name == "__metadata__":
            continue
        if name in entries:
            raise AdapterError(f"{file.name}: tensor {name} is listed twice")
        fields = dict(value)
        begin, end = fields["data_offsets"]
        entries[name] = TensorEntry(name, fields["dtype"], tuple(fields["shape"]), start + begin, start + end)
    return entries


def check_finite(file: Path, entries: Iterable[TensorEntry]) -> None:
    """Check that no weight is infinite or NaN. Reads in chunks of a few MiB.

    Raises:
        AdapterError: a weight is, or the file was truncated meanwhile; the message names the tensor.
    """
    with file.open("rb") as stream:
        for entry in sorted(entries, key=lambda entry: entry.start):
            if not _is_finite(stream, entry):
                raise AdapterError(f"{file.name}: tensor {entry.name} holds NaN or infinity")


def _is_finite(stream: BinaryIO, entry: TensorEntry) -> bool:
    integer, exponent = EXPONENTS[entry.dtype]
    stream.seek(entry.start)
    left = entry.stop - entry.start
    while left:
        wanted = min(left, _CHUNK_BYTES)
        chunk = stream.read(wanted)
        if len(chunk) < wanted:
            raise AdapterError(f"{Path(stream.name).name}: was truncated while tensor {entry.name} was read")
        bits = np.frombuffer(chunk, dtype=integer) & integer(exponent)
        if bool((bits == exponent).any()):
            return False
        left -= len(chunk)
    return True


def _what_it_is(file: Path) -> str:
    """Return a description of ``file``, which is not a valid safetensors file."""
    with file.open("rb") as stream:
        head = stream.read(8)
    for magic, what in _DISGUISES.items():
        if head.startswith(magic):
            return f"this is {what}, not safetensors; only safetensors is read"
    return "not a complete safetensors file"


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, in which duplicate keys can be seen."""
