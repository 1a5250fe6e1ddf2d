"""Python's search for cycles of objects, kept off what lives as long as its process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived() -> Iterator[None]:
    """Leave whatever is alive now out of searches until the end.

    A full search visits every container there is, those of imported modules above all, and the process does nothing
    else meanwhile: a step, or every stream of a server, waits for it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
