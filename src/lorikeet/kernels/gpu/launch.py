"""Launching Triton kernels, with programmatic dependent launch on Hopper and later."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def await_last(EARLY: tl.constexpr):
    """Wait for all that the kernels before have written; then let the next one begin.

    Every program must come here: the next kernel waits for this one alone.
    """
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


INTERPRETED = bool(triton.knobs.runtime.interpret)
PROGRAMS = 264
"""So many programs or more keep a large device busy: two on each multiprocessor of an H100."""


@cache
def _begins_early() -> bool:
    """Whether kernels may begin while the one before them still runs (``early.await_last``): on Hopper and later."""
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


def launch(warps: int, stages: int = 0) -> dict[str, int | bool]:
    """Return what Triton is told beside a kernel's own arguments, with ``EARLY``, which every kernel has as its last.

    Args:
        warps: of a program.
        stages: tiles on their way at a time; 0 for Triton's choice.
    """
    options: dict[str, int | bool] = {"num_warps": warps, "EARLY": _begins_early()}
    if stages:
        options["num_stages"] = stages
    if _begins_early():
        options["launch_pdl"] = True
    return options


def tiles_of(count: int, width: int) -> int:
    """Return how many tiles it takes. Triton's own function is one for kernels, too, and takes microseconds."""
    return -(-count // width)


def power_of_2(count: int) -> int:
    """Return the least power of two that is no less; likewise."""
    return 1 << (count - 1).bit_length()
