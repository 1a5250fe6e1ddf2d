"""Merged steps and assisted prefills of the modelled executor, on handwritten plans."""

import math

import pytest

from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.ids import AdapterDigest, AdapterName, BlockId, RequestId
from lorikeet.core.plan import Groups, KernelForm, SequenceStart, SequenceStep, StepPlan, StepResult, Tier, Transfer
from lorikeet.core.request import SamplingParams
from lorikeet.costs.profile import (
    Constant,
    CostProfile,
    Curve,
    HostLora,
    Link,
    LoraCosts,
    ProfileError,
    StepCosts,
    Switching,
    Transfers,
)
from lorikeet.presets import HostLayers, LayerGroups, MergeBy, Preset
from lorikeet.worker.modelled import build_modelled_executor
from tests.support.profiles import round_profile

BLOCKS = tuple(BlockId(block) for block in range(8))


def adapter(name: str, *ranks: int) -> AdapterRef:
    return AdapterRef(AdapterName(name), AdapterDigest(f"digest-{name}"), "", {"q": ranks}, 0)


class Hand:
    """A modelled executor on a virtual clock, driven by hand."""

    def __init__(self, profile: CostProfile, preset: Preset | None = None) -> None:
        self.clock = VirtualClock()
        settings = Settings(ModelSettings(max_model_len=200), EngineSettings(host_memory_bytes=2**20))
        self.executor, self.sizes = build_modelled_executor(
            settings, profile, preset or Preset(), self.clock, coalesced=True
        )

    def fetch(
        self, number: int, ref: AdapterRef | None, blocks: int, groups: Groups = (), left: tuple[int, int] = (0, 0)
    ) -> Transfer:
        """A copy from the host, begun with the next plan that gets it."""
        there = BLOCKS[:blocks]
        return Transfer(number, Tier.HOST, Tier.DEVICE, there, there, ref, groups=groups, left_to_host=left)

    def move(self, *transfers: Transfer) -> None:
        self.executor.execute(StepPlan(0, transfers=transfers))

    def land(self) -> None:
        """Wait until all has arrived."""
        self.clock.advance(10.0)
        self.executor.completed_transfers()

    def prefill(
        self, ref: AdapterRef, tokens: int, *transfers: Transfer, assisted: bool = True, name: str = "a"
    ) -> float:
        """Run a prompt under an adapter; return how long that takes."""
        start = SequenceStart(RequestId(name), [1] * tokens, tokens, SamplingParams(max_tokens=100), ref.digest)
        step = SequenceStep(RequestId(name), 0, tokens, BLOCKS[:1], samples=True)
        cold = (ref.digest,) if assisted else ()
        plan = StepPlan(0, sequences=(step,), starts=(start,), transfers=transfers, assisted=cold)
        return self.executor.execute(plan).duration_s

    def decode(self, merged: AdapterRef | None, repeat: int = 1) -> StepResult:
        """Decode a token of the sequence at its sixth place."""
        step = SequenceStep(RequestId("a"), 5, 1, (), samples=True)
        digest = None if merged is None else merged.digest
        return self.executor.execute(
            StepPlan(1, sequences=(step,), merged=digest, repeat=repeat, max_duration_s=math.inf)
        )


# --- merging ------------------------------------------------------------------------------------------

X = adapter("x", 4, 4)
Y = adapter("y", 2, 2)
SWITCHING = Switching(merge=Constant(0.030, "s"), merge_rank=Constant(0.001, "s/rank"), restore=Constant(0.020, "s"))


def merging(preset: Preset | None = None, **changes: object) -> Hand:
    """Two adapters on the device, and a sequence of five tokens under the first."""
    hand = Hand(round_profile(**{"switching": SWITCHING, **changes}), preset)
    hand.move(hand.fetch(1, X, 1), hand.fetch(2, Y, 1))
    hand.land()
    hand.prefill(X, 5, assisted=False)
    return hand


