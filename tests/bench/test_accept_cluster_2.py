"""What cluster.2 makes of its runs, and a live cluster of two paced replicas as it runs them."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.accept.cluster_2 import (
    BEYOND,
    CONTIGUOUS,
    OURS,
    RANDOM,
    TOPPINGS,
    Answer,
    ClusterRuns,
    cpu_words,
    p95_ratio,
    probe_failures,
    token_failures,
    token_figures,
    ttft_failures,
)
from benchmarks.accept.cluster_live import LiveOutcome, LiveSetting, run_live, simulate_setting, stand_ins
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.synthetic import synthetic_adapters
from lorikeet.cluster.pool_folder import PoolFolder, read_files
from lorikeet.config import ReplicaStart
from lorikeet.core.plan import KernelForm
from lorikeet.core.slo import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import OperatingLoads

LOADS = OperatingLoads(KernelForm.PADDED, Slo(ttft_s=10.0), 512, 128, 64, 512, {8: 8000.0, 32: 6000.0, 128: 3000.0})
TINY = LiveSetting(
    row=OURS,
    loads=LOADS,
    rate=15.0,
    replicas=2,
    periods=3,
    period_s=1.0,
    adapters=5,
    prompt_tokens=32,
    output_tokens=4,
    stretch=1.5,
    start=ReplicaStart.LOCAL,
)


def outcome(ttft_s: list[float], **changes: Any) -> LiveOutcome:
    given: dict[str, Any] = {"tpot_p50_s": 0.02, "tpot_p95_s": 0.05, "attainment": 1.0, "duration_s": 120.0}
    given |= {"held_share": 0.2, "placements": 3, "fetches": 4, "provisions": 5, "deletes": 4, "failed": 0}
    given |= {"late_p99_ms": 2.0, "cpu_head": 0.1, "cpu_engines": 0.2, "cpu_others": 0.1, "cores": 2}
    return LiveOutcome(ttft_s=ttft_s, **given | changes)


def test_a_cluster_runs_a_workload_in_slow_motion(tmp_path: Path) -> None:
    found = asyncio.run(run_live(TINY, tmp_path))
    requests = TINY.workload()
    assert len(found.ttft_s) == len(requests) == 45
    assert min(found.ttft_s) > 0
    assert found.duration_s >= requests[-1].arrival_s  # as the device counts, not as it was waited for here
    assert found.provisions >= TINY.adapters
    assert found.failed == 0
    assert 0 < found.held_share <= 1
    assert found.cpu > 0


def test_the_same_setting_runs_on_a_virtual_clock() -> None:
    found = simulate_setting(TINY)
    assert found.attainment == 1.0
    assert 0 < found.ttft_p50_s <= found.ttft_p95_s
    assert 0.5 <= found.held_share <= 1  # each of two replicas holds its part, or more


def test_stand_ins_count_as_whole_adapters_and_pass_the_pools_checks(tmp_path: Path) -> None:
    refs = stand_ins(TINY, tmp_path / "adapters")
    whole = synthetic_adapters(5, (8, 16, 32, 64, 128), load_profile("a100-80-llama-2-7b").geometry)
    assert [(ref.name, ref.ranks, ref.weight_bytes) for ref in refs] == [
        (ref.name, ref.ranks, ref.weight_bytes) for ref in whole
    ]
    pool = PoolFolder(tmp_path / "pool")
    for ref in refs:
        pool.store(ref.digest, read_files(Path(ref.folder)))
    assert set(pool.held()) == {ref.digest for ref in refs}
    pool.close()


def test_another_repeat_has_other_arrivals_and_other_adapters(tmp_path: Path) -> None:
    other = msgspec.structs.replace(TINY, repeat=1)
    digests = [{ref.digest for ref in stand_ins(each, tmp_path / str(each.repeat))} for each in (TINY, other)]
    assert digests[0].isdisjoint(digests[1])
    assert TINY.workload() != other.workload()
    assert TINY.workload() == msgspec.structs.replace(TINY, stretch=3.0, row=RANDOM).workload()


def test_ratios_are_of_the_requests_of_all_repeats() -> None:
    pairs = [(outcome([1.0] * 50), outcome([4.0] * 50)), (outcome([1.0] * 50), outcome([2.0] * 50))]
    assert p95_ratio(pairs).value == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("rival", "ours_s", "complaints"),
    [(RANDOM, 1.0, 0), (RANDOM, 1.1, 1), (CONTIGUOUS, 1.1, 1), (TOPPINGS, 2.1, 0), (TOPPINGS, 2.2, 1)],
)
def test_each_rival_has_its_bound(rival: str, ours_s: float, complaints: int) -> None:
    pairs = {rival: [(outcome([ours_s] * 20), outcome([2.0] * 20))]}
    assert len(ttft_failures({rival: p95_ratio(pairs[rival])}, pairs)) == complaints


def test_a_saturated_rival_proves_nothing() -> None:
    pairs = {RANDOM: [(outcome([1.0] * 20), outcome([90.0] * 20, attainment=0.5))]}
    assert ttft_failures({RANDOM: p95_ratio(pairs[RANDOM])}, pairs) == [
        f"{RANDOM} is saturated at 80% of its peak (50.0% within the limit)"
    ]


def test_a_peak_must_be_met_at_it_and_missed_beyond() -> None:
    good, bad = outcome([1.0], attainment=0.96), outcome([1.0], attainment=0.94)
    assert probe_failures({(OURS, 1.0): good, (OURS, BEYOND): bad}) == []
    assert probe_failures({(OURS, 1.0): bad, (RANDOM, BEYOND): good}) == [
        f"{OURS} at 1 × its peak has 94.0% within the limit",
        f"{RANDOM} at 1.15 × its peak has 96.0% within the limit",
    ]


def test_tokens_are_compared_up_to_ties() -> None:
    one = [Answer([5, 6, 7], [1.0, 1e-6, 1.0], "") for _ in range(3)]
    two = [Answer([5, 6, 7], [], "a"), Answer([5, 9, 9], [], "b"), Answer([4, 6, 7], [], "a")]
    found = token_figures(one, two)
    assert (found["different"], found["ties"], found["requests"]) == ([2], 1, {"a": 2, "b": 1})
    assert token_failures(found) == ["requests [2] differ from one replica's"]
    alone = token_figures(one[:1], two[:1])
    assert token_failures(alone) == ["a replica got no request"]


def test_the_use_of_cores_is_said() -> None:
    assert cpu_words([outcome([1.0]), outcome([1.0], cpu_head=0.3, late_p99_ms=7.4)]) == (
        "0.50 of 2 (head 0.20, engines 0.20, Ray 0.10), at most 0.60; 99 % of the requests sent within 7 ms"
    )


def test_rivals_take_turns_at_their_own_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float, int]] = []

    def live(setting: LiveSetting) -> LiveOutcome:
        asked.append((setting.row, setting.rate, setting.repeat))
        return outcome([1.0])

    monkeypatch.setattr("benchmarks.accept.cluster_2.run_apart", live)
    runs = StoredRuns("cluster.2", tmp_path, "code")
    runs.get("points-padded", lambda: dict(msgspec.to_builtins(LOADS, str_keys=True)))
    for name, rate in {"random-0": 30.0, "random-1": 20.0, "contiguous-0": 15.0, "toppings-0": 40.0}.items():
        runs.get(f"peak-padded-loraserve-{name}", lambda rate=rate: {"rate": rate})  # type: ignore[misc]
    found = ClusterRuns(runs).comparison(KernelForm.PADDED, 2)
    assert asked == [
        *[
            (RANDOM, 24.0, 0),
            (OURS, 24.0, 0),
            (OURS, 12.0, 0),
            (CONTIGUOUS, 12.0, 0),
            (TOPPINGS, 32.0, 0),
            (OURS, 32.0, 0),
        ],
        *[
            (OURS, 16.0, 1),
            (RANDOM, 16.0, 1),
            (CONTIGUOUS, 12.0, 1),
            (OURS, 12.0, 1),
            (OURS, 32.0, 1),
            (TOPPINGS, 32.0, 1),
        ],
    ]
    assert {rival: len(pairs) for rival, pairs in found.items()} == {RANDOM: 2, CONTIGUOUS: 2, TOPPINGS: 2}
    ClusterRuns(runs).comparison(KernelForm.PADDED, 2)
    assert len(asked) == 12  # all are stored
