"""From a preset to the policies of a cluster: with a published profile, and the error without one."""

import msgspec
import pytest

from lorikeet.cluster.build import build_cluster_policies, build_placement, build_points, build_routing
from lorikeet.cluster.placement.operating_points import EstimatedPoints, OperatingPoints
from lorikeet.cluster.setup import GENERIC, ClusterOptions, loads_that_fit
from lorikeet.config import ConfigError
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.core.request import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile, OperatingLoads, Transfers, decode_profile, encode_profile
from lorikeet.papers.dlora.placement import BurstTolerance
from lorikeet.papers.dlora.routing import PendingTime
from lorikeet.papers.loraserve.placement import LoRAServe
from lorikeet.papers.toppings.performance import performance_models
from lorikeet.papers.toppings.routing import Toppings
from lorikeet.policies import PLACEMENT, ROUTING
from lorikeet.presets import PRESETS, Preset
from tests.support.fleets import ask, fleet_of, routed_to, run, several
from tests.support.placement import DEMANDS_B, replicas_of
from tests.support.profiles import round_profile

REPLICAS = replicas_of(4)
OPTIONS = ClusterOptions(tpot_s=0.1, tokens_per_s={8: 1000.0, 128: 600.0})


@pytest.fixture(scope="module")
def published() -> CostProfile:
    return load_profile("a100-80-llama-2-7b")


def loads(form: KernelForm, slo: Slo, prompt_tokens: int = 512, level: float = 1000.0) -> OperatingLoads:
    return OperatingLoads(form, slo, prompt_tokens, 128, 64, 512, {8: level, 128: level / 2})


# --- every preset ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_places_and_routes_with_a_published_profile(name: str, published: CostProfile) -> None:
    policy, placement = build_cluster_policies(PRESETS[name], published, OPTIONS)
    placed = placement.place(DEMANDS_B, REPLICAS, 0.0)
    assert placed.shares.keys() == {demand.adapter for demand in DEMANDS_B}
    fleet = fleet_of(*REPLICAS)
    may_leave = ROUTING.load(PRESETS[name].routing).may_leave_table  # when the named ones are busy
    for demand in DEMANDS_B:
        adapter, named = demand.adapter, placed.replicas(demand.adapter)
        if may_leave:
            fleet = fleet_of(*REPLICAS)
            for holder in named:
                fleet.loaded(holder, adapter)
        asked = ask(f"of {adapter}", demand.rank, adapter, adapter_bytes=demand.size_bytes, keys=(b"1",))
        replica = routed_to(policy, asked, fleet, placed)
        assert replica in named
        fleet.dispatched(asked, replica)


def test_every_policy_is_in_a_preset_and_every_preset_names_policies_that_exist() -> None:
    by_option = {"consistent"}  # chosen by an option, for several routers side by side
    assert {preset.routing.partition("(")[0] for preset in PRESETS.values()} | by_option == set(ROUTING)
    assert {preset.placement.partition("(")[0] for preset in PRESETS.values()} == set(PLACEMENT)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_places_and_routes_without_a_profile(name: str) -> None:
    policy, placement = build_cluster_policies(PRESETS[name], None, ClusterOptions(has_default_slo=True))
    placed = placement.place(DEMANDS_B, REPLICAS, 0.0)
    assert placed.shares.keys() == {demand.adapter for demand in DEMANDS_B}
    asked = ask("one", 8, DEMANDS_B[0].adapter, adapter_bytes=10**7, keys=(b"1",))
    assert routed_to(policy, asked, fleet_of(*REPLICAS), placed) in REPLICAS