def test_a_switch_takes_its_time_once_and_merged_steps_have_no_cost_of_adapters() -> None:
    hand = merging()
    assert hand.decode(None).duration_s == pytest.approx(0.0106 + 4 * 0.001)
    merged = hand.decode(X)
    assert merged.switch_s == pytest.approx(0.030 + 4 * 0.001)
    assert merged.duration_s == pytest.approx(merged.switch_s + 0.0106)
    again = hand.decode(X)
    assert again.switch_s == 0.0
    assert again.duration_s == pytest.approx(0.0106)
    back = hand.decode(None)
    assert back.switch_s == pytest.approx(0.020)
    assert back.duration_s == pytest.approx(0.020 + 0.0106 + 4 * 0.001)


def test_a_repeat_has_one_switch_before_its_steps() -> None:
    result = merging().decode(X, repeat=3)
    assert result.steps_run == 3
    assert result.duration_s == pytest.approx(result.switch_s + 0.0106 + 0.0107 + 0.0108)


def test_a_plan_without_sequences_switches_nothing() -> None:
    hand = merging()
    hand.decode(X)
    hand.move(hand.fetch(3, None, 1))
    assert hand.decode(X).switch_s == 0.0


def test_a_merged_adapter_stays_merged_when_its_blocks_are_freed() -> None:
    hand = merging()
    hand.decode(X)
    hand.executor.execute(StepPlan(0, evictions=(X.digest,)))
    assert hand.decode(X).duration_s == pytest.approx(0.0106)


def test_whole_models_are_switched_over_the_link() -> None:
    hand = merging(Preset(merge_by=MergeBy.MODEL), weight_bytes=256_000)
    assert hand.decode(X).switch_s == pytest.approx(0.5)


def test_a_profile_that_knows_no_switch_is_named() -> None:
    with pytest.raises(ProfileError, match="profile round has no switching"):
        merging(switching=None).decode(X)


# --- assisted prefills --------------------------------------------------------------------------------

EIGHT = adapter("eight", *(64,) * 8)
"""A block of 2 KiB for each of eight layers."""
PAIRS = ((2, 4), (4, 6), (6, 8), (0, 2))
"""Four groups of two layers, the first one last."""


def eight_layers() -> CostProfile:
    """TOPPINGS' section 4.1 with round numbers, as in the tests of the planner.

    A layer takes 1 ms on the device, 3 ms with the host and 2 ms to load, and each group of layers 1 ms more.
    """
    nothing = Constant(0.0, "s")
    return round_profile(
        geometry=ModelGeometry(
            layers=8, kv_heads=1, head_dim=4, modules=dict.fromkeys(LORA_MODULES, ModuleShape(8, 8)), dtype_bytes=2
        ),
        step=_constant_step(0.008),
        lora={KernelForm.UNPADDED: LoraCosts(nothing, nothing, nothing, nothing)},
        transfers=Transfers(host_to_device=Link(Constant(0.001, "s"), Constant(2048 / 0.002, "bytes/s"))),
        host_lora=HostLora(Constant(0.002, "s"), nothing, nothing, cores=4, core_tokens=16),
    )


def _constant_step(seconds: float) -> StepCosts:
    nothing = Constant(0.0, "s")
    return StepCosts(
        tokens=Curve("tokens", ((1, seconds),)),
        sampled_rows=Curve("rows", ((1, 0.0),)),
        decode_attention=nothing,
        decode_sequence=nothing,
        prefill_attention=nothing,
        prefill_sequence=nothing,
        loop=nothing,
        loop_sequence=nothing,
    )


