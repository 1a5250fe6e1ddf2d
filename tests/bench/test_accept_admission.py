"""What the lines of admission make of their runs."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.accept import admission_2, admission_3
from benchmarks.accept import admission_cases as cases
from benchmarks.accept.admission_common import (
    FIFO,
    GROWTH,
    OURS,
    PROFILE,
    Case,
    Outcome,
    Sample,
    by_rank,
    figures_of,
    find_knee,
    growth,
    make_work,
    over_time,
    run_modelled,
)
from benchmarks.accept.admission_page import admission_page
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_bench import MemorySetting
from lorikeet.bench.statistics import Ratio
from lorikeet.bench.synthetic import PAPER_RANKS, adapter_names, spread, synthetic_adapters
from lorikeet.costs.catalog import load_profile
from lorikeet.rows import resolve_row
from lorikeet.scheduling.policies import ADMISSION


@cache
def outcome(row: str) -> Outcome:
    """A run of a few requests that come faster than they can be served, and need more than the pool has."""
    return run_modelled(Case(row=row, rate=60.0, requests=150))


def figures(ttft_s: list[float], **changes: Any) -> dict[str, Any]:
    """Return what a run tells, with figures to check by hand; a name that no run tells is an error."""
    given: dict[str, Any] = {"requests": len(ttft_s), "ttft_s": ttft_s, "ttft_mean_s": float(np.mean(ttft_s))}
    given |= {f"ttft_p{percent}_s": float(np.percentile(ttft_s, percent)) for percent in (50, 95, 99)}
    given |= {"tbt_p99_s": 0.12, "rank_p99_s": {"8": 1.0, "128": 4.0}, "over_time_p99_s": [1.0, None, 3.0]}
    given |= {"duration_s": 3480.0, "drained_s": 3600.0 + sum(ttft_s)}
    given |= {"adapter_hit_rate": 0.5, "prefetch_accuracy": 0.25, "preempted": 3, "to_device_bytes": 1000}
    given["queue"] = {"quota_tokens": (1, 2, 3), "squashed": 1, "bypassed": 2, "joined": 0}
    told = figures_of(outcome(OURS))
    assert given.keys() <= told.keys()
    assert given["queue"].keys() <= told["queue"].keys()
    return given | changes


# --- the workload ------------------------------------------------------------------------------------


def test_requests_have_azures_lengths_chameleons_ranks_and_exactly_the_rate() -> None:
    work = make_work(Case(row=FIFO, rate=2.5, requests=4001))
    assert work.requests[-1].arrival_s == pytest.approx(1600.0)
    gaps_s = np.diff([each.arrival_s for each in work.requests])
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.05)
    assert np.mean([each.input_tokens for each in work.requests]) == pytest.approx(1155, rel=0.05)
    assert np.mean([each.output_tokens for each in work.requests]) == pytest.approx(211, rel=0.05)
    rank_of = dict(zip(adapter_names(100), spread(PAPER_RANKS, 100), strict=True))
    ranks = np.array([rank_of[str(each.adapter)] for each in work.requests])
    shares = [float((ranks == rank).mean()) for rank in PAPER_RANKS]
    assert shares == pytest.approx([0.438, 0.219, 0.146, 0.109, 0.088], abs=0.025)


def test_another_rate_and_another_row_leave_the_requests_as_they_are() -> None:
    slow, fast = (make_work(Case(row=row, rate=rate, requests=50)) for row, rate in ((FIFO, 1.0), (OURS, 4.0)))
    assert [each.adapter for each in slow.requests] == [each.adapter for each in fast.requests]
    assert [each.output_tokens for each in slow.requests] == [each.output_tokens for each in fast.requests]
    assert make_work(Case(row=FIFO, rate=1.0, requests=50, seed=8)).requests != slow.requests


# --- runs --------------------------------------------------------------------------------------------


def test_a_run_tells_of_every_request_and_of_chameleons_queue() -> None:
    ours, fifo = figures_of(outcome(OURS)), figures_of(outcome(FIFO))
    assert len(ours["ttft_s"]) == len(fifo["ttft_s"]) == 150
    assert ours["queue"]["admitted"] >= 150
    assert ours["queue"]["squashed"] <= ours["preempted"]
    assert fifo["queue"] is None
    assert set(ours["rank_p99_s"]) == {"8", "16", "32", "64", "128"}
    assert fifo["longest_wait_s"] <= max(fifo["ttft_s"])


def test_fifo_admits_in_the_order_of_arrival() -> None:
    found = outcome(FIFO)
    first = {index: at_s for index, at_s in found.watch.admitted_s.items() if index not in found.watch.preemptions}
    assert sorted(first.values()) == [first[index] for index in sorted(first)]
    assert max(sample.waiting for sample in found.watch.samples) > 20


def test_an_adapter_is_loaded_and_computed_only_where_there_is_one() -> None:
    small, large = cases.unloaded(8), cases.unloaded(128)
    assert small["base_s"] == large["base_s"] < small["warm_s"] < small["cold_s"]
    assert small["cold_s"] - small["warm_s"] < large["cold_s"] - large["warm_s"]


def test_p99_is_by_rank_and_by_window_of_arrival() -> None:
    assert by_rank([1.0, 2.0, 3.0], [8, 128, 8]) == {8: pytest.approx(2.98), 128: 2.0}
    assert over_time([1.0, 3.0, 5.0], [0.0, 10.0, 25.0], 10.0) == [1.0, 3.0, 5.0]
    assert over_time([1.0, 5.0], [0.0, 25.0], 10.0) == [1.0, None, 5.0]


# --- the knee ----------------------------------------------------------------------------------------


def test_growth_is_the_slope_of_the_last_two_thirds_of_the_arrivals() -> None:
    rises = [Sample(float(at_s), 1000 if at_s < 300 else at_s // 10) for at_s in range(0, 900, 10)]
    drains = [Sample(float(at_s), 90 - (at_s - 900)) for at_s in range(900, 990, 10)]
    assert growth([*rises, *drains], 890.0) == pytest.approx(0.1)
    swings = [Sample(float(at_s), at_s % 2) for at_s in range(1000)]
    assert growth(swings, 999.0) == pytest.approx(0.0, abs=1e-4)


def test_the_knee_is_the_highest_rate_without_growth() -> None:
    found = find_knee(FIFO, 1.0, lambda rate: max(0.0, 1 - 2.3 / rate))
    assert found["rate"] <= 2.3 / (1 - GROWTH) < found["rate"] * 1.01
    assert all((each <= GROWTH) == (float(rate) <= found["rate"] + 1e-3) for rate, each in found["growth"].items())
    with pytest.raises(RuntimeError, match="at every rate"):
        find_knee(FIFO, 1.0, lambda rate: 0.5)


# --- admission.2 -------------------------------------------------------------------------------------


def test_large_requests_are_the_last_class_of_all_by_what_is_predicted() -> None:
    case = Case(row=OURS, rate=2.0, requests=3000, predictor="oracle:1")
    work = make_work(case)
    large = admission_2.large_requests(case, work)
    outputs = np.array([each.output_tokens for each in work.requests])
    assert 0 < large.mean() < 0.5
    assert outputs[large].mean() > 2 * outputs[~large].mean()
    assert admission_2.large_requests(case, work).tolist() == large.tolist()


@pytest.mark.parametrize(
    ("gap_s", "wait_s", "squashed", "complaints"),
    [
        (10.0, 30.0, 0.05, []),
        (41.0, 30.0, 0.0, ["a queue waited 1.02 ×"]),
        (10.0, 31.0, 0.06, ["a large request waited 3.1 ×", "6.0% squashed"]),
    ],
)
def test_a_setting_must_starve_nobody_and_squash_few(
    gap_s: float, wait_s: float, squashed: float, complaints: list[str]
) -> None:
    queue = {"longest_gap_s": {"0": 1.0, "2": gap_s}, "longest_run_s": {"0": 20.0, "1": 30.0, "2": 40.0}}
    found = {"queue": queue, "longest_large_wait_s": wait_s, "squashed_share": squashed}
    texts = admission_2.failures_of("row", found, 10.0)
    assert len(texts) == len(complaints)
    assert all(text.startswith(f"row: {begin}") for text, begin in zip(texts, complaints, strict=True))


# --- admission.3 -------------------------------------------------------------------------------------


def test_live_rows_are_compared_request_by_request() -> None:
    pair = {OURS: [figures([1.0, 2.0, 3.0])] * 2, FIFO: [figures([2.0, 4.0, 6.0])] * 2}
    ratios = admission_3.ratios_of(pair)
    assert [*ratios["P50"], *ratios["P95"]] == pytest.approx([0.5] * 6)


@pytest.mark.parametrize(
    ("p50", "p95", "low", "sides", "complaints"),
    [
        ((0.7, 0.6, 0.8), (0.9, 0.8, 0.99), (1.1, 1.0, 1.2), (0.0, 0.05), []),
        ((0.71, 0.6, 0.8), (0.9, 0.8, 1.0), (1.1, 1.01, 1.2), (0.0, 0.05), ["P50", "P95", "P50", "P95"]),
        ((0.5, 0.4, 0.6), (0.5, 0.4, 0.6), (0.9, 0.8, 0.99), (0.02, 0.01), ["the live queue grows", "the live queue"]),
    ],
)
def test_both_loads_and_both_sides_of_the_knee_count(
    p50: tuple[float, float, float],
    p95: tuple[float, float, float],
    low: tuple[float, float, float],
    sides: tuple[float, float],
    complaints: list[str],
) -> None:
    ratios = {"high": {"P50": Ratio(*p50), "P95": Ratio(*p95)}, "low": {"P50": Ratio(*low), "P95": Ratio(*low)}}
    texts = admission_3.failures_of(ratios, {"below": sides[0], "beyond": sides[1]})
    assert len(texts) == len(complaints)
    assert all(text.startswith(begin) for text, begin in zip(texts, complaints, strict=True))


def test_rows_are_run_by_turns_at_the_share_of_the_knee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = StoredRuns("admission.3", tmp_path, "code")
    store(runs, machine={"machine": "fast"}, knee={"rate": 3.0, "growth": {}})
    live = admission_3.LiveRuns(runs, "high", 1.03, tmp_path)
    asked: list[Case] = []

    def run_in_slices(rows: list[tuple[str, Any]]) -> tuple[list[dict[str, Any]], float]:
        asked.extend(turns.keywords["case"] for _, turns in rows)
        return [{"ttft_mean_s": 1.0}, {"ttft_mean_s": 2.0}], 0.1

    monkeypatch.setattr(admission_3, "this_machine", lambda: "fast")
    # Not by monkeypatch, which would ask for the old one first: that measures this machine for minutes.
    vars(live)["setting"] = MemorySetting(memory_bytes=1, host_memory_bytes=1)
    monkeypatch.setattr(live._rigs, "run_in_slices", run_in_slices)
    found = live.run("0", (OURS, FIFO), 300.0, 9)
    assert asked == [Case(row=row, rate=1.03 * 3.0, requests=927, seed=9) for row in (OURS, FIFO)]
    assert found == {"rows": {OURS: {"ttft_mean_s": 1.0}, FIFO: {"ttft_mean_s": 2.0}}, "slower": 0.1}


def test_what_was_begun_on_another_machine_is_not_finished_on_this_one(tmp_path: Path) -> None:
    runs = StoredRuns("admission.3", tmp_path, "code")
    store(runs, machine={"machine": "another"})
    live = admission_3.LiveRuns(runs, "high", 1.03, tmp_path)
    with pytest.raises(RuntimeError, match=r"high was begun on another, this is .* cores"):
        _ = live.knee
    store(runs, knee={"rate": 3.3, "growth": {}})
    assert live.knee == 3.3, "what is there is still read"


def store(runs: StoredRuns, **parts: dict[str, Any]) -> None:
    for part, made in parts.items():
        runs.get(f"high-{part}", lambda made=made: made)  # type: ignore[misc]


def test_the_mean_request_has_an_adapter() -> None:
    work = make_work(Case(row=FIFO, rate=1.0, requests=400))
    geometry = load_profile(PROFILE).geometry
    refs = {str(ref.name): ref for ref in synthetic_adapters(100, PAPER_RANKS, geometry)}
    token_bytes = geometry.block_bytes(1)
    tokens = np.mean([each.input_tokens + each.output_tokens for each in work.requests])
    found = admission_3.mean_request_bytes(work, refs, token_bytes)
    # An adapter of rank r takes the room of 4 r tokens of Llama-7B, and the mean rank is about 30.
    assert found / token_bytes - tokens == pytest.approx(4 * 30, rel=0.2)


# --- admission.4 -------------------------------------------------------------------------------------


def test_every_case_has_a_row_that_there_is_and_enough_requests() -> None:
    made = cases.all_cases(1.7)
    for case in made.values():
        assert resolve_row(case.row)[1].admission in ADMISSION
    parts: dict[str, int] = {}
    for name, case in made.items():
        part = name if name.startswith("pcie") else name.rpartition("-")[0]
        parts[part] = parts.get(part, 0) + case.requests
    assert min(parts.values()) >= 10_000
    assert {case.rate for name, case in made.items() if name.startswith("high")} == {1.7 * 9 / 8.7}
    assert {case.predictor for case in made.values()} == {"oracle:0.6", "oracle:0.8", "oracle:1"}


def test_percentiles_are_of_all_seeds_of_a_part_and_of_no_other() -> None:
    runs = {
        f"{cases.part(OURS, 'high')}-7": figures([1.0, 2.0]),
        f"{cases.part(OURS, 'high')}-8": figures([3.0]),
        f"{cases.part('chameleon,admission=chameleon:lazy', 'high')}-7": figures([99.0]),
        f"{cases.part(OURS, 'high', 1.0)}-7": figures([98.0]),
        f"{cases.part(FIFO, 'high')}-7": figures([8.0]),
    }
    assert cases.percentile(runs, cases.part(OURS, "high"), 50) == 2.0
    assert cases.reduction(runs, OURS, "high", 50) == 0.75


def test_the_page_sets_every_figure_beside_the_printed_one() -> None:
    made = cases.all_cases(1.7)
    runs = {name: figures([4.0, 8.0] if case.row == FIFO else [1.0, 2.0]) for name, case in made.items()}
    runs["pcie-500"]["to_device_bytes"] = 300_000
    found = {
        "slo": {"slo_s": 2.5},
        "runs": runs,
        "peaks": {row: {"rate": 1.0 + number / 10} for number, row in enumerate(cases.SYSTEMS)},
        "unloaded": {"128": {"base_s": 0.1, "warm_s": 0.15, "cold_s": 0.2}},
    }
    knee = {"rate": 1.7, "growth": {"1.700": 0.004, "1.712": 0.012}}
    page = admission_page("words", knee, found)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert "| 1.700 | +0.4% |" in rows
    assert "| high (1.03) | chameleon | 1.50 | 75% | 48.1% | 2.00 | 75% | 80.7% | 120 | 50% |" in rows
    assert "| chameleon | 1.30 | 1.30 | 1.5 |" in rows
    assert "| chameleon:lru | 1.00 | 4.00 | 1.99 | 75% | 18% | 50% |" in rows
    assert "| chameleon:output-only, 60% | 1.50 | 2.00 | 1.00 |  | 3.00 |" in rows
    assert "| chameleon:lazy | 1.50 | 2.00 | 75% | 3, 3 | 50.00% | 100.00% | 0.0% | 4 |" in rows
    assert "| 128 | 100.0 | 150.0 | 200.0 | 50.0% | 25.0% |" in rows
    words = " ".join(page.split())
    assert "move 300 × as many bytes" in words
    assert "154 TFLOP/s then" in words
    assert "ends 3,603 to 3,612 s after the first arrival, with arrivals over 3,480 s" in words
    assert "P95 is 2.00 s beside FIFO's 8.00 s" in words
