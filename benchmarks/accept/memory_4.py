"""memory.4: the memory's rows beside each other, live, each rival at 80 % of its own peak."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from benchmarks.accept.disturbance import drift_words
from benchmarks.accept.lines import Result, line
from benchmarks.accept.memory_common import (
    LOAD,
    OURS,
    RIVALS,
    S_LORA,
    STATIC,
    MemoryRuns,
    memory_runs,
    paired,
    part_name,
)
from benchmarks.accept.offline import interval_words
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.statistics import Ratio, mean_of, p95_of, ratio_over_requests

REPEATS, TTFT = 3, 0.6


class Pair(NamedTuple):
    """Runs of two rows in turns.

    Attributes:
        rate: of the requests, per second.
        ours, theirs: see ``MemoryRuns.live``.
    """

    rate: float
    ours: list[dict[str, Any]]
    theirs: list[dict[str, Any]]


@line(
    "memory.4",
    title="TTFT of elora beside elora:s-lora and vllm-static, live and interleaved, at 80 % of the rival's peak",
    bound=f"mean TTFT ≤ {TTFT:g} × elora:s-lora and vllm-static without host KV, < 1 × vllm-static with host KV (whole "
    "interval); intervals of TPOT include or lie below 1; no invalid KV",
)
def run(runs: StoredRuns) -> Result:
    """Profile this machine for every pair and run both its sides in turns; one more pair without a declared link."""
    pairs = {rival: _pair(rival) for rival in RIVALS}
    with beside(S_LORA) as memory:
        unpaced = {
            row: memory.live(f"unpaced-{part_name(row)}", row, pairs[S_LORA].rate, paced=False)
            for row in (OURS, S_LORA)
        }
        words = memory.words()
    ratios = {rival: _ratios(pair.ours, pair.theirs) for rival, pair in pairs.items()}
    invalid = max(run["figures"]["invalid_kv_share"] for pair in pairs.values() for run in pair.ours)
    failures = [failure for rival, found in ratios.items() for failure in _failures(rival, found)]
    if invalid > 0:
        failures.append(f"{invalid:.2%} of elora's KV was invalid")
    unpaced_ratio = unpaced[OURS]["figures"]["ttft_mean_s"] / unpaced[S_LORA]["figures"]["ttft_mean_s"]
    first = ratios[S_LORA]["TTFT"]
    return Result(
        figure={
            **{
                f"{name} of elora ÷ {rival}": f"{ratio.value:.3f} ({interval_words(ratio[1:])})"
                for rival, found in ratios.items()
                for name, ratio in found.items()
            },
            "invalid KV": invalid,
            "TTFT ÷ elora:s-lora without a declared link": unpaced_ratio,
        },
        interval=(first.low, first.high),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{words}; {REPEATS} interleaved repeats; 95 % bootstrap over requests; loads by a quick profile right "
        "before each pair: "
        + ", ".join(f"{pair.rate:.2f}/s beside {rival}" for rival, pair in pairs.items())
        + "; mean TTFT, ms: "
        + "; ".join(f"elora {_ms(pair.ours)}, {rival} {_ms(pair.theirs)}" for rival, pair in pairs.items())
        + "; steps took longer than the profile says by: "
        + "; ".join(f"elora {_drift(pair.ours)}, {rival} {_drift(pair.theirs)}" for rival, pair in pairs.items())
        + f"; a profile or run was {drift_words()}; arrivals in this process; interval of the first ratio",
        details={
            "rows": {
                rival: {
                    "elora": [run["figures"] for run in pair.ours],
                    rival: [run["figures"] for run in pair.theirs],
                }
                for rival, pair in pairs.items()
            },
            "unpaced": {row: run["figures"] for row, run in unpaced.items()},
        },
    )


def beside(rival: str) -> AbstractContextManager[MemoryRuns]:
    """Return the runs of ours and of a rival, by a profile of their own."""
    return memory_runs("memory.4", f"beside-{part_name(rival)}")


def _pair(rival: str) -> Pair:
    with beside(rival) as memory:
        return run_pair(memory, rival)


def run_pair(memory: MemoryRuns, rival: str) -> Pair:
    """Run ours and the rival at the rival's load; which comes first changes from repeat to repeat."""
    rate = LOAD * memory.peak_rate(rival)
    sides: dict[str, list[dict[str, Any]]] = {OURS: [], rival: []}
    for repeat in range(REPEATS):
        for row in sorted(sides, reverse=bool(repeat % 2)):
            sides[row].append(memory.live(f"{repeat}-{part_name(row)}", row, rate))
    return Pair(rate, sides[OURS], sides[rival])


def _ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Ratio]:
    ttft, tpot = paired(ours, theirs, "ttft_s"), paired(ours, theirs, "tpot_s")
    return {
        "TTFT": ratio_over_requests(*ttft, mean_of),
        "P95 TTFT": ratio_over_requests(*ttft, p95_of),
        "TPOT": ratio_over_requests(*tpot, mean_of),
    }


def _failures(rival: str, found: dict[str, Ratio]) -> list[str]:
    ttft, tpot = found["TTFT"], found["TPOT"]
    missed = ttft.high >= 1 if rival == STATIC else ttft.value > TTFT
    return [
        *([f"TTFT is {ttft.value:.2f} × that of {rival} ({interval_words(ttft[1:])})"] if missed else []),
        *([f"TPOT is {tpot.value:.2f} × that of {rival} ({interval_words(tpot[1:])})"] if tpot.low > 1 else []),
    ]


def _ms(runs: list[dict[str, Any]]) -> str:
    return " ".join(f"{run['figures']['ttft_mean_s'] * 1e3:.0f}" for run in runs)


def _drift(runs: list[dict[str, Any]]) -> str:
    return " ".join(f"{run['drift']:.0%}" for run in runs)
