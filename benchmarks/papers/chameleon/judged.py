"""Runs in the chosen cell, and of section 5.5 on an A100 with the chosen lengths and link."""

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.papers.chameleon.grid import CELL, CHOICE, LOADS, PRINTED
from benchmarks.papers.chameleon.simulate import CHAMELEON, S_LORA, Setting, Sweep, limits_s, run_at, work_at
from benchmarks.papers.measure import SEEDS, Run

LONG = 3
"""Number of windows of the longer run beyond S-LoRA's knee, since a backlog grows with the run's length."""
FEW_SEEDS = SEEDS[:3]
"""Seeds of knees, because a search takes many runs."""
LARGE_SEEDS = SEEDS[:2]
"""Seeds for section 5.5, whose runs are the longest."""


# --- Llama-7B on an A40 ------------------------------------------------------------------------------


def judged_load(cell: Setting, preset: str, load: str, seed: int, windows: int, accuracy: float) -> dict[str, Any]:
    """Return the figures of a system at a printed load; requests arrive during ``windows`` windows."""
    setting = msgspec.structs.replace(cell, accuracy=accuracy)
    return run_at(preset, setting, LOADS[load], windows * setting.window_s, seed)


def judged_limit(cell: Setting, reading: str, seed: int) -> float:
    """Return the limit on P99 TTFT in seconds."""
    return limits_s(cell, seed)[reading]


def judged_knee(limit_s: float, cell: Setting, preset: str, seed: int) -> float:
    """Return the knee of a system in requests/s."""
    return Sweep(preset, cell, seed, PRINTED.knee).knee(limit_s)


def load_runs(
    preset: str, load: str, windows: int = 1, accuracy: float = 0.8, seeds: Sequence[int] = SEEDS
) -> tuple[Run, ...]:
    """Return the runs of a system at a load, one per seed."""
    return tuple(Run(judged_load, (CELL, preset, load, seed, windows, accuracy)) for seed in seeds)


def knee_runs(preset: str) -> tuple[Run, ...]:
    """Return the runs that find the knee of a system, one per seed."""
    return tuple(
        Run(judged_knee, (CELL, preset, seed), (Run(judged_limit, (CELL, CHOICE.reading, seed)),)) for seed in FEW_SEEDS
    )


# --- an A100 (5.5) -----------------------------------------------------------------------------------


class Large(msgspec.Struct, frozen=True):
    """A model on an A100.

    Attributes:
        profile: name of the cost profile.
        adapters: printed number of adapters.
        near: approximate knee of S-LoRA in requests/s, at which the search starts.
        memory_gib: limit on the device's memory; 0 for all 80 GiB.
    """

    profile: str
    adapters: int
    near: float
    memory_gib: float = 0.0


LARGE = {
    "7b": Large("a100-80-llama-2-7b@chameleon", 500, 24.0),
    "13b": Large("a100-80-llama-2-13b@chameleon", 100, 12.0),
    "30b": Large("a100-80-llama-30b@chameleon", 10, 4.0),
    "7b-48gb": Large("a100-80-llama-2-7b@chameleon", 500, 20.0, 48.0),
    "7b-24gb": Large("a100-80-llama-2-7b@chameleon", 500, 8.0, 24.0),
}


def large_setting(cell: Setting, large: Large) -> Setting:
    """Return the setting of a model on an A100, with the lengths, link and step of the chosen cell."""
    return msgspec.structs.replace(
        cell, profile=large.profile, adapters=large.adapters, memory_gib=large.memory_gib, tbt_slo_s=0.0
    )


def large_knees(cell: Setting, reading: str, large: Large, seed: int) -> dict[str, float]:
    """Return S-LoRA's and Chameleon's knees in requests/s, and the mean tokens of a request (prompt plus answer)."""
    setting = large_setting(cell, large)
    limit_s = limits_s(setting, seed)[reading]
    base = Sweep(S_LORA, setting, seed, large.near).knee(limit_s)
    requests = work_at(setting, base, 1000, seed).requests
    return {
        S_LORA: base,
        CHAMELEON: Sweep(CHAMELEON, setting, seed, base).knee(limit_s),
        "tokens": sum(each.input_tokens + each.output_tokens for each in requests) / len(requests),
    }


def large_load(found: dict[str, float], cell: Setting, large: Large, load: str, seed: int) -> dict[str, float]:
    """Return the percentage by which Chameleon's P99 TTFT is below S-LoRA's at a load.

    The paper does not print the rates. The loads are 6/8.7, 8/8.7 and 9/8.7 of S-LoRA's knee.
    """
    setting, rate = large_setting(cell, large), LOADS[load] / PRINTED.knee * found[S_LORA]
    own, base = (run_at(preset, setting, rate, setting.window_s, seed)["ttft_p99_s"] for preset in (CHAMELEON, S_LORA))
    return {"rate": rate, "s_lora_s": base, "reduction": 100 * (1 - own / base)}


def large_knee_runs(model: str) -> tuple[Run, ...]:
    """Return the runs that find both knees, one per seed."""
    return tuple(Run(large_knees, (CELL, CHOICE.reading, LARGE[model], seed)) for seed in LARGE_SEEDS)


def large_load_runs(model: str) -> tuple[Run, ...]:
    """Return the runs at the three loads, three per seed."""
    knees = large_knee_runs(model)
    return tuple(
        Run(large_load, (CELL, LARGE[model], load, seed), (knee,))
        for seed, knee in zip(LARGE_SEEDS, knees, strict=True)
        for load in LOADS
    )
