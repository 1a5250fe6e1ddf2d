"""Cases of linear products for the native kernels."""

import hypothesis.strategies as st
import torch

from lorikeet.kernels.native import NativeKernels, load_library

DTYPES = (torch.bfloat16, torch.float32)

# On both sides of every size that the kernel cuts at: tiles of 4, 8 and 16 rows, blocks of 32 and 64, panels of 32
# or 48 columns, steps of 32 inputs.
sizes = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 130, 257]))


def kernels(instruction_set: str, threads: int = 2) -> NativeKernels:
    made = NativeKernels(instruction_set, load_library(instruction_set))
    made.threads = threads
    return made
