"""Python's search for cycles of objects, kept from what must not wait for it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_RARELY = 20_000
"""Objects between two searches of the youngest; Python's own default is 700."""


@contextmanager
def long_lived() -> Iterator[None]:
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
def rarely_searched() -> Iterator[None]:
    """Let many more objects be made between two searches, for a run that nobody waits for step by step.

    A simulated step makes hundreds of objects, next to none of them in a cycle.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_RARELY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
