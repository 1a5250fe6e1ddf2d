"""Allocates the memory of the host tier: blocks of equal size that other processes can map."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HOST_TIMES_DEVICE = 2
"""Default size of the host arena as a multiple of the device arena, if enough memory is free."""


class HostArena:
    """Holds blocks in shared memory, initially zero. Pages are allocated at their first use.

    Another process that receives ``fd`` maps the same bytes with :meth:`attached`. The memory is freed when the last
    process has closed it. The file's size is sealed, because reading past the end of a shrunk file would kill a
    process.

    Args:
        fd: an anonymous file of the right size; owned by this object.
        blocks: number of blocks; 0 is allowed.
        block_bytes: bytes of a block.

    Attributes:
        fd: file descriptor.
        bytes: uint8 ``[blocks, block_bytes]``.
    """

    def __init__(self, fd: int, blocks: int, block_bytes: int) -> None:
        self.fd = fd
        self.bytes: NDArray[np.uint8] = np.empty((0, block_bytes), np.uint8)
        if blocks:  # because an empty file cannot be mapped
            memory = mmap.mmap(fd, blocks * block_bytes)
            self.bytes = np.frombuffer(memory, np.uint8).reshape(blocks, block_bytes)

    @classmethod
    def create(cls, blocks: int, block_bytes: int) -> "HostArena":
        """Create an arena in new shared memory."""
        fd = os.memfd_create("lorikeet-host-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, blocks * block_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, blocks, block_bytes)

    @classmethod
    def attached(cls, fd: int, block_bytes: int) -> "HostArena":
        """Map the arena of a file descriptor. The number of blocks is computed from the file's size."""
        return cls(fd, os.fstat(fd).st_size // block_bytes, block_bytes)

    def read(self, blocks: Sequence[int]) -> tuple[bytes, ...]:
        """Return a copy of each block's bytes."""
        return tuple(self.bytes[block].tobytes() for block in blocks)

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Write bytes from :meth:`read` to blocks."""
        for block, content in zip(blocks, contents, strict=True):
            self.bytes[block] = np.frombuffer(content, np.uint8)

    def close(self) -> None:
        """Close the file and unmap the memory, unless other arrays still refer to it."""
        self.bytes = self.bytes[:0].copy()
        os.close(self.fd)
