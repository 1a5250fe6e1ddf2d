"""Where the time of a step goes, by kernel: what stands beside a figure that misses its bound."""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.accept.inprocess import THREADS, default_kernels, kernels_as, make_requests, replica, run_all
from benchmarks.accept.models import default_model
from benchmarks.accept.stopwatch import KERNELS, Stopwatch
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter


def step_profile(requests: int, prompt_tokens: int, output_tokens: int, rank: int = 0) -> dict[str, float]:
    """Return the milliseconds of a step by kernel, medians over all steps that gave one sequence a token.

    Kernels are called one by one, where an engine may have all layers in one call.

    Args:
        requests: so many at once, run once to warm up and once to be measured.
        prompt_tokens, output_tokens: of each; of one output token, steps are prefills.
        rank: of an adapter that all run under; 0 for the base model.

    Returns:
        Kernel → ms, ``outside`` for all that is no call of a kernel, and ``step`` for the whole.
    """
    torch.set_num_threads(THREADS)
    watch = Stopwatch(default_kernels(), timed=KERNELS)
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-profile-") as scratch,
        kernels_as(watch),
        replica(default_model(), "bfloat16", threads=THREADS, touch_memory=True) as built,
    ):
        refs = []
        if rank:
            folder = write_random_adapter(Path(scratch) / "adapter", built.sizes.geometry, rank, seed=0)
            refs = [reference(folder.name, folder, built.sizes.geometry)]
        for turn in range(2):
            watch.steps.clear()
            run_all(built, make_requests(f"{turn}", requests, prompt_tokens, output_tokens, refs, seed=turn))
        steps = watch.decode_steps(rows=1)
    found = {name: statistics.median(times.in_kernels_s.get(name, 0.0) for _, times in steps) for name in KERNELS}
    found["step"] = statistics.median(seconds for seconds, _ in steps)
    found["outside"] = statistics.median(seconds - sum(times.in_kernels_s.values()) for seconds, times in steps)
    return {name: seconds * 1e3 for name, seconds in found.items()}


def profile_words(profile: dict[str, float]) -> str:
    """Say it, the largest part first."""
    parts = sorted((ms, name) for name, ms in profile.items() if name != "step")
    named = ", ".join(f"{name} {ms:.2f}" for ms, name in reversed(parts))
    return f"kernel by kernel, a step of {profile['step']:.2f} ms is {named}"
