"""Copies weights that a trainer on the same machine has written into shared memory."""

import os
import stat
from pathlib import Path

from lorikeet.adapters.description import WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError, AdapterNotFound, AdapterStoreError

FOLDER = Path("/dev/shm")
PREFIX = "lorikeet-weights-"
"""Start of the names of such files."""


def copy_shared(name: str, folder: Path, max_bytes: int) -> None:
    """Copy a weights file from shared memory into a folder.

    The copy protects the version from later writes of the trainer.

    Args:
        name: name of the file in ``/dev/shm``.
        folder: an existing folder.
        max_bytes: largest size; 0 for no limit.

    Raises:
        AdapterNotFound: there is no such file.
        AdapterError: the name is not one of a trainer, or the file is another user's, no regular file or too large.
        AdapterStoreError: the copy cannot be written.
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
        _copy(source, folder / WEIGHTS_FILE, found.st_size)
    finally:
        os.close(source)


def _copy(source: int, to: Path, size: int) -> None:
    try:
        with to.open("wb") as target:
            done = 0
            while done < size:
                copied = os.sendfile(target.fileno(), source, done, size - done)
                if not copied:
                    raise AdapterError("shm: the weights were cut off while they were read")
                done += copied
    except OSError as error:
        raise AdapterStoreError(f"shm: the weights cannot be copied: {error}") from error
