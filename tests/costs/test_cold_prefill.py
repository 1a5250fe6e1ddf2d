"""What host cores add to a layer, when layers arrive, and what the papers' figures come to."""

import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.cold_prefill import ColdAdapter, assist_costs, host_layer_s, layer_arrivals_s
from lorikeet.costs.profile import Constant, HostLora
from lorikeet.costs.transfer_model import TransferModel
from lorikeet.presets import Preset
from tests.support.profiles import round_profile

HOST = HostLora(
    Constant(0.001, "s"), Constant(0.01, "s/token"), Constant(0.1, "s/(token·rank)"), cores=4, core_tokens=16
)


def costs_of(preset: Preset | None = None) -> AssistCosts:
    profile = round_profile(host_lora=HOST)
    costs = assist_costs(TransferModel(profile, profile.geometry.block_bytes(16)), preset or Preset())
    assert costs is not None
    return costs


def test_the_busiest_core_and_all_rows_that_are_handed_over_count() -> None:
    assert host_layer_s([ColdAdapter((), (20,), 2)], costs_of()) == pytest.approx(0.001 + 0.2 + 0.1 * 10 * 2)
    both = [ColdAdapter((), (16, 3), 2), ColdAdapter((), (8,), 5)]
    assert host_layer_s(both, costs_of()) == pytest.approx(0.001 + 0.27 + 0.1 * 8 * 5)
    assert host_layer_s([], costs_of()) == 0.0


def test_a_long_prompt_is_cut_evenly_over_all_cores() -> None:
    assert host_layer_s([ColdAdapter((), (400,), 1)], costs_of()) == pytest.approx(0.001 + 4.0 + 0.1 * 100)


def test_fewer_cores_take_more_rows_each() -> None:
    assert host_layer_s([ColdAdapter((), (64,), 1)], costs_of(Preset(host_chunk=4))) == pytest.approx(
        0.001 + 0.64 + 6.4
    )


def test_a_replica_without_host_cores_has_nothing_to_plan_with() -> None:
    profile = round_profile()
    assert assist_costs(TransferModel(profile, 512), Preset()) is None


def test_a_layer_has_arrived_with_the_last_of_its_blocks() -> None:
    shape = ModuleShape(8, 8)
    geometry = ModelGeometry(4, kv_heads=1, head_dim=4, modules=dict.fromkeys(LORA_MODULES, shape), dtype_bytes=2)
    transfers = TransferModel(round_profile(geometry=geometry), block_bytes=3 * 16 * 2)
    # Three rank rows fit a block: layers 0, 1 and 3 have two each, layer 2 has none.
    ref = AdapterRef(AdapterName("x"), AdapterDigest("digest-x"), "", {"q": (2, 2, 0, 2)}, 0)
    assert layer_arrivals_s(ref, ((1, 2), (0, 1)), (5.0, 9.0), transfers) == (9.0, 9.0, float("-inf"), 5.0)


@pytest.mark.parametrize(("tokens", "device_s", "printed_s"), [(64, 0.0321, 0.061), (256, 0.044, 0.126)])
def test_the_composed_host_returns_what_toppings_prints(tokens: int, device_s: float, printed_s: float) -> None:
    profile = load_profile("a100-80-llama-2-7b")
    costs = assist_costs(TransferModel(profile, profile.geometry.block_bytes(16)), Preset())
    assert costs is not None
    added_s = profile.geometry.layers * host_layer_s([ColdAdapter((), (tokens,), 64)], costs)
    assert device_s + added_s == pytest.approx(printed_s, abs=1e-4)


def test_on_a_larger_model_rows_scale_by_bytes_and_ranks_by_operations() -> None:
    small, large = (load_profile(name).host_lora for name in ("a100-80-llama-2-7b", "a100-80x4-llama-2-70b"))
    assert small is not None
    assert large is not None
    assert large.token.value / small.token.value == pytest.approx((8192 + 10240) / (4096 + 12288))
    assert large.token_rank.value / small.token_rank.value == pytest.approx((3 * 8192 + 10240) / (6 * 4096))
    assert load_profile("h100-llama-2-7b").host_lora is None