@pytest.mark.parametrize(
    ("preset", "groups", "left", "expected_ms"),
    [
        (Preset(), PAIRS, (0, 0), 16),
        (Preset(host_layers=HostLayers.STATIC), PAIRS, (0, 2), 17),
        (Preset(), ((0, 8),), (0, 0), 20),
        (Preset(host_layers=HostLayers.STATIC), ((0, 8),), (0, 8), 24),
        (Preset(host_layers=HostLayers.STATIC), ((0, 8),), (0, 4), 21),
    ],
    ids=["dynamic", "static", "one group", "all on the host", "a half of it"],
)
def test_an_assisted_prefill_takes_the_time_of_the_recurrence(
    preset: Preset, groups: Groups, left: tuple[int, int], expected_ms: float
) -> None:
    hand = Hand(eight_layers(), preset)
    assert hand.prefill(EIGHT, 5, hand.fetch(1, EIGHT, 8, groups, left)) == pytest.approx(expected_ms * 1e-3)
    hand.land()
    assert hand.prefill(EIGHT, 5, assisted=False, name="b") == pytest.approx(0.008)


@pytest.mark.parametrize(("layers", "expected_s"), [(HostLayers.DYNAMIC, 0.020), (HostLayers.PATIENT, 0.019)])
def test_groups_come_later_if_the_link_is_busy(layers: HostLayers, expected_s: float) -> None:
    hand = Hand(eight_layers(), Preset(host_layers=layers))
    hand.move(hand.fetch(1, None, 1))  # until 3 ms
    # Groups come at 8, 13, 18 and 23 ms: CCCGCGCC. The last layer's turn comes at 17 ms; its group is worth the wait.
    assert hand.prefill(EIGHT, 5, hand.fetch(2, EIGHT, 8, PAIRS)) == pytest.approx(expected_s)


def test_a_second_prefill_uses_layers_that_have_arrived_since() -> None:
    hand = Hand(eight_layers())
    hand.prefill(EIGHT, 5, hand.fetch(1, EIGHT, 8, PAIRS))
    # At 16 ms only the group of the first two layers is missing; it comes at 20 ms: CCGGGGGG.
    assert hand.prefill(EIGHT, 5, name="b") == pytest.approx(2 * 0.003 + 6 * 0.001)


def test_the_device_computes_arrived_layers_and_the_host_the_rest() -> None:
    rank_s = Constant(0.001, "s/rank")
    nothing = Constant(0.0, "s")
    costs = {KernelForm.UNPADDED: LoraCosts(nothing, rank_s, rank_s, nothing)}
    profile = round_profile(
        lora=costs,
        host_lora=HostLora(
            Constant(0.1, "s"), Constant(0.01, "s/token"), Constant(0.001, "s"), cores=4, core_tokens=16
        ),
    )
    hand = Hand(profile)
    ref = adapter("x", 8, 8)
    # A block per layer of 8 rank rows would be 256 bytes; both layers share one of 512, which takes 1 ms.
    # The first layer: half of 14 ms and the host's share, by which time the block is there.
    rank = 8 / 3  # of q alone, where q, k and v count as one
    first_s = 0.014 / 2 + 0.1 + 5 * 0.01 + 5 * rank * 0.001
    second_s = (0.014 + 5 * 8 * 0.001) / 2
    assert hand.prefill(ref, 5, hand.fetch(1, ref, 1, ((0, 1),))) == pytest.approx(first_s + second_s)


def test_the_planner_knows_the_same_figures() -> None:
    assert Hand(round_profile()).sizes.assist is None
    hand = Hand(eight_layers(), Preset(layer_groups=LayerGroups.ONE, host_layers=HostLayers.STATIC, host_chunk=4))
    costs = hand.sizes.assist
    assert costs is not None
    assert (costs.one_group, costs.is_static, costs.worker_tokens, costs.workers) == (True, True, 64, 4)
    assert costs.device_layer_s(100) == pytest.approx(0.001)
    assert costs.host_layer_s(100, 8) == pytest.approx(0.003)
    assert costs.load_fixed_s + 2048 / costs.load_bandwidth == pytest.approx(0.003)


def test_an_assisted_plan_needs_host_cores() -> None:
    hand = Hand(round_profile())
    with pytest.raises(ProfileError, match="profile round has no host_lora"):
        hand.prefill(X, 5, hand.fetch(1, X, 1, ((0, 1),)))
