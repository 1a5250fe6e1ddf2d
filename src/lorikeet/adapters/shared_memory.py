"""Copies weights that a trainer on the same machine has written into shared memory."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from lorikeet.adapters.errors import AdapterError, AdapterNotFound

if TYPE_CHECKING:
    from hashlib import _Hash

FOLDER = Path("/dev/shm")
PREFIX = "lorikeet-weights-"
"""Start of the names of such files."""

_CHUNK_BYTES = 2**20
_CHUNKS = 4
"""Chunks that may wait for the digest."""


@contextmanager
def opened_shared(name: str, max_bytes: int) -> Iterator[int]:
    """Open shared weights; yield the file descriptor.

    Args:
        name: name of the file in ``/dev/shm``.
        max_bytes: largest size; 0 for no limit.

    Raises:
        AdapterNotFound: there is no such file.
        AdapterError: the name is not one of a trainer, or the file is another user's, no regular file or too large.
    """
    if not name.startswith(PREFIX) or "/" in name or "\0" in name:
        raise AdapterError(f"shm: {name[:100]!r} is no name of shared weights; they begin with {PREFIX!r}")
    try:
        source = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise AdapterNotFound(f"shm: there are no shared weights {name!r} on this machine") from error
    except OSError as error:
        raise AdapterError(f"shm: {name!r} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise AdapterError(f"shm: {name!r} does not belong to the server's user")
        if max_bytes and found.st_size > max_bytes:
            raise AdapterError(f"shm: {name!r} has {found.st_size} bytes, at most {max_bytes} are allowed")
        yield source
    finally:
        os.close(source)


def copy_shared(source: int, to: Path, digest: "_Hash", on_chunk: Callable[[], None] = lambda: None) -> None:
    """Copy shared weights into a file, and update a digest with the bytes of the copy.

    The copy protects the version from later writes of the trainer. Another thread computes the digest, which takes
    longer than the copy.

    Args:
        source: descriptor of the shared weights.
        to: the new file.
        digest: the digest, complete when the call returns.
        on_chunk: function called after each chunk.

    Raises:
        AdapterError: the weights were cut off during the call.
        OSError: the copy cannot be written.
    """
    size = os.fstat(source).st_size
    free: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(_CHUNKS):
        free.put(bytearray(_CHUNK_BYTES))
    copied: SimpleQueue[tuple[bytearray, int]] = SimpleQueue()
    hashing = Thread(target=_update, args=(digest, copied, free), daemon=True)
    hashing.start()
    done = 0
    try:
        with to.open("xb", buffering=0) as target:
            while done < size:
                chunk = free.get()
                count = os.preadv(source, [memoryview(chunk)[: size - done]], done)
                if not count:
                    raise AdapterError("shm: the weights were cut off while they were read")
                _write(target.fileno(), memoryview(chunk)[:count])
                copied.put((chunk, count))
                done += count
                on_chunk()
    finally:
        copied.put((bytearray(), 0))
        hashing.join()


def _update(digest: "_Hash", copied: "SimpleQueue[tuple[bytearray, int]]", free: "SimpleQueue[bytearray]") -> None:
    while True:
        chunk, count = copied.get()
        if not count:
            return
        digest.update(memoryview(chunk)[:count])
        free.put(chunk)


def _write(target: int, content: memoryview) -> None:
    while content:
        content = content[os.write(target, content) :]
