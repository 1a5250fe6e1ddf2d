"""The threads of a team are pinned and unpinned, on every instruction set of this machine."""

import os
from contextlib import suppress

import pytest
import torch

from lorikeet.core.machine import usable_cores
from lorikeet.kernels.native import NativeKernels, load_library, supported_instruction_sets

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="no native library can be used here")


def places() -> dict[int, set[int]]:
    """Where each thread of this process may run that is not just ending, as those of other tests may be."""
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            found[thread] = set(os.sched_getaffinity(thread))
    return found


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
def test_each_thread_is_pinned_to_its_own_core_until_it_is_unpinned(instruction_set: str) -> None:
    cores = sorted(usable_cores())
    kernels = NativeKernels(instruction_set, load_library(instruction_set))
    threads = torch.get_num_threads()
    kernels.threads = len(cores)
    try:
        with kernels.pin_threads(cores):
            apart = places()
        together = places()
    finally:
        kernels.threads = threads
    assert apart[os.getpid()] == {cores[0]}
    assert sorted(core for place in apart.values() if len(place) == 1 for core in place)[: len(cores)] == cores
    assert all(place == set(cores) for place in together.values())