def test_seed_determines_all_draws() -> None:
    def homes(seed: int) -> object:
        placement = build_placement(PRESETS["loraserve:random"], None, ClusterOptions(seed=seed))
        return placement.place(DEMANDS_B, REPLICAS, 0.0).shares

    def drawn(seed: int) -> list[object]:
        policy, fleet = build_routing(Preset(routing="random"), None, ClusterOptions(seed=seed)), fleet_of(*REPLICAS)
        return [routed_to(policy, ask(str(number)), fleet) for number in range(20)]

    assert homes(1) == homes(1) != homes(2)
    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("preset", "complaint"),
    [
        (Preset(placement="nowhere"), "unknown placement policy 'nowhere'; choose one of: everywhere, rank-groups"),
        (Preset(routing="nobody"), "unknown routing policy 'nobody'; choose one of: random, round-robin"),
    ],
)
def test_unknown_policy_error_names_option_and_choices(preset: Preset, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_cluster_policies(preset, None, OPTIONS)


def test_options_survive_the_way_to_another_process() -> None:
    packed = msgspec.msgpack.encode(OPTIONS)
    assert msgspec.msgpack.decode(packed, type=ClusterOptions) == OPTIONS


# --- TOPPINGS' performance models --------------------------------------------------------------------


@pytest.mark.parametrize("form", [KernelForm.PADDED, KernelForm.UNPADDED])
@pytest.mark.parametrize("batch", [6, 24])
@pytest.mark.parametrize("rank", [16, 48])
def test_decode_steps_that_were_not_fitted_are_predicted(
    form: KernelForm, batch: int, rank: int, published: CostProfile
) -> None:
    _, decode = performance_models(published, form, 512, 128)
    work = step_work((SequenceWork(576, 1, True, number, rank) for number in range(batch)), form)
    fleet = fleet_of("a")
    run(fleet, "a", *several(batch - 1, rank))
    counted = fleet.loads
    before = counted.requests, counted.rows, counted.largest_rank, counted.total_rank
    predicted, _ = decode.added_seconds(*before, rank)
    assert predicted.item() == pytest.approx(CostModel(published, form).step_s(work), rel=0.2)


def test_a_prefill_costs_more_the_longer_the_prompt_and_the_larger_the_rank(published: CostProfile) -> None:
    short, _ = performance_models(published, KernelForm.PADDED, 128, 128)
    long, _ = performance_models(published, KernelForm.PADDED, 1024, 128)
    assert 0 < short.slope_s < long.slope_s
    assert 0 < short.fixed_s < long.fixed_s


def test_toppings_keeps_the_target_for_a_token_and_without_one_has_no_limit(published: CostProfile) -> None:
    fleet = fleet_of("a", "b")
    run(fleet, "a", *several(30, 64))
    broken = []
    for tpot_s in (0.0, 1e-4):
        policy = build_routing(PRESETS["toppings"], published, ClusterOptions(tpot_s=tpot_s))
        assert isinstance(policy, Toppings)
        broken.append(policy.costs(ask("new", 64), fleet).breaks_slo.tolist())
    assert broken == [[False, False], [True, True]]


def test_toppings_has_no_model_of_einsums(published: CostProfile) -> None:
    with pytest.raises(ConfigError, match=r"routing toppings: .* einsum"):
        build_routing(Preset(kernel_form=KernelForm.EINSUM, routing="toppings"), published, OPTIONS)


def test_toppings_follows_measured_costs() -> None:
    """Three times as slow, a step with one more request breaks the target of the profile that it was built for."""
    fleet = fleet_of("a", "b")
    run(fleet, "a", *several(8, 64))

    def breaks(policy: Toppings) -> list[bool]:
        found: list[bool] = policy.costs(ask("new", 64), fleet).breaks_slo.tolist()
        return found

    policy = build_routing(PRESETS["toppings"], None, ClusterOptions(tpot_s=2 * GENERIC.decode_step_s(9, 64)))
    assert isinstance(policy, Toppings)
    assert breaks(policy) == [False, False]
    policy.learn(ReplicaCosts(*(3 * part for part in msgspec.structs.astuple(GENERIC)[:-1])))
    assert breaks(policy) == [True, True]


def test_without_a_target_toppings_takes_five_times_an_unloaded_step() -> None:
    policy = build_routing(PRESETS["toppings"], None, ClusterOptions(has_default_slo=True))
    assert isinstance(policy, Toppings)
    policy.learn(ReplicaCosts(0.01, 1e-4, 0.0, 0.0, 0.0, 1e-3))
    fleet, broken = fleet_of("a"), []
    for others in (0, 35):  # 0.01 s + 1 ms a rank: 5 times 0.01 s at rank 40
        run(fleet, "a", *several(others, 1))
        broken.append(policy.costs(ask("new", 16), fleet).breaks_slo.tolist())
    assert broken == [[False], [True]]


# --- dLoRA -------------------------------------------------------------------------------------------


def test_pending_time_loads_by_the_profiles_link_or_the_declared_one(published: CostProfile) -> None:
    asked = ask("new", 8, adapter_bytes=100_000_000)
    link = published.transfers.host_to_device
    assert link is not None
    for declared, expected_s in ((0.0, link.seconds(100_000_000)), (1e9, 0.1)):
        policy, fleet = (
            build_routing(PRESETS["dlora"], published, ClusterOptions(link_bytes_per_s=declared)),
            fleet_of("a"),
        )
        assert isinstance(policy, PendingTime)
        assert policy.pending_s(asked, fleet, fleet.is_warm(asked.adapter)).tolist() == pytest.approx([expected_s])


def test_pending_time_refuses_a_profile_without_a_link() -> None:
    with pytest.raises(ConfigError, match=r"routing dlora: profile round has no transfers\.host_to_device"):
        build_routing(PRESETS["dlora"], round_profile(transfers=Transfers()), OPTIONS)


def test_only_presets_with_comigration_reserve_memory_for_copies(published: CostProfile) -> None:
    """The reserve is of section 5.2, not of placement alone (5.1). It has room for all adapters here."""

    def pairs(preset: str) -> int:
        return len(list(build_placement(PRESETS[preset], published, OPTIONS).place(DEMANDS_B, REPLICAS, 0.0).pairs()))

    assert pairs("dlora") == len(DEMANDS_B) * len(REPLICAS)
    assert pairs("dlora:proactive") == pairs("dlora:rr") < pairs("dlora")


def test_burst_tolerance_takes_memory_from_options_or_the_profile(published: CostProfile) -> None:
    """With as much memory as all adapters take twice, not all have a copy on each of four replicas."""
    preset, needed_bytes = PRESETS["dlora"], sum(demand.size_bytes for demand in DEMANDS_B)
    copies = []
    for options in (ClusterOptions(), ClusterOptions(memory_bytes=needed_bytes // 2)):
        placement = build_placement(preset, published, options)
        assert isinstance(placement, BurstTolerance)
        copies.append(len(list(placement.place(DEMANDS_B, REPLICAS, 0.0).pairs())))
    assert copies[0] > copies[1]
    told = ClusterOptions(memory_bytes=needed_bytes // 2, kv_token_bytes=published.geometry.block_bytes(1))
    assert len(list(build_placement(preset, None, told).place(DEMANDS_B, REPLICAS, 0.0).pairs())) == copies[1]


# --- operating points --------------------------------------------------------------------------------


def test_operating_points_match_kernel_form_and_slo_and_survive_a_file() -> None:
    ttft = Slo(ttft_s=10.0)
    entries = (
        loads(KernelForm.UNPADDED, ttft, level=1.0),
        loads(KernelForm.PADDED, Slo(ttft_s=5.0), level=2.0),
        loads(KernelForm.PADDED, ttft, 128, level=3.0),
        loads(KernelForm.PADDED, ttft, 512, level=4.0),
    )
    profile = decode_profile(encode_profile(round_profile(operating_points=entries)), "here")
    assert profile.operating_points == entries
    assert loads_that_fit(profile, KernelForm.PADDED, ttft, 600, 128) == entries[3]
    assert loads_that_fit(profile, KernelForm.PADDED, ttft, 200, 128) == entries[2]
    assert loads_that_fit(profile, KernelForm.UNPADDED, ttft, 200, 128) == entries[0]
    assert loads_that_fit(profile, KernelForm.EINSUM, ttft, 512, 128) is None
    placement = build_placement(PRESETS["loraserve"], profile, ClusterOptions(ttft_s=10.0))
    assert isinstance(placement, LoRAServe)


def test_missing_operating_points_are_estimated() -> None:
    profile = round_profile(operating_points=(loads(KernelForm.PADDED, Slo(10.0, 0.1)),))
    searched = build_points(PRESETS["loraserve"], profile, ClusterOptions(ttft_s=10.0, tpot_s=0.1))
    assert isinstance(searched, OperatingPoints)
    assert searched[8] == pytest.approx(1000.0)
    for options in (ClusterOptions(ttft_s=2.0), ClusterOptions()):
        for known in (profile, None):
            assert isinstance(build_points(PRESETS["loraserve"], known, options), EstimatedPoints)


def test_operating_points_must_be_loads() -> None:
    with pytest.raises(ConfigError, match="operating points: Operating points must be positive"):
        build_placement(PRESETS["loraserve"], None, ClusterOptions(tokens_per_s={8: 0.0}))


def test_estimated_points_fall_with_rank_and_follow_costs_and_lengths() -> None:
    costs = ReplicaCosts(0.01, 1e-4, 1e-3, 0.0, 1e-6, 1e-5)
    points = EstimatedPoints(costs, 500, 100, max_batch=64)
    # 500 prompt tokens take 50.4 ms; at rank 8 the largest batch decodes 64 in 79.1 ms, which is over 5 × 11.08 ms:
    # 42 sequences stay within it.
    batch = (5 * 0.01108 - 0.01) / 0.00108
    assert points[8] == pytest.approx(0.8 * 600 / (500 * 1.08e-4 + 100 * 0.0554 / batch))
    assert points[8] > points[16] > points[128]
    before = points[8]
    points.learn(costs, 1000.0, 0.0)
    assert points[8] > before  # prompts are cheaper a token than answers
    points.learn(ReplicaCosts(0.02, 2e-4, 2e-3, 0.0, 2e-6, 2e-5), 500.0, 100.0)
    assert points[8] == pytest.approx(before / 2)


def test_a_target_of_zero_is_none() -> None:
    assert ClusterOptions().slo == Slo()
    assert ClusterOptions(ttft_s=0.5).slo == Slo(ttft_s=0.5)
    assert ClusterOptions(ttft_s=10.0, e2e_s=60.0).slo == Slo(ttft_s=10.0, e2e_s=60.0)
