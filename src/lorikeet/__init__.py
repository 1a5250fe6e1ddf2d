"""Lorikeet: a server for many LoRA adapters over one base model."""

import os
from importlib.metadata import PackageNotFoundError, version

# How long an OpenMP thread of torch spins for work before it sleeps, about 30 µs: longer than the gaps inside a step,
# much shorter than a time slice of another process on the same core. The runtime reads it once, when torch is imported,
# so it is set here, before any module of this package can import torch (docs/decisions/threads.md).
SPIN_COUNT = "2000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

try:
    __version__ = version("lorikeet-serve")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
