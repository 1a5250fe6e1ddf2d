"""The host tier's memory: equal blocks that other processes can map."""

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray


class HostArena:
    """Blocks in shared memory, zero at first, that take memory only as they are touched.

    Another process that is given ``fd`` sees the same bytes through :meth:`attached`. The memory lives until the last
    of them lets go of it, and its size is sealed: a file that shrank would end whoever reads behind its end.

    Args:
        fd: an anonymous file of the right size; owned by this object.
        blocks: how many; 0 is allowed.
        block_bytes: size of each.

    Attributes:
        fd: file descriptor.
        bytes: uint8 ``[blocks, block_bytes]``.
    """

    def __init__(self, fd: int, blocks: int, block_bytes: int) -> None:
        self.fd = fd
        self.bytes: NDArray[np.uint8] = np.empty((0, block_bytes), np.uint8)
        if blocks:  # nothing cannot be mapped
            memory = mmap.mmap(fd, blocks * block_bytes)
            self.bytes = np.frombuffer(memory, np.uint8).reshape(blocks, block_bytes)

    @classmethod
    def create(cls, blocks: int, block_bytes: int) -> "HostArena":
        """Take memory from the system."""
        fd = os.memfd_create("lorikeet-host-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, blocks * block_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, blocks, block_bytes)

    @classmethod
    def attached(cls, fd: int, block_bytes: int) -> "HostArena":
        """Map the arena behind a file descriptor; its size says how many blocks it has."""
        return cls(fd, os.fstat(fd).st_size // block_bytes, block_bytes)

    def close(self) -> None:
        """Close the file, and let go of the memory; other arrays of it that are in use keep it."""
        self.bytes = self.bytes[:0].copy()
        os.close(self.fd)
