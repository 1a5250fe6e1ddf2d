"""The conditions that Chameleon's paper leaves open, as a grid, and the cell in which the paper is judged.

The grid was committed before Chameleon was run on it. The cell is chosen from S-LoRA's runs alone: it is the cell where
S-LoRA's figures are nearest to the printed ones.
"""

import math
from typing import Any, NamedTuple

from benchmarks.papers.chameleon.simulate import (
    CHAMELEON,
    READINGS,
    S_LORA,
    Setting,
    alone,
    knees,
    limits_s,
    run_at,
)
from benchmarks.papers.measure import Run

PROFILE = "a40-llama-2-7b@chameleon"
LENGTHS = (0.25, 0.3, 0.35)
"""Factors on the lengths of Azure's trace.

With whole lengths, no A40 can serve the printed 8.7 requests/s: the prefill of 10,000 tokens per second takes longer
than a second. With smaller and larger factors, the knees are far from 8.7.
"""
LINKS_GB_PER_S = (1.0, 2.0, 4.0, 8.0, 16.0)
STEP_TOKENS = (512, 4096)
"""Only the middle cell has 512. The size matters: at 9 requests/s S-LoRA's P99 TTFT is 4.2 s with 512 and 1.4 s with
4,096, in one seed."""
GRID = tuple(
    Setting(PROFILE, lengths, link, step)
    for step in STEP_TOKENS
    for lengths in LENGTHS
    for link in LINKS_GB_PER_S
    if step != 512 or (lengths, link) == (0.3, 4.0)
)
MEDIUM_TOKENS = 1024
"""The medium input of Fig. 2. The profile, whose LoRA costs come from that figure, assumes the same length."""
LOADS = {"low": 6.0, "medium": 8.0, "high": 9.0}
"""Requests/s (5.2)."""
GRID_SEED = 1


class Printed(NamedTuple):
    """S-LoRA's figures as the paper prints them."""

    knee: float = 8.7
    load_percent: float = 17.5
    adapter_percent: float = 60.0


PRINTED = Printed()


def baseline_cell(setting: Setting) -> dict[str, Any]:
    """Return S-LoRA's shares of TTFT, limits, knee for each reading, and TTFT at the three loads, in a cell."""
    one = alone(setting, 128, MEDIUM_TOKENS)
    limits = limits_s(setting, GRID_SEED)
    return {
        "load_percent": 100 * (1 - one["there_s"] / one["loaded_s"]),
        "adapter_percent": 100 * (1 - one["base_s"] / one["loaded_s"]),
        "limits_s": limits,
        "knees": knees(S_LORA, setting, limits, PRINTED.knee, GRID_SEED),
        "loads": _at_loads(S_LORA, setting),
    }


def chameleon_cell(baseline: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return Chameleon's knee for the reading of the limit that is nearest in the cell, and TTFT at the three loads."""
    reading = min(READINGS, key=lambda each: distance(baseline, each))
    limits = {reading: baseline["limits_s"][reading]}
    return {
        "knees": knees(CHAMELEON, setting, limits, PRINTED.knee, GRID_SEED),
        "loads": _at_loads(CHAMELEON, setting),
    }


def _at_loads(preset: str, setting: Setting) -> dict[str, Any]:
    found = {load: run_at(preset, setting, rate, setting.window_s, GRID_SEED) for load, rate in LOADS.items()}
    kept = ("ttft_p50_s", "ttft_p99_s", "hit_share", "completed_share")
    return {load: {name: each[name] for name in kept} for load, each in found.items()}


class Choice(NamedTuple):
    """The cell in which the paper is judged.

    Attributes:
        place: index in ``GRID``.
        reading: reading of the limit, one of ``READINGS``.
        distance: see ``distance``.
    """

    place: int
    reading: str
    distance: float


def distance(cell: dict[str, Any], reading: str) -> float:
    """Return the distance of S-LoRA's figures in a cell from the printed ones: the sum of the logarithms of ratios."""
    ours = (cell["knees"][reading], cell["load_percent"], cell["adapter_percent"])
    return sum(abs(math.log(mine / theirs)) for mine, theirs in zip(ours, PRINTED, strict=True))


def choose(*cells: dict[str, Any]) -> Choice:
    """Return the cell and the reading nearest to S-LoRA's printed figures."""
    found = [
        Choice(place, reading, distance(cell, reading)) for place, cell in enumerate(cells) for reading in cell["knees"]
    ]
    return min(found, key=lambda each: each.distance)


BASELINES = tuple(Run(baseline_cell, (setting,)) for setting in GRID)
CHAMELEONS = tuple(
    Run(chameleon_cell, (setting,), (baseline,)) for setting, baseline in zip(GRID, BASELINES, strict=True)
)
CHOICE = Choice(0, "p99-ttft", 0.087)
"""The result of ``choose`` for all baselines, committed before Chameleon was run in the cell."""
CELL = GRID[CHOICE.place]
