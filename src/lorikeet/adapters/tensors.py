"""Reads headers and raw bits of safetensors files without torch (numpy has no bfloat16)."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from lorikeet.adapters.description import LENGTH_BYTES, MAX_HEADER_BYTES, TensorEntry
from lorikeet.adapters.errors import AdapterError

_CHUNK_BYTES = 4 * 2**20
MAX_TENSORS = 20_000
_MAX_NAME_CHARS = 500

EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""For each dtype, the integer type of its size and the mask of its exponent; all bits set means infinity or NaN."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
"""Bits of an element of each dtype of the format."""

_LFS_POINTER = b"version https://git-lfs"
LFS_POINTER_TEXT = "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
_DISGUISES = {
    b"PK": "a zip archive (as torch.save writes)",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x80\x05": "a Python pickle",
    b"\x1f\x8b": "a gzip file",
    b"GGUF": "a GGUF file",
}


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file, and check that the tensors cover the file without overlap.

    Raises:
        AdapterError: the file is missing, truncated or in another format, or its header is wrong or too large.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(max(LENGTH_BYTES, len(_LFS_POINTER)))
            length = int.from_bytes(head[:LENGTH_BYTES], "little")
            if length < 2 or length > size - LENGTH_BYTES:
                raise _not_safetensors(file, head, "its header does not fit into it")
            if length > MAX_HEADER_BYTES:
                raise AdapterError(f"{file.name}: its header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
            stream.seek(LENGTH_BYTES)
            text = stream.read(length)
    except FileNotFoundError as error:
        raise AdapterError(f"{file.name}: there is no such file in {file.parent}") from error
    except OSError as error:
        raise AdapterError(f"{file.name}: cannot be read: {error.strerror} ({file.parent})") from error
    try:
        pairs = json.loads(text.decode(), object_pairs_hook=_Pairs)
        entries = _checked(pairs, size - LENGTH_BYTES - length)
    except AdapterError as error:
        raise AdapterError(f"{file.name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise _not_safetensors(file, head, f"its header: {error}") from error
    start = LENGTH_BYTES + length
    return {
        entry.name: TensorEntry(entry.name, entry.dtype, entry.shape, start + entry.start, start + entry.stop)
        for entry in entries
    }


def _checked(pairs: Any, data_bytes: int) -> list[TensorEntry]:
    """Return the tensors of a header, with byte ranges that begin after it.

    Raises:
        AdapterError: a name is listed twice, or there are too many names.
        ValueError: the header has another error.
    """
    if not isinstance(pairs, _Pairs):
        raise ValueError("not a JSON object")
    entries: dict[str, TensorEntry] = {}
    for name, value in pairs:
        if name == "__metadata__":
            continue
        if name in entries:
            raise AdapterError(f"tensor {name} is listed twice")
        if len(name) > _MAX_NAME_CHARS:
            raise AdapterError(f"tensor {name[:50]}... has a name of {len(name)} characters")
        if len(entries) == MAX_TENSORS:
            raise AdapterError(f"it lists more than {MAX_TENSORS} tensors")
        entries[name] = _entry(name, value)
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise ValueError(f"tensor {entry.name} begins at byte {entry.start}; the one before it ends at {end}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file {data_bytes}")
    return list(entries.values())


def _entry(name: str, value: Any) -> TensorEntry:
    fields = dict(value) if isinstance(value, _Pairs) else {}
    dtype = fields.get("dtype")
    shape = fields.get("shape")
    offsets = fields.get("data_offsets")
    if not (isinstance(dtype, str) and dtype in _BITS and _are_sizes(shape) and _are_sizes(offsets)):
        raise ValueError(f"tensor {name} has no known dtype, shape or data_offsets")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"tensor {name} is {dtype} {shape}, but lies at bytes {offsets}")
    return TensorEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63 for size in value)
    )


def largest_bits(
    file: Path, entries: Iterable[TensorEntry], on_chunk: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """Return the bits of the largest magnitude in each tensor, by name.

    Reads in chunks of a few MiB.

    Without the sign bit, floating-point numbers are in the order of their bits.

    Args:
        file: the safetensors file.
        entries: tensors of the file, with dtypes in ``EXPONENTS``.
        on_chunk: function called after each chunk.

    Raises:
        AdapterError: a weight is infinite or NaN, or the file was truncated during the call. The message names the
            tensor.
    """
    found = {}
    with file.open("rb") as stream:
        for entry in sorted(entries, key=lambda entry: entry.start):
            integer, exponent = EXPONENTS[entry.dtype]
            magnitude = integer(np.iinfo(integer).max >> 1)
            largest = 0
            for chunk in _chunks(stream, entry.name, entry.start, entry.stop):
                largest = max(largest, int((np.frombuffer(chunk, dtype=integer) & magnitude).max()))
                on_chunk()
            if largest >= exponent:
                raise AdapterError(f"{file.name}: tensor {entry.name} holds NaN or infinity")
            found[entry.name] = largest
    return found


def merged(shards: Mapping[Path, Mapping[str, TensorEntry]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the header and the entries of one safetensors file that has the tensors of several files."""
    header = {}
    places = {}
    end = 0
    for entries in shards.values():
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            stop = end + entry.stop - entry.start
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (end, stop)}
            places[entry.name] = (entry, end, stop)
            end = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = LENGTH_BYTES + len(text)
    merged_entries = {
        name: TensorEntry(name, entry.dtype, entry.shape, start + begin, start + stop)
        for name, (entry, begin, stop) in places.items()
    }
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, merged_entries


def merged_data(shards: Mapping[Path, Mapping[str, TensorEntry]]) -> Iterator[bytes]:
    """Yield the bytes after the header of :func:`merged`, in chunks.

    Raises:
        AdapterError: a file was truncated during the call.
    """
    for file, entries in shards.items():
        with file.open("rb") as stream:
            for entry in sorted(entries.values(), key=lambda entry: entry.start):
                yield from _chunks(stream, entry.name, entry.start, entry.stop)


def _chunks(stream: BinaryIO, name: str, start: int, stop: int) -> Iterator[bytes]:
    stream.seek(start)
    left = stop - start
    while left:
        chunk = stream.read(min(left, _CHUNK_BYTES))
        if len(chunk) < min(left, _CHUNK_BYTES):
            raise AdapterError(f"{Path(stream.name).name}: was truncated while tensor {name} was read")
        yield chunk
        left -= len(chunk)


def _not_safetensors(file: Path, head: bytes, why: str) -> AdapterError:
    """Return the error for a file that is not safetensors.

    It names the format if ``head`` belongs to a known format.
    """
    if head.startswith(_LFS_POINTER):
        return AdapterError(f"{file.name}: {LFS_POINTER_TEXT}")
    for magic, what in _DISGUISES.items():
        if head.startswith(magic):
            return AdapterError(f"{file.name}: this is {what}, not safetensors; only safetensors is read")
    return AdapterError(f"{file.name}: not a complete safetensors file ({why})")


def is_lfs_pointer(content: bytes) -> bool:
    """Return whether a file is a Git LFS pointer."""
    return content.startswith(_LFS_POINTER)


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, including duplicate keys."""
