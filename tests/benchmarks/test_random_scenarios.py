"""The scenarios and the comparison of ``benchmarks/random_scenarios.py``; its runs compute for hours."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from benchmarks import random_scenarios
from benchmarks.auto import AUTO, FIGURES
from benchmarks.random_scenarios import (
    MAX_MODEL_LEN,
    RIVALS,
    Outcome,
    Record,
    complete,
    draw_load,
    judge,
    requests_of,
    run_system,
    seeds_of,
    variants,
)
from lorikeet.presets import resolve_preset

SEEDS = seeds_of(1, 30)


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_follow_from_the_seed_and_fit_the_model(seed: int) -> None:
    load = draw_load(seed)
    requests = requests_of(load, 10.0)
    assert requests == requests_of(draw_load(seed), 10.0)
    assert len(requests) >= 2000
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(requests))
    assert all(each.input_tokens >= 4 for each in requests)
    assert all(each.input_tokens + each.output_tokens <= MAX_MODEL_LEN for each in requests)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(10.0, rel=0.4)


def test_turns_of_a_conversation_begin_with_the_blocks_of_the_turn_before() -> None:
    load = next(load for load in map(draw_load, SEEDS) if load.single_share < 1 and load.shared_tokens)
    last: dict[str | None, tuple[int, ...]] = {}
    for each in requests_of(load, 10.0):
        blocks = each.prefix_blocks
        before = last.get(each.conversation, ())
        assert blocks[: len(before)] == before
        last[each.conversation] = blocks
    assert len(last) < 2000


def test_more_scenarios_begin_with_the_same_ones() -> None:
    assert seeds_of(5, 20)[:10] == seeds_of(5, 10)


def test_each_variant_switches_one_part_of_auto_off() -> None:
    load = draw_load(SEEDS[0])
    ours = resolve_preset(AUTO)[1]
    for name in variants(load):
        other = resolve_preset(name)[1]
        changed = [field for field in ours.__struct_fields__ if getattr(ours, field) != getattr(other, field)]
        assert len(changed) == 1


def outcome(*values: float, **options: object) -> Outcome:
    return Outcome(figures=dict(zip(FIGURES, values, strict=False)), **options)  # type: ignore[arg-type]


def test_auto_is_judged_by_the_best_of_all_others_that_ran_to_the_end() -> None:
    load = draw_load(SEEDS[0])
    outcomes = {name: outcome(4.0, 4.0, 4.0) for name in (*RIVALS, *variants(load))}
    outcomes |= {"dlora": outcome(1.0, 2.0, 1.0), "elora": outcome(4.0, 1.0, 4.0), AUTO: outcome(1.2, 2.0, 1.0)}
    outcomes |= {"chameleon": outcome(2.4, 4.0, stopped=True), "toppings": Outcome(figures={}, error="no")}
    judged = judge(Record(load, 1.0, outcomes=outcomes))
    assert judged is not None
    assert judged.best == "dlora"
    assert judged.score == pytest.approx(1.2 ** (1 / 3))
    assert list(judged.over_best.values()) == pytest.approx([1.2, 1.0, 1.0])
    assert list(judged.over_least.values()) == pytest.approx([1.2, 2.0, 1.0])


def test_stopped_runs_are_missing_once_auto_reaches_their_bounds() -> None:
    load = draw_load(SEEDS[0])
    record = Record(load, 1.0, outcomes={AUTO: outcome(1.0, 2.0, 1.0), "dlora": outcome(2.0, 4.0, stopped=True)})
    assert record.missing(("dlora",)) == []
    record.outcomes[AUTO] = outcome(2.5, 2.0, 1.0)
    assert record.missing(("dlora",)) == ["dlora"]


def test_a_scenario_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(load: object, preset: str, rate: float, auto: dict[str, float] | None) -> Outcome:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(preset)
        return outcome(1.0, 2.0, 3.0)

    monkeypatch.setattr(random_scenarios, "find_peak", lambda load: 8.0)
    monkeypatch.setattr(random_scenarios, "run_system", run)
    file = tmp_path / "1.json"
    with pytest.raises(KeyboardInterrupt):
        complete(file, SEEDS[0])
    assert list(msgspec.json.decode(file.read_bytes(), type=Record).outcomes) == [AUTO, *RIVALS[:2]]
    ran[:] = ["", "", "", ""]
    record = complete(file, SEEDS[0])
    assert ran[4] == RIVALS[2]
    assert set(record.outcomes) == {AUTO, *RIVALS, *variants(record.load)}
    assert judge(record) is not None


def test_a_hopeless_system_is_stopped_and_its_bounds_are_kept() -> None:
    load = msgspec.structs.replace(
        draw_load(SEEDS[0]), profile="a100-80-llama-2-7b", replicas=1, pool_share=1.0, adapters=50, turns=2, prompt=64
    )
    found = run_system(load, "merged-only", 10.0, {"ttft_mean_s": 0.1, "ttft_p99_s": 0.5, "e2e_per_token_s": 0.05})
    assert found.stopped
    assert found.error == ""
    assert found.figures["ttft_p99_s"] == 1.0
    assert found.figures["ttft_mean_s"] == pytest.approx(0.2, rel=0.01)
