"""Settings of a process: garbage collection, scheduling priority and malloc."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 20_000
"""Objects between two searches of the youngest; Python's own default is 700."""


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Leave whatever is alive now out of searches until the end.

    A full search visits every container there is, those of imported modules above all, and the process does nothing
    else meanwhile: a step, or every stream of a server, waits for it. Within another such context the end is the other
    one's.
    """
    is_outermost = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()


@contextmanager
def rare_gc() -> Iterator[None]:
    """Let many more objects be made between two searches, for a run that nobody waits for step by step.

    A simulated step makes hundreds of objects, next to none of them in a cycle.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_RARELY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


NICE = 5
"""By how much its priority is lower: a core that both want is the steps' for three quarters of the time."""


def lower_priority() -> None:
    """Lower the priority of the calling thread alone, where threads have priorities of their own (Linux)."""
    if sys.platform == "linux":
        os.nice(NICE)


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
