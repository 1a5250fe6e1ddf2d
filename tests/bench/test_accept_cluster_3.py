"""cluster.3: its workloads, a short run of each kind, its page, and how it judges."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.accept import cluster_3
from benchmarks.accept import cluster_dlora as dlora
from benchmarks.accept import cluster_loraserve as loraserve
from benchmarks.accept import cluster_toppings as toppings
from benchmarks.accept.cluster_page import cluster_page
from benchmarks.accept.cluster_runs import highest, ladder
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.synthetic import PAPER_RANKS, adapter_names, spread

POINTS = [
    {
        "kernel_form": "padded",
        "slo": {"ttft_s": 10.0},
        "prompt_tokens": 1155,
        "output_tokens": 211,
        "max_running": 256,
        "max_step_tokens": 2048,
        "tokens_per_s": {str(rank): load},
    }
    for rank, load in {8: 17_600.0, 16: 16_900.0, 32: 15_500.0, 64: 13_600.0, 128: 10_500.0}.items()
]
LIMITS = {"idle": 0.044, "loaded": 0.055}


def run_of(**figures: Any) -> dict[str, Any]:
    """Return figures of a run, those of the arguments otherwise than usual."""
    usual = {
        "requests": 100,
        "duration_s": 10.0,
        "ttft_mean_s": 1.0,
        "ttft_p95_s": 2.0,
        "tbt_mean_s": 0.03,
        "tpt_mean_s": 0.04,
        "latency_per_token_s": 0.05,
        "within": [0.5, 0.9],
        "busy": [0.8, 0.9],
        "sent": [50, 50],
        "held_most": [5, 10],
        "held_share": 0.3,
        "placements": 3,
        "fetches": 4,
        "moves": 0,
        "preemptions": 0,
    }
    return usual | figures


def found_in_order() -> dict[str, Any]:
    """Return what the three parts measure if all systems come as the papers have them."""
    mixes, rates = loraserve.MIXES, dict(zip(loraserve.ROWS, (40.0, 33.0, 25.0, 20.0), strict=True))
    return {
        "loraserve": {
            "points": dict.fromkeys(PAPER_RANKS, 10000.0),
            "peaks": {
                mix: {row: {"rate": rate, "tried": {f"{rate:.1f}": 9.0}} for row, rate in rates.items()}
                for mix in mixes
            },
            "runs": {mix: {row: [run_of(ttft_p95_s=100 / rate)] for row, rate in rates.items()} for mix in mixes},
            "scales": [run_of(), run_of()],
        },
        "toppings": {
            "limits": dict.fromkeys(toppings.PLACES, LIMITS),
            "runs": {
                place: {
                    row: [run_of(within=[0.5, 0.9 - 0.1 * number], tpt_mean_s=0.04 + 0.01 * number)]
                    for number, row in enumerate((*toppings.ROWS, toppings.OTHER_READING))
                }
                for place in toppings.PLACES
            },
        },
        "dlora": {
            "peaks": dict.fromkeys(dlora.SEARCHED, 10.0) | {dlora.OURS: 20.0},
            "runs": {
                row: [run_of(ttft_mean_s=1.0 + number, latency_per_token_s=0.1 + number)]
                for number, row in enumerate(dlora.ROWS)
            },
        },
    }


# --- the search --------------------------------------------------------------------------------------


@pytest.mark.parametrize("border", [0.5, 1.0, 3.9, 15.9, 20.0])
def test_the_highest_rate_is_found_wherever_it_lies(border: float) -> None:
    rates = ladder(1.0, 2.0, 5)
    expected = max((rate for rate in rates if rate <= border), default=None)
    assert highest(rates, lambda rate: rate <= border) == expected


# --- workloads ---------------------------------------------------------------------------------------


def test_skew_shifts_from_the_largest_rank_to_the_smallest() -> None:
    requests = loraserve.requests_of(loraserve.Case("shifting", loraserve.OURS, 40.0, 1), 100.0)
    ranks = dict(zip(adapter_names(25), spread(PAPER_RANKS, 25), strict=True))
    asked = [ranks[each.adapter or ""] for each in requests]
    first, last = asked[:400], asked[-400:]
    assert first.count(128) > 2 * first.count(8)
    assert last.count(8) > 2 * last.count(128)


def test_production_has_the_rate_that_is_asked_for_and_popular_adapters_of_each_rank() -> None:
    requests = loraserve.requests_of(loraserve.Case("production", loraserve.OURS, 30.0, 1), 100.0)
    assert len(requests) == 3000
    assert 2999 / (requests[-1].arrival_s - requests[0].arrival_s) == pytest.approx(30.0)
    calls = [sum(each.adapter == name for each in requests) for name in adapter_names(100)]
    assert min(calls[:5]) > 5 * max(calls[-5:])


def test_more_replicas_have_as_many_times_the_adapters_and_requests() -> None:
    one, two = (
        loraserve.requests_of(loraserve.Case("uniform", loraserve.OURS, 20.0, 1, scale), 50.0) for scale in (1, 2)
    )
    assert len(two) == pytest.approx(2 * len(one), rel=0.1)
    assert len({each.adapter for each in two}) == 2 * len({each.adapter for each in one}) == 50


def test_who_is_popular_has_nothing_to_do_with_the_order_of_ranks() -> None:
    cases = [toppings.Case(toppings.SIMULATION, toppings.OURS, seed) for seed in (1, 2)]
    most = [
        max({each.adapter for each in requests}, key=lambda name: sum(each.adapter == name for each in requests))
        for requests in (toppings.requests_of(case, 5.0) for case in cases)
    ]
    assert most[0] != most[1]


# --- runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", loraserve.ROWS)
def test_a_short_run_of_loraserve(row: str) -> None:
    figures = loraserve.run_case(POINTS, loraserve.Case("shifting", row, 16.0, 1), 4.0)
    assert 0 < figures["ttft_p95_s"] < loraserve.LIMIT_S
    assert sum(figures["sent"]) > figures["requests"] > 0
    everywhere = row == loraserve.TOPPINGS
    assert (figures["held_share"] == 1.0) == everywhere


@pytest.mark.parametrize("row", toppings.ROWS)
def test_a_short_run_of_toppings(row: str) -> None:
    figures = toppings.run_case(LIMITS, toppings.Case("30/s", row, 1), 2.0)
    idle, loaded = figures["within"]
    assert 0 <= idle <= loaded <= 1
    assert figures["held_share"] == 1.0


def test_limits_of_toppings_are_wider_under_load() -> None:
    limits = toppings.limits_of("50/s", 3.0)
    assert 1.5 * 0.028 < limits["idle"] < limits["loaded"]


@pytest.mark.parametrize("row", dlora.ROWS)
def test_a_short_run_of_dlora(row: str) -> None:
    figures = dlora.run_case(dlora.Case(row, 8.0, 7), 3.0)
    assert figures["requests"] == 24
    assert figures["latency_per_token_s"] > dlora.slo_s() / 10
    assert figures["within"][0] > 0


# --- parts -------------------------------------------------------------------------------------------


class KeptRuns(StoredRuns):
    """All parts are there already; every run has the same figures.

    Args:
        figures: of each.
    """

    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures
        self._points = iter(POINTS)

    def get(self, part: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See ``StoredRuns``."""
        if part.startswith("loraserve-point"):
            return next(self._points)
        return LIMITS if part.startswith("toppings-limits") else self._figures


