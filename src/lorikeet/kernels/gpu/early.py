"""Kernels that begin while the one before them still runs: programmatic dependent launch, of Hopper and later.

A kernel's programs are placed, and look up what no kernel of the step writes, in the time in which the last programs of
the one before come to their end (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
"""

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
