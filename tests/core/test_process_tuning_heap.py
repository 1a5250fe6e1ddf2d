"""What a step frees stays with the process."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

STEPS = """
import resource, torch
from lorikeet.core.process_tuning import keep_freed_memory

if {kept}:
    keep_freed_memory()
for step in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**17) for _ in range(20)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 20 * 2**19 // 4096


@pytest.mark.parametrize("kept", [False, True])
def test_a_step_takes_no_new_memory_if_what_others_freed_is_kept(*, kept: bool) -> None:
    # glibc's own thresholds move with what is freed; one that is given stays as it is, until another one is.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", STEPS.format(kept=kept)]
    faults = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert faults < PAGES / 100 if kept else faults > PAGES / 2
