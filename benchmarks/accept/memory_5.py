"""memory.5: every row by the modelled executor, once it has met the live runs, and ELORA's largest setting."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from benchmarks.accept import elora_figures as paper
from benchmarks.accept import memory_large as large
from benchmarks.accept.lines import Result, line
from benchmarks.accept.memory_4 import beside, run_pair
from benchmarks.accept.memory_common import LOAD, OURS, RIVALS, S_LORA, STATIC, MemoryRuns, part_name
from benchmarks.accept.memory_page import AS_FAST, memory_page, reduction
from benchmarks.accept.runs import ROOT, StoredRuns
from lorikeet.rows import ROWS

WITHIN = 0.15
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
"""Of the device for adapters, among which the oracle finds the best split; the paper's steps (VIII-J)."""
PAGE = ROOT / "docs" / "memory-rows.md"
_PLAIN = "lorikeet:plain"

_Sides = Mapping[str, Sequence[Mapping[str, Any]]]
"""Ours, then a rival, and the runs of each."""


@line(
    "memory.5",
    title="All rows by the modelled executor, and Llama-2-70B on eight H100",
    bound=f"the modelled executor reproduces memory.4's ratios of mean TTFT and TPOT within {WITHIN:.0%}; then every "
    "row on the same workload, and ELORA's 70B setting beside the paper's figures, in docs/memory-rows.md",
)
def run(runs: StoredRuns) -> Result:
    """Compare with the stored live runs, then model what nobody ran live, and write the page."""
    checks = [check for rival in RIVALS for check in _checks(rival)]
    with beside(S_LORA) as memory:
        rate, high_rate = LOAD * memory.peak_rate(S_LORA), LOAD * memory.peak_rate(OURS)
        rows = {row: _row(runs, memory, row, rate, high_rate) for row in _rows()}
        splits = {share: _row(runs, memory, f"{STATIC},adapter_share={share:g}", rate, high_rate) for share in SHARES}
        words = memory.words()
    cases = _large(runs)
    PAGE.write_text(memory_page(words, (rate, high_rate), checks, rows, splits, cases))
    off = [check for check in checks if abs(check["error"]) > WITHIN]
    whole = [share for share, found in splits.items() if found["low"]["completed"] == found["low"]["requests"]]
    best = min(whole, key=lambda share: float(splits[share]["low"]["ttft_mean_s"]))
    return Result(
        figure={
            "largest error": max(abs(check["error"]) for check in checks),
            "largest error by the profiles as they were": max(
                abs(check["as_profiled"] / check["live"] - 1) for check in checks
            ),
            **{check["what"]: f"{check['modelled']:.3f} beside {check['live']:.3f} live" for check in checks},
            "rows": len(rows),
            "best static split": f"{best:g}",
            **_large_figures(cases),
        },
        passed=not off,
        cause="; ".join(f"{check['what']} is off by {check['error']:.0%}" for check in off),
        notes=f"{words}; page: docs/memory-rows.md; by profiles of this machine and {large.PROFILE}; {AS_FAST}",
        details={"checks": checks, "rows": rows, "splits": {f"{k:g}": v for k, v in splits.items()}, "large": cases},
    )


def _checks(rival: str) -> list[dict[str, Any]]:
    """Set ratios and times of memory.4's runs beside the same runs by the profile, on a machine as fast as it was."""
    with beside(rival) as memory:
        pair = run_pair(memory, rival)
        live = {OURS: pair.ours, rival: pair.theirs}
        modelled = {row: [memory.modelled(row, pair.rate, run["drift"]) for run in runs] for row, runs in live.items()}
        as_profiled = {row: [memory.modelled(row, pair.rate)] for row in live}
    return [
        _check(rival, name, live, modelled) | {"as_profiled": _ratio(_means(as_profiled, name))}
        for name in ("ttft_mean_s", "tpot_mean_s")
    ]


def _check(rival: str, name: str, live: _Sides, modelled: _Sides) -> dict[str, Any]:
    measured_s, modelled_s = _means(live, name), _means(modelled, name)
    return {
        "what": f"{name.split('_')[0].upper()} ÷ {rival}",
        "live": _ratio(measured_s),
        "modelled": _ratio(modelled_s),
        "error": _ratio(modelled_s) / _ratio(measured_s) - 1,
        "seconds": {row: [measured_s[row], modelled_s[row]] for row in live},
    }


def _means(sides: _Sides, name: str) -> dict[str, float]:
    return {row: fmean(run["figures"][name] for run in runs) for row, runs in sides.items()}


def _ratio(seconds: Mapping[str, float]) -> float:
    ours, theirs = seconds.values()
    return ours / theirs


def _rows() -> list[str]:
    """Systems that differ in their memory."""
    return [name for name in ROWS if not name.startswith("lorikeet:") or name == _PLAIN]


def _row(runs: StoredRuns, memory: MemoryRuns, row: str, rate: float, high_rate: float) -> dict[str, Any]:
    name = part_name(row).replace(",", "-")
    return {
        load: runs.get(f"row-{name}-{load}", lambda at=at: memory.modelled(row, at)["figures"])  # type: ignore[misc]
        for load, at in (("low", rate), ("high", high_rate))
    }


def _large(runs: StoredRuns) -> list[dict[str, Any]]:
    """Run the cases of ELORA's setting, two at a time."""
    names = list(product(large.SCENARIOS, large.ADAPTERS))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = {name: pool.submit(_stored_case, name) for name in names}
        return [runs.get(_part(name), found[name].result) for name in names]


def _stored_case(name: tuple[str, int]) -> dict[str, Any]:
    """Run a case in a process of its own, and keep it even if another one fails."""
    return StoredRuns("memory.5").get(_part(name), partial(large.run_case, name))


def _part(name: tuple[str, int]) -> str:
    return f"large-{name[0]}-{name[1]}"


def _large_figures(cases: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"70B: TTFT less than {rival}": f"{fmean(reduction(case, rival, 'ttft_mean_s') for case in cases):.0%} (paper "
        f"{fmean(figures.ttft_reduction.values()):.0%})"
        for rival, figures in paper.RIVALS.items()
    }
