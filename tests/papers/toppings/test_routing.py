"""TOPPINGS' scheduler (section 5): its worked example in milliseconds, the queue, idle replicas, no room."""

from functools import partial

import numpy as np
import pytest

from lorikeet.cluster.routing.fleet import Fleet, ReplicaInfo
from lorikeet.cluster.setup import ClusterOptions, PolicySetup
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.plan import KernelForm
from lorikeet.papers.toppings.performance import PerformanceModel, fit_performance
from lorikeet.papers.toppings.routing import Toppings, ToppingsCosts
from lorikeet.policies import ROUTING
from lorikeet.presets import Preset
from tests.support.fleets import ask, fleet_of, routed_to, run, send, several

BGMV = PerformanceModel(KernelForm.PADDED, 0.00354, 32.13)
MBGMV = PerformanceModel(KernelForm.UNPADDED, 0.6 / 256, 33.5)
PREFILL = PerformanceModel(KernelForm.PADDED, 0.02, 40.0)
empty_free = partial(Toppings, empty_is_free=True)
"""The reading of the worked examples: a prefill of an empty queue is charged in full."""
NEW = ask("new", 64)


def example() -> Fleet:
    """24 requests of rank 32 run on i1, 16 of rank 64 on i2; nobody waits."""
    fleet = fleet_of("i1", "i2", output_tokens=200)
    run(fleet, "i1", *several(24, 32))
    run(fleet, "i2", *several(16, 64))
    return fleet


def costs(policy: Toppings, fleet: Fleet) -> ToppingsCosts:
    """What the new request costs everywhere."""
    return policy.costs(NEW, fleet)


@pytest.mark.parametrize(
    ("decode", "slo", "added", "total", "broken", "choice"),
    [
        (BGMV, 36.0, (2.94528, 0.22656), (75.64032, 6.92736), (True, False), "i2"),
        (MBGMV, 36.0, (0.15, 0.15), (8.5536, 5.7024), (False, True), "i1"),
        (BGMV, 100.0, (2.94528, 0.22656), (75.64032, 6.92736), (False, False), "i2"),
        (MBGMV, 100.0, (0.15, 0.15), (8.5536, 5.7024), (False, False), "i2"),
    ],
)
def test_worked_example_of_the_scheduler(
    decode: PerformanceModel,
    slo: float,
    added: tuple[float, float],
    total: tuple[float, float],
    broken: tuple[bool, bool],
    choice: str,
) -> None:
    policy, fleet = empty_free(PREFILL, decode, slo), example()
    found = costs(policy, fleet)
    assert found.cost - 41.28 / 200 == pytest.approx(added)
    assert found.total == pytest.approx(total)
    assert tuple(found.breaks_slo) == broken
    assert routed_to(policy, NEW, fleet) == choice


def test_decode_times_of_the_example_match_the_paper() -> None:
    for model, printed in ((BGMV, (34.8, 35.8)), (MBGMV, (35.3, 35.9))):
        for count, rank, seconds in zip((24, 16), (32, 64), printed, strict=True):
            fleet = fleet_of("i1")
            run(fleet, "i1", *several(count - 1, rank))
            loads = fleet.loads
            found, _ = model.added_seconds(loads.requests, loads.rows, loads.largest_rank, loads.total_rank, rank)
            assert found.round(1).tolist() == [seconds]


def test_the_queue_case() -> None:
    fleet = fleet_of("i1", output_tokens=200)
    run(fleet, "i1", *several(4, 8))
    send(fleet, "i1", *several(2, 32))
    found = costs(empty_free(PREFILL, BGMV, 100.0), fleet)
    assert found.cost.tolist() == pytest.approx([2.56 / 200 + 0.90624])
    assert found.requests.tolist() == [6]
    assert found.total.tolist() == pytest.approx([5.51424])


@pytest.mark.parametrize("decode", [BGMV, MBGMV])
@pytest.mark.parametrize("slo", [36.0, 100.0])
def test_an_idle_replica_that_keeps_the_slo_wins_with_total_0(decode: PerformanceModel, slo: float) -> None:
    policy, fleet = empty_free(PREFILL, decode, slo), example()
    fleet.join(ReplicaInfo(ReplicaId("idle")))
    assert costs(policy, fleet).total[2] == 0
    assert routed_to(policy, NEW, fleet) == "idle"


def test_an_idle_replica_that_would_break_the_slo_does_not_win() -> None:
    """Its total is 0 times infinity in the paper's terms."""
    fleet = example()
    policy = empty_free(PREFILL, PerformanceModel(KernelForm.PADDED, 0.0, 35.0), 36.0)
    fleet.join(ReplicaInfo(ReplicaId("idle")))
    assert routed_to(policy, NEW, fleet) == "idle"
    only_idle_breaks = empty_free(PREFILL, PerformanceModel(KernelForm.UNPADDED, -0.001, 36.5), 36.0)
    found = costs(only_idle_breaks, fleet)
    assert found.breaks_slo.tolist() == [False, False, True]
    assert np.isfinite(found.total).all()
    assert routed_to(only_idle_breaks, NEW, fleet) != "idle"


def test_zero_times_infinity_does_not_occur() -> None:
    """Everybody breaks the SLO, one of them idle: the least finite cost times count decides."""
    policy, fleet = empty_free(PREFILL, BGMV, 1.0), example()
    assert routed_to(policy, NEW, fleet) == "i2"
    fleet.join(ReplicaInfo(ReplicaId("idle")))
    assert np.isfinite(costs(policy, fleet).total).all()
    assert routed_to(policy, NEW, fleet) == "idle"


