"""Options for launching Triton kernels, with programmatic dependent launch (PDL) on Hopper and later GPUs."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the memory writes of the previous kernel, then let the next kernel start (with PDL).

    Every program must call this: the next kernel waits for this kernel only.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


INTERPRETED = bool(triton.knobs.runtime.interpret)
PROGRAMS = 264
"""Programs that keep a large device busy: two per multiprocessor of an H100."""


@cache
def _has_pdl() -> bool:
    """Return whether the GPU has programmatic dependent launch (Hopper and later)."""
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


def launch(warps: int, stages: int = 0) -> dict[str, int | bool]:
    """Return launch options, including ``PDL``, the last argument of every kernel.

    Args:
        warps: number of warps of a program.
        stages: number of pipeline stages, which is the number of tiles in flight; 0 for Triton's choice.
    """
    options: dict[str, int | bool] = {"num_warps": warps, "PDL": _has_pdl()}
    if stages:
        options["num_stages"] = stages
    if _has_pdl():
        options["launch_pdl"] = True
    return options


def tiles_of(count: int, width: int) -> int:
    """Return ``count / width`` rounded up. Triton's ``cdiv`` takes microseconds on the host."""
    return -(-count // width)


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least ``count``. Triton's function takes microseconds on the host."""
    return 1 << (count - 1).bit_length()
