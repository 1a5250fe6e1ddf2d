"""memory.6: the highest load of each row under one limit on TTFT, searched by simulation and probed live."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accept.disturbance import drift_words
from benchmarks.accept.lines import Result, line
from benchmarks.accept.memory_common import (
    DISCARDING,
    OURS,
    RIVALS,
    S_LORA,
    SLO_TIMES,
    STATIC,
    UNLOADED_RATE,
    memory_runs,
    part_name,
)
from benchmarks.accept.runs import StoredRuns

BOUNDS = {S_LORA: 1.4, DISCARDING: 1.2}
REPEATS, NEAR = 3, 1.15
"""A searched peak is confirmed if the row meets the limit at the peak divided by this, and misses it at that many times
the peak, in most repeats. At the peak itself the search ends where either may happen.
"""
BELOW, BEYOND = "below", "beyond"
SIDES = {BELOW: 1 / NEAR, BEYOND: NEAR}
"""Of a peak, and the rate there as a multiple of it."""


class Repeat(NamedTuple):
    """What one profile of the machine says, and what the machine does right after it.

    Attributes:
        slo_s: the limit on the mean TTFT.
        peaks: row → the highest rate that meets it, in requests per second.
        live: row → side of its peak → mean TTFT ÷ the limit on a machine as fast as it was then.
        searches: row → rates and attainments of its search.
        stolen: share of the processors' time that others took of the profile and of each probe.
        drift: by what share the steps of each probe took longer than the profile says.
    """

    slo_s: float
    peaks: dict[str, float]
    live: dict[str, dict[str, float]]
    searches: dict[str, Any]
    stolen: list[float]
    drift: list[float]


@line(
    "memory.6",
    title=f"Peak load under one limit on the mean TTFT, {SLO_TIMES} × elora's own without load",
    bound="elora ≥ "
    + ", ≥ ".join(f"{bound:g} × {rival}" for rival, bound in BOUNDS.items())
    + f"; live, in most of {REPEATS} repeats, each row meets the limit at its peak ÷ {NEAR:g}, and misses it at its "
    f"peak × {NEAR:g}",
)
def run(runs: StoredRuns) -> Result:
    """Profile this machine, search by that, and probe every row twice; in each repeat anew.

    Machines drift from one quarter of an hour to the next: a peak is probed soon after it was searched, and on a
    machine that has drifted by less than a probe's distance from its peak, if that can be had.
    """
    repeats = [_measure(number) for number in range(REPEATS)]
    times, live = ratios(repeats), shares(repeats)
    failures = failures_of(repeats)
    with memory_runs("memory.6", "0") as memory:
        words = memory.words()
    return Result(
        figure={
            **{f"elora ÷ {rival}": ratio for rival, ratio in times.items()},
            "peaks": {row: ", ".join(f"{each.peaks[row]:.2f}" for each in repeats) + "/s" for row in live},
            "live, mean TTFT ÷ limit": {
                row: f"{sides[BELOW]:.2f} below the peak, {sides[BEYOND]:.2f} beyond" for row, sides in live.items()
            },
            f"peaks confirmed live, of {REPEATS}": {row: confirmed(repeats, row) for row in live},
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{words}; the limit is {SLO_TIMES} × what elora has at {UNLOADED_RATE:g}/s by the profile, for a probe "
        "longer by as much as its steps were; peak load as ELORA defines it (section VIII-A): the highest rate at "
        "which the mean TTFT stays below the limit; with host KV "
        f"({STATIC}) the ratio has no bound; each of {REPEATS} repeats measures this machine's quick profile, searches "
        "limit and peaks by that, and probes all rows in turns; figures are medians of the repeats; limits "
        + ", ".join(f"{each.slo_s:.3f}" for each in repeats)
        + f" s; a profile or probe was {drift_words()}: of the profile and the probes of each repeat others "
        "took "
        + ", ".join(f"{stolen:.1%}" for each in repeats for stolen in each.stolen)
        + ", and their steps took longer by "
        + ", ".join(f"{drift:.0%}" for each in repeats for drift in each.drift),
        details={"repeats": [each._asdict() for each in repeats]},
    )


def ratios(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Return how many times a rival's peak ours is, the median over the repeats."""
    return {rival: median(each.peaks[OURS] / each.peaks[rival] for each in repeats) for rival in RIVALS}


def shares(repeats: Sequence[Repeat]) -> dict[str, dict[str, float]]:
    """Return what share of the limit a row's mean TTFT takes live on each side of its peak, medians likewise."""
    return {row: {side: median(each.live[row][side] for each in repeats) for side in SIDES} for row in (OURS, *RIVALS)}


def confirmed(repeats: Sequence[Repeat], row: str) -> int:
    """Return in how many repeats a row met the limit live below its peak and missed it beyond: in the same one both."""
    return sum(each.live[row][BELOW] <= 1 < each.live[row][BEYOND] for each in repeats)


def failures_of(repeats: Sequence[Repeat]) -> list[str]:
    """Return what misses the bound, in words."""
    times = ratios(repeats)
    failures = [f"{times[rival]:.2f} × {rival}" for rival, bound in BOUNDS.items() if times[rival] < bound]
    for row in (OURS, *RIVALS):
        if 2 * confirmed(repeats, row) <= len(repeats):
            below, beyond = (", ".join(f"{each.live[row][side]:.2f}" for each in repeats) for side in SIDES)
            failures.append(f"{row}'s peak is not confirmed live: {below} of the limit below it, {beyond} beyond")
    return failures


def _share_of_limit(run: Mapping[str, Any], slo_s: float) -> float:
    """Return a probe's mean TTFT ÷ limit; that is a multiple of a time of the machine, and drifts as its steps do."""
    return float(run["figures"]["ttft_mean_s"] / (slo_s * (1 + run["drift"])))


def _measure(number: int) -> Repeat:
    rows = (OURS, *RIVALS) if number % 2 == 0 else (*reversed(RIVALS), OURS)
    with memory_runs("memory.6", str(number)) as memory:
        peaks = {row: memory.peak_rate(row) for row in rows}
        probes = {
            row: {
                side: memory.live(f"live-{part_name(row)}-{side}", row, times * peaks[row])
                for side, times in SIDES.items()
            }
            for row in rows
        }
        return Repeat(
            slo_s=memory.slo_s,
            peaks=peaks,
            live={
                row: {side: _share_of_limit(run, memory.slo_s) for side, run in each.items()}
                for row, each in probes.items()
            },
            searches={row: list(memory.peak(row).probes) for row in rows},
            stolen=[memory.profile_stolen, *(run["stolen"] for each in probes.values() for run in each.values())],
            drift=[run["drift"] for each in probes.values() for run in each.values()],
        )