def test_a_step_without_requests_takes_no_time() -> None:
    """So the first queued request is charged the whole step."""
    nothing = np.zeros(1)
    after, added = BGMV.added_seconds(nothing, nothing, nothing, nothing, 64)
    assert after == added == pytest.approx(32.13 + 64 * 0.00354)


def test_the_slo_is_met_by_a_step_as_long_as_it() -> None:
    fleet = fleet_of("i1")
    exactly = 32.13 + 64 * 0.00354
    assert not costs(empty_free(PREFILL, BGMV, exactly), fleet).breaks_slo[0]
    assert costs(empty_free(PREFILL, BGMV, exactly, safety=1.001), fleet).breaks_slo[0]


def test_equal_totals_go_to_the_lower_cost_then_fewer_requests_then_the_first() -> None:
    fleet = fleet_of("i1", "i2", "i3", output_tokens=1e9)
    run(fleet, "i1", *several(2, 64, "a"))
    run(fleet, "i2", *several(1, 64, "b"))
    run(fleet, "i3", *several(1, 64, "c"))
    free = PerformanceModel(KernelForm.PADDED, 0.0, 0.0)
    assert routed_to(empty_free(free, free), NEW, fleet) == "i2"


def test_requests_of_the_base_model_are_rows_without_a_rank() -> None:
    fleet = fleet_of("i1")
    run(fleet, "i1", ask("base"), ask("also base"))
    after, _ = BGMV.added_seconds(
        fleet.loads.requests, fleet.loads.rows, fleet.loads.largest_rank, fleet.loads.total_rank, 8
    )
    assert after.tolist() == pytest.approx([32.13 + 8 * 0.00354])


def test_tokens_of_the_prompt_count_if_the_model_has_them() -> None:
    fleet = fleet_of("i1", output_tokens=200)
    without = costs(empty_free(PREFILL, BGMV), fleet).cost
    with_tokens = costs(empty_free(PerformanceModel(KernelForm.PADDED, 0.02, 40.0, token_s=0.1), BGMV), fleet).cost
    assert with_tokens - without == pytest.approx([0.1 * 100 / 200])


def test_request_waits_without_room_and_one_too_large_is_sent_to_be_refused() -> None:
    infos = [ReplicaInfo(ReplicaId(name), total_tokens=150) for name in ("i1", "i2")]
    fleet, policy = fleet_of(*infos), empty_free(PREFILL, BGMV)
    send(fleet, "i1", ask("x", 64))
    assert routed_to(policy, NEW, fleet) == "i2"
    send(fleet, "i2", ask("y", 64))
    assert routed_to(policy, NEW, fleet) is None
    assert routed_to(policy, ask("huge", 64, known_tokens=151), fleet) is not None
    fleet.ended(ReplicaId("i2"), ask("y").request_id, 1.0)
    assert routed_to(policy, NEW, fleet) == "i2"


def test_candidates_are_the_replicas_that_the_table_names() -> None:
    fleet, policy = example(), empty_free(PREFILL, BGMV, 100.0)
    placed = RoutingTable(1, {AdapterDigest("new's"): (ReplicaShare(ReplicaId("i1"), 1.0),)})
    assert routed_to(policy, NEW, fleet, placed) == "i1"
    assert routed_to(policy, ask("unknown", 64), fleet, placed) == "i2"


def test_a_fit_of_measured_steps_gives_the_model_back() -> None:
    batches = [[rank] * size for size in (4, 8, 16, 32) for rank in (8, 16, 32, 64)]
    for form, model in ((KernelForm.PADDED, BGMV), (KernelForm.UNPADDED, MBGMV)):
        work = [sum(batch) for batch in batches]  # all ranks of a batch are equal: both forms count the same
        steps = [(batch, model.slope_s * count + model.fixed_s) for batch, count in zip(batches, work, strict=True)]
        fitted = fit_performance(form, steps)
        assert (fitted.slope_s, fitted.fixed_s) == pytest.approx((model.slope_s, model.fixed_s))
    mixed = fit_performance(KernelForm.PADDED, [([8, 64, 0], 2 * 64.0), ([8], 8.0)])
    assert (mixed.slope_s, mixed.fixed_s) == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize(("name", "choice"), [("toppings(empty_is_free=true)", "busier"), ("toppings", "calmer")])
def test_head_of_queue_is_charged_a_prefill_only_if_an_empty_replica_is_free(name: str, choice: str) -> None:
    """Charged, two requests more and a queue are cheaper: 12 * 0.2330 < 10 * 0.4330; else 12 * 0.2330 > 10 * 0.2330."""
    fleet = fleet_of("calmer", "busier", output_tokens=200)
    run(fleet, "calmer", *several(10, 64, "a"))
    run(fleet, "busier", *several(11, 64, "b"))
    send(fleet, "busier", ask("waits", 64))
    policy = ROUTING[name](PolicySetup(Preset(), None, ClusterOptions()), step_models=(PREFILL, BGMV))
    assert routed_to(policy, NEW, fleet) == choice


def test_kernel_forms_without_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="einsum"):
        PerformanceModel(KernelForm.EINSUM, 1.0, 1.0)
    with pytest.raises(ValueError, match="two different steps"):
        fit_performance(KernelForm.PADDED, [([8], 1.0), ([8], 1.1)])
