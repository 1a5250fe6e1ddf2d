"""ELORA's settings and figures: what a case sends, and how figures follow from results."""

import math
from typing import Any

import pytest

from benchmarks.papers import elora
from benchmarks.papers.elora_manager import manager_costs
from benchmarks.papers.elora_readings import READINGS, run_reading
from benchmarks.papers.elora_work import (
    BLOCK_TOKENS,
    OLD_TOKENS,
    PAST_FULL,
    STAGES,
    Case,
    demand_changes,
    full_batch,
    load_of,
    profile_of,
    rates_of,
    run_case,
    sample,
    window_s,
)
from lorikeet.presets import resolve_preset

SMALL = Case("agent", "8B", 20, 1, pool=0.1, window=0.02)


def test_rates_rise_in_ten_stages_past_a_full_batch() -> None:
    case = Case("agent", "8B", 20, 1, pool=0.1, window=0.1)
    load = load_of(case)
    assert len(load.rates) == STAGES
    assert load.rates[-1] == pytest.approx(PAST_FULL * full_batch("agent", "8B").requests_per_s)
    assert load.rates[0] == pytest.approx(load.rates[-1] / STAGES)
    assert len(load.requests) == round(rates_of(case).expected(window_s(case)))
    assert load.requests[-1].arrival_s <= window_s(case) * 1.01
    first = [each for each in load.requests if each.arrival_s < load.stage_s]
    last = [each for each in load.requests if each.arrival_s >= 9 * load.stage_s]
    assert len(last) == pytest.approx(10 * len(first), rel=0.5)


def test_a_block_has_the_printed_size() -> None:
    assert profile_of("8B").geometry.block_bytes(BLOCK_TOKENS) == 16 * 2**20
    assert full_batch("chatbot", "8B").requests_per_s > 0


@pytest.mark.slow
def test_a_case_sends_the_same_to_every_system() -> None:
    assert load_of(SMALL) == load_of(SMALL)
    assert load_of(SMALL).requests != load_of(Case("agent", "8B", 20, 2, pool=0.1, window=0.02)).requests


def test_earlier_texts_fill_the_device_and_dialogues_go_on() -> None:
    load, profile = load_of(SMALL), profile_of("8B")
    old = [each for each in load.old if not each.prefix_blocks]
    kv_bytes = profile.geometry.kv_elements_per_token() * profile.geometry.dtype_bytes
    assert len(old) * OLD_TOKENS * kv_bytes >= 0.1 * profile.pool_bytes
    texts = {(each.adapter, each.prefix_blocks) for each in load.old if each.prefix_blocks}
    assert texts
    for adapter, blocks in texts:
        goes_on = [each for each in load.requests if each.prefix_blocks[: len(blocks)] == blocks]
        assert any(each.adapter == adapter and each.input_tokens > len(blocks) * BLOCK_TOKENS for each in goes_on)


def test_the_chatbot_has_the_printed_statistics_of_its_data() -> None:
    prompt, new, answer = sample("chatbot")
    assert new == pytest.approx(52.3, rel=0.05)
    assert prompt > new
    assert answer < 189.5, "long answers are cut"


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "is_ours"), [("elora", True), ("vllm-static:discard", False)])
def test_a_short_run(preset: str, is_ours: bool) -> None:
    case = Case("translation", "8B", 20, 1, pool=0.2, window=0.02)
    made = run_case(preset, case)
    assert len(made["ttft_s"]) == len(load_of(case).requests)
    assert made["prefilled_tokens"] > 0
    assert 0.5 < made["used_share"] <= 1
    if is_ours:
        assert made["invalid_kv_share"] == 0


@pytest.mark.slow
def test_kv_without_its_adapter_appears_without_the_tree() -> None:
    case = Case("chatbot", "8B", 50, 1, load=0.2, pool=0.1, window=0.03)
    assert run_case("elora:wom", case)["invalid_kv_share"] > 0.2
    assert run_case("elora", case)["invalid_kv_share"] == 0


@pytest.mark.slow
def test_readings_are_presets_and_run() -> None:
    for preset in READINGS.values():
        resolve_preset(preset)
    case = Case("translation", "8B", 20, 1, pool=0.1, load=0.3, window=0.02)
    assert run_reading("elora,eviction=reading:swaps", case)["ttft_s"] > 0


def test_demand_changes_from_second_to_second() -> None:
    found = demand_changes("chatbot")
    assert 0 < found["mean"] < 1
    assert 0 < found["over_20_percent"] < 1


# --- figures -----------------------------------------------------------------------------------------


def result(ttfts_s: list[float], **more: Any) -> dict[str, Any]:
    """One request a stage."""
    stages = {"rates": [float(stage + 1) for stage in range(STAGES)], "stage_s": 1.0}
    due = {"due_s": [stage + 0.5 for stage in range(STAGES)], "ttft_s": ttfts_s, "tpot_s": [0.01] * STAGES}
    return {**stages, **due, **more}


def test_the_peak_is_where_the_mean_ttft_passes_half_a_second() -> None:
    rising = result([0.1, 0.1, 0.1, 0.25, 1.0, *[9.0] * 5])
    assert elora.peak_of(rising) == pytest.approx(4.5)
    assert elora.up_to_peak(rising) == 4
    assert elora.peak_of(result([0.1] * STAGES)) == 10
    assert elora.peak_of(result([1.0] * STAGES)) == 1


def test_systems_are_compared_at_each_rate_up_to_the_peak() -> None:
    ours = result([0.1] * 4 + [9.0] * 6)
    theirs = result([0.2, 0.2, 0.1, 0.1, *[99.0] * 6])
    assert elora.TTFT_LESS(ours, theirs) == pytest.approx(25)
    assert elora.TTFT_TIMES(ours, theirs) == pytest.approx(1.5)
    assert elora.percentile("ttft_s", 99)(ours, theirs) == pytest.approx(50)


def test_stages_without_requests_do_not_count() -> None:
    sparse = result([0.1] * STAGES)
    sparse["tpot_s"] = [None, *[0.02] * 9]
    assert math.isnan(elora.stages(sparse, "tpot_s")[0])
    assert elora.TPOT_LESS(result([0.1] * STAGES), sparse) == pytest.approx(50)


def test_all_nine_pairs_of_model_and_adapters_are_run() -> None:
    cases = elora.cases_of()
    assert len(cases) == 9
    assert sorted((case.model, case.adapters) for case in cases) == sorted(elora.PAIRS)


def test_the_managers_costs_are_those_of_full_tiers() -> None:
    made = manager_costs(queries=10, share=0.1)
    device_blocks = 0.1 * elora.profile_of("8B").pool_bytes / 2**24
    assert made["nodes"] > device_blocks
    assert 0 < made["query_mean_ms"] <= made["query_most_ms"]
    assert made["node_bytes"] * made["nodes"] == pytest.approx(made["tree_bytes"])
