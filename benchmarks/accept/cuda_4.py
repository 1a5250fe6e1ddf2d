"""cuda.4: a profile of a GPU by the product's own command, and the modelled executor beside the engine there."""

import gc
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.accept.costs_2 import WITHIN, Bed, twin_result
from benchmarks.accept.gpu_rig import SHAPE, GpuRig, gpu_rig, why_no_gpu
from benchmarks.accept.lines import NOT_RUN, Result, line
from benchmarks.accept.machine_profile import machine_profile
from benchmarks.accept.runs import StoredRuns
from lorikeet.costs.profile import CostProfile

LINE, MEMORY_BYTES = "cuda.4", 32 * 2**30


@line(
    LINE,
    title=f"A profile of a GPU with the shape of {SHAPE}, and the twin by it",
    bound=f"lorikeet profile --device cuda writes a profile; mean, P50 and P95 of TTFT, TPOT and E2E as in costs.2: "
    f"within max({WITHIN:.0%}, the spread of the live repeats)",
)
def run(runs: StoredRuns) -> Result:
    """Compare the twins there."""
    if (reason := why_no_gpu()) is not None:
        return Result(figure=NOT_RUN, passed=False, cause=reason)
    with gpu_rig() as rig, tempfile.TemporaryDirectory(prefix="lorikeet-gpu-") as scratch:
        settings = rig.settings(memory_bytes=MEMORY_BYTES)
        return twin_result(runs, Bed(settings, partial(gpu_profile, rig), Path(scratch)))


def gpu_profile(rig: GpuRig, part: str = "profile") -> CostProfile:
    """Return the GPU's profile, measured once and kept as a part of this line."""
    flags = ("--device", "cuda", "--model", str(rig.model), "--load-format", "dummy", "--max-step-tokens", "2048")
    # The command has a process of its own, which needs what engines of this one had. Quick, as there are four of them.
    gc.collect()
    torch.cuda.empty_cache()
    return machine_profile(StoredRuns(LINE), part, quick=True, flags=flags)
