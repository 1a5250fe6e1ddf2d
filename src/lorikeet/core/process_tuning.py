"""Tunes a process: garbage collection, scheduling priority and malloc."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_RARE_GC_THRESHOLD = 20_000
"""Allocations between two collections of the youngest generation; Python's default is 700."""


def collect_no_garbage() -> None:
    """Switch garbage collection off until :func:`frozen_gc`.

    A start allocates much and frees little, and collections take a sixth of the time of imports.
    """
    gc.disable()


def unfreeze_imports() -> None:
    """Undo :func:`freeze_imports` before the process ends, since libraries report objects that are not collected."""
    gc.unfreeze()


def freeze_imports() -> None:
    """Exclude the objects of imports from garbage collection.

    No collection runs before, since it would take a tenth of a second. A few thousand small objects stay in memory.
    """
    gc.freeze()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude all objects that are alive now from garbage collection within the context.

    A full collection visits every container object, most of them from imported modules, and delays a step or all
    streams of a server. Only the outermost context ends the exclusion, if nothing was excluded before.
    """
    is_outermost = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()


@contextmanager
def rare_gc() -> Iterator[None]:
    """Collect garbage less often within the context, for simulations.

    A simulated step allocates hundreds of objects, almost none of them in reference cycles.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_RARE_GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


NICE = 5
"""Increment of the nice value. On a shared core the steps then get about three quarters of the time."""


def lower_priority() -> None:
    """Lower the priority of the calling thread. Does nothing where priorities are per process (not Linux)."""
    if sys.platform == "linux":
        os.nice(NICE)


# These are the numbers of the parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_TRIM_THRESHOLD_BYTES = 256 * 2**20
_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""The largest that glibc allows."""
_LARGE_BYTES = 128 * 2**10


def return_freed_memory() -> None:
    """Make glibc's malloc return freed memory to the system. Does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Make glibc's malloc return blocks of 128 KiB and more to the system when they are freed.

    By default malloc does so only until the first such block is freed. Blocks up to that size then stay with the
    process. Threads share two arenas, and each arena keeps the memory that it once needed. Does nothing with other C
    libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, 2)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep memory that a step frees for the next step.

    By default glibc may return the memory to the system. The next step then gets it back with thousands of page faults,
    which are slow on a virtual machine. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
