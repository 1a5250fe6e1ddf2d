"""Lorikeet: a server for many LoRA adapters over one base model."""

import os
from importlib.metadata import PackageNotFoundError, version

# How long a thread of torch's OpenMP team spins for the next piece of work before it sleeps, some 30 µs: longer
# than the gaps inside a step, much shorter than the turn of another process on the same core. The runtime reads it
# once, when torch is imported, so it is set here, before anything of ours can do that (docs/decisions/threads.md).
SPIN_COUNT = "2000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

try:
    __version__ = version("lorikeet-serve")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
