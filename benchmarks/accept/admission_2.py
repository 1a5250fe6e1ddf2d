"""admission.2: nobody starves beyond the knee, and few requests are squashed."""

from typing import Any

import numpy as np

from benchmarks.accept.admission_common import (
    FIFO,
    HALF_HOUR_S,
    OURS,
    WORDS_OF_KNEE,
    Case,
    Outcome,
    figures_of,
    modelled_knee,
    part_name,
    profile_rig,
    run_modelled,
    setting_words,
    two_processes,
)
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_work import MemoryWork
from lorikeet.bench.predictors import make_predictor
from lorikeet.core.adapter import AdapterRef
from lorikeet.scheduling.multilevel.classes import find_classes
from lorikeet.scheduling.multilevel.sizes import Sizes, weighted_sizes

OVERLOAD, TIMES_FIFO, SQUASHED = 1.3, 3.0, 0.05
NO_SCHEDULER = "chameleon:no-scheduler"
SETTINGS = (OURS, "chameleon:literal", "chameleon:lazy", "chameleon,admission=chameleon:literal-lazy")
"""Both readings of how many classes there are, with both readings of who is squashed."""


@line(
    "admission.2",
    title=f"Chameleon's queues at {OVERLOAD:g} × the knee for {HALF_HOUR_S / 60:.0f} minutes, modelled",
    bound="no queue with waiters goes longer without an admission than the longest run of a request of its class; "
    f"longest wait of a large request ≤ {TIMES_FIFO:g} × FIFO's; squashes ≤ {SQUASHED:.0%} (literal and lazy)",
)
def run(runs: StoredRuns) -> Result:
    """Run every setting and both FIFO rows on the same requests."""
    knee = modelled_knee()
    rate = OVERLOAD * knee["rate"]
    requests = round(rate * HALF_HOUR_S)
    with two_processes() as pool:
        made = {
            row: pool.submit(stored_run, Case(row=row, rate=rate, requests=requests))
            for row in (*SETTINGS, FIFO, NO_SCHEDULER)
        }
        found = {row: each.result() for row, each in made.items()}
    fifo_s = found[FIFO]["longest_large_wait_s"]
    failures = [failure for row in SETTINGS for failure in failures_of(row, found[row], fifo_s)]
    ours = found[OURS]
    return Result(
        figure={
            "longest gap ÷ longest run": longest_gap_share(ours),
            "longest wait of a large request ÷ FIFO's": ours["longest_large_wait_s"] / fifo_s,
            "squashed": {row: f"{found[row]['squashed_share']:.2%}" for row in SETTINGS},
            "P99 TTFT, s": {row: f"{each['ttft_p99_s']:.1f}" for row, each in found.items()},
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{setting_words()}; {rate:.2f} requests/s; knee ({knee['rate']:.2f}/s): {WORDS_OF_KNEE}; gaps and runs "
        f"by class, the largest ratio; large: the last class of all requests of the run ({ours['large']} of "
        f"{ours['requests']}, {ours['large_mean_tokens']:,.0f} tokens on average); a wait ends with the last "
        f"admission; FIFO is {FIFO}, with the cache ({NO_SCHEDULER}) its longest is "
        f"{found[NO_SCHEDULER]['longest_large_wait_s']:.0f} s",
        details=found,
    )


def stored_run(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own, and keep it even if another one fails."""
    return StoredRuns("admission.2").get(part_name(case.row), lambda: overload_figures(case))


def overload_figures(case: Case) -> dict[str, Any]:
    """Run a case, and return its figures with those of the large requests."""
    outcome = run_modelled(case)
    figures, large = figures_of(outcome), large_requests(case, outcome.work)
    del figures["ttft_s"]
    return figures | {
        "large": int(large.sum()),
        "large_mean_tokens": _mean_tokens(outcome, large),
        "longest_large_wait_s": float(np.asarray(outcome.waits_s)[large].max()),
        "squashed_share": 0.0 if outcome.queue is None else outcome.queue.squashed / case.requests,
    }


def large_requests(case: Case, work: MemoryWork) -> np.ndarray:
    """Return which requests are in the last class of all requests of a workload, by what is predicted of them.

    The queue finds its classes anew every five minutes; which requests are large must not depend on when they came.
    """
    predictor = make_predictor(case.predictor, work.requests, case.seed)
    assert predictor is not None
    adapters = profile_rig(case, work)[0].adapters
    sizes = np.array(
        [
            (each.input_tokens, predictor.predict(each, index), _bytes_of(adapters, each.adapter))
            for index, each in enumerate(work.requests)
        ],
        np.float64,
    )
    inputs, outputs = np.percentile(sizes[:, :2], 99.9, axis=0)
    weighted = weighted_sizes(sizes, Sizes(inputs, outputs, sizes[:, 2].max()))
    return weighted > find_classes(weighted).boundaries[-1]


def _bytes_of(adapters: dict[str, AdapterRef], name: str | None) -> int:
    return 0 if name is None else adapters[name].weight_bytes


def _mean_tokens(outcome: Outcome, large: np.ndarray) -> float:
    tokens = np.array([each.input_tokens + each.output_tokens for each in outcome.work.requests])
    return float(tokens[large].mean())


def longest_gap_share(found: dict[str, Any]) -> float:
    """Return the longest time without an admission ÷ the longest run, of the class in which that is most."""
    gaps, longest = found["queue"]["longest_gap_s"], found["queue"]["longest_run_s"]
    return max(float(gap_s) / float(longest[number]) for number, gap_s in gaps.items())


def failures_of(row: str, found: dict[str, Any], fifo_s: float) -> list[str]:
    """Return what a setting misses of the bound, in words."""
    gap, wait_s, squashed = longest_gap_share(found), found["longest_large_wait_s"], found["squashed_share"]
    return [
        *([f"{row}: a queue waited {gap:.2f} × its longest run for an admission"] if gap > 1 else []),
        *([f"{row}: a large request waited {wait_s / fifo_s:.1f} × FIFO's"] if wait_s > TIMES_FIFO * fifo_s else []),
        *([f"{row}: {squashed:.1%} squashed"] if squashed > SQUASHED else []),
    ]
