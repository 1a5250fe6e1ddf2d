"""The heap of a process that computes on a CPU."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 256 * 2**20
_MOST_ON_HEAP_BYTES = 32 * 2**20
"""As large as glibc lets it be."""


def keep_freed_memory() -> None:
    """Let the heap keep what one step frees for the next one.

    By default glibc returns it to the system, depending on what lies where, and the next step takes it again page by
    page, by thousands of faults, which are dear on a virtual machine. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MOST_ON_HEAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