@pytest.mark.parametrize(("slowdown", "is_borne"), [(1.0, True), (100.0, False)])
def test_what_the_parts_measure_makes_a_page(slowdown: float, is_borne: bool) -> None:
    figures = run_of(ttft_p95_s=2.0 * slowdown, latency_per_token_s=0.05 * slowdown)
    with ThreadPoolExecutor(1) as pool:
        found = {
            "loraserve": loraserve.measure(KeptRuns(figures), pool),
            "toppings": toppings.measure(KeptRuns(figures), pool),
            "dlora": dlora.measure(KeptRuns(figures), pool),
        }
    assert found["loraserve"]["points"][128] == 10_500.0
    peak = found["loraserve"]["peaks"]["shifting"][loraserve.RANDOM]
    assert peak["rate"] == (loraserve.RATES[-1] if is_borne else 0.0)
    assert set(peak["tried"].values()) == {2.0 * slowdown}
    assert found["dlora"]["peaks"][dlora.OURS] == (dlora.RATES[-1] if is_borne else 0.0)
    assert "## Not made" in cluster_page(found)
    assert not any(cluster_3.out_of_order(found).values())


# --- judgement ---------------------------------------------------------------------------------------


def test_systems_in_the_printed_order_pass() -> None:
    assert not any(cluster_3.out_of_order(found_in_order()).values())


def test_loraserve_out_of_order_is_named() -> None:
    found = found_in_order()
    found["loraserve"]["peaks"]["shifting"][loraserve.TOPPINGS]["rate"] = 41.0
    found["loraserve"]["peaks"]["production"][loraserve.RANDOM]["rate"] = 34.0
    found["loraserve"]["runs"]["uniform"][loraserve.CONTIGUOUS] = [run_of(ttft_p95_s=1.0)]
    wrong = cluster_3.out_of_order(found)["LoRAServe"]
    assert [each.split(":")[0] for each in wrong] == ["shifting", "production", "uniform"]


def test_toppings_out_of_order_is_named() -> None:
    found = found_in_order()
    found["toppings"]["runs"]["40/s"][toppings.RANDOM] = [run_of(within=[0.5, 0.95])]
    found["toppings"]["runs"][toppings.SIMULATION][toppings.FIRST_FIT] = [run_of(within=[0.5, 0.5], tpt_mean_s=0.041)]
    wrong = cluster_3.out_of_order(found)["TOPPINGS"]
    assert [each.split(":")[0] for each in wrong] == ["40/s", toppings.SIMULATION]


def test_dlora_out_of_order_is_named() -> None:
    found = found_in_order()
    found["dlora"]["peaks"][dlora.PEFT] = 21.0
    found["dlora"]["runs"][dlora.PROACTIVE] = [run_of(ttft_mean_s=0.5, latency_per_token_s=1.1)]
    wrong = cluster_3.out_of_order(found)["dLoRA"]
    assert len(wrong) == 2
    assert wrong[0].startswith(dlora.PEFT)
    assert wrong[1].startswith("mean TTFT")


def test_the_page_and_the_figures_hold_every_printed_ratio() -> None:
    found = found_in_order()
    page = cluster_page(found)
    for row in (*loraserve.ROWS, *toppings.ROWS, *dlora.ROWS):
        assert f"`{row}`" in page
    for printed in ("up to 1.2", "up to 2 ", "up to 9", "up to 16", "up to 57.9", "up to 26", "(paper +21)"):
        assert printed in page
    figures = cluster_3.figures(found)
    assert figures["LoRAServe's rate ÷ loraserve:toppings's, largest"] == "1.21 (paper 1.2)"
    assert figures["dLoRA's rate ÷ dlora:peft's"] == "2.0 (paper 26)"
    assert figures["TOPPINGS' attainment over dLoRA's at 40/s"] == "+10.0% (paper +21%)"
