"""What assisted prefills cost, and when they pay."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.costs.assist_costs import AssistCosts, qkv_share, row_bytes
from lorikeet.costs.prefill_pipeline import plan
from tests.costs.assist_cases import _MLP, _WIDE, COSTS, LLAMA_2_7B, adapter_of_rank


def test_bytes_of_an_adapter() -> None:
    """Rank 64 on q, k and v of Llama-2-7B has 96 MiB (the specification's table)."""
    times = COSTS.times(256, COSTS.rank(adapter_of_rank(64)))
    assert times.load_s * 32 * COSTS.load_bandwidth == pytest.approx(96 * 2**20)
    assert times.group_load_s((0, 32)) == pytest.approx(COSTS.load_fixed_s + 96 * 2**20 / COSTS.load_bandwidth)


def test_rank_counts_what_the_adapter_changes() -> None:
    assert COSTS.rank(adapter_of_rank(64)) == 64
    assert COSTS.rank(adapter_of_rank(48, ("q", "v"))) == 32
    every_other = msgspec.structs.replace(adapter_of_rank(0), ranks={"q": (0, 96) * 16})
    assert COSTS.rank(every_other) == 16


def test_share_of_the_product() -> None:
    assert qkv_share(LLAMA_2_7B) == pytest.approx(3 * 4096 / (4 * 4096 + 3 * 11008))


@pytest.mark.parametrize(
    ("tokens", "expected_ms"), [(1, 0.8), (64, 0.8), (160, 1.1), (256, 1.4), (1024, 5.0), (1280, 6.2)]
)
def test_device_time_is_linear_between_points_and_beyond(tokens: int, expected_ms: float) -> None:
    assert COSTS.device_layer_s(tokens) == pytest.approx(expected_ms * 1e-3)


def test_only_the_product_of_q_k_v_hides_the_host() -> None:
    device_s = COSTS.device_layer_s(256)
    host_s = 0.2e-3 + 1e-6 * 256 + 2.4e-6 * 64 * 16
    hidden_s = qkv_share(LLAMA_2_7B) * device_s
    assert COSTS.host_layer_s(256, 64) == pytest.approx(device_s + host_s - hidden_s)
    # 16 tokens for each of 16 workers; with twice the tokens each has twice as many.
    assert COSTS.host_layer_s(512, 64) - COSTS.device_layer_s(512) == pytest.approx(
        0.2e-3 + 1e-6 * 512 + 2.4e-6 * 64 * 32 - qkv_share(LLAMA_2_7B) * COSTS.device_layer_s(512)
    )


def test_a_host_that_is_done_before_the_product_costs_nothing() -> None:
    free = msgspec.structs.replace(COSTS, host_fixed_s=0.0, host_token_s=0.0, host_token_rank_s=1e-9)
    assert free.host_layer_s(256, 64) == free.device_layer_s(256)


def test_workers_on_the_cores_of_the_engine_hide_nothing() -> None:
    shared = msgspec.structs.replace(COSTS, qkv_share=0.0)
    host_s = 0.2e-3 + 1e-6 * 256 + 2.4e-6 * 64 * 16
    assert shared.host_layer_s(256, 64) == pytest.approx(shared.device_layer_s(256) + host_s)


def test_one_group_is_the_whole_adapter() -> None:
    assert msgspec.structs.replace(COSTS, one_group=True).layer_groups(adapter_of_rank(64), 256) == ((0, 32),)
    assert len(COSTS.layer_groups(adapter_of_rank(64), 256)) > 1


def test_plans_are_shared_by_prompts_of_about_the_same_length() -> None:
    slow_link = msgspec.structs.replace(COSTS, load_fixed_s=5e-3, load_bandwidth=2e9)
    of_256 = slow_link.layer_groups(adapter_of_rank(64), 256)
    assert of_256 == plan(slow_link.times(256, 64)).groups
    assert of_256 != plan(slow_link.times(129, 64)).groups
    assert of_256 == slow_link.layer_groups(adapter_of_rank(64), 129)


def test_pipelining_gives_large_adapter_an_earlier_first_token() -> None:
    at_once = msgspec.structs.replace(COSTS, one_group=True)
    for rank in (64, 128):
        planned_s = COSTS.assisted(adapter_of_rank(rank), 256).first_token_s
        assert planned_s < at_once.assisted(adapter_of_rank(rank), 256).first_token_s


def test_static_waits_for_all_but_the_group_that_comes_last() -> None:
    static = msgspec.structs.replace(COSTS, is_static=True)
    course = static.assisted(adapter_of_rank(64), 256)
    first, stop = course.groups[-1]
    assert course.placement == "C" * (stop - first) + "G" * (32 - stop + first)


def test_assistance_pays_for_a_short_prompt_and_not_for_a_long_one() -> None:
    """With 2048 tokens one layer on the host takes longer than loading all of them."""
    assert COSTS.pays(adapter_of_rank(64), 16)
    assert COSTS.assisted(adapter_of_rank(64), 16).first_token_s < COSTS.waiting_s(adapter_of_rank(64), 16)
    assert not COSTS.pays(adapter_of_rank(64), 2048)


def test_assistance_does_not_pay_where_it_delays_many_others() -> None:
    assert COSTS.pays(adapter_of_rank(64), 16, delay_per_lost_second=0)
    assert not COSTS.pays(adapter_of_rank(64), 16, delay_per_lost_second=1000)


def test_assistance_does_not_pay_where_the_load_takes_no_time() -> None:
    fast_link = msgspec.structs.replace(COSTS, load_fixed_s=0.0, load_bandwidth=1e15)
    assert not fast_link.pays(adapter_of_rank(64), 256)


def test_adapters_on_any_modules_can_be_assisted_by_one_rank() -> None:
    for modules in (("q",), ("q", "o"), LORA_MODULES):
        assert COSTS.can_assist(adapter_of_rank(8, modules))
    several = msgspec.structs.replace(COSTS, row_bytes=row_bytes(LLAMA_2_7B, 2))
    assert several.can_assist(adapter_of_rank(8, ("q", "gate", "up")))
    assert not several.can_assist(adapter_of_rank(8, ("q", "o")))
    assert not several.can_assist(adapter_of_rank(8, ("down",)))
    without_o = msgspec.structs.replace(adapter_of_rank(8), ranks={"q": (8,) * 32, "o": (0,) * 32})
    assert several.can_assist(without_o)


def test_other_modules_count_by_their_size_and_each_product_is_handed_over() -> None:
    ref = adapter_of_rank(8, LORA_MODULES)
    assert COSTS.handovers(ref) == 4
    assert COSTS.handovers(adapter_of_rank(8)) == COSTS.handovers(adapter_of_rank(8, ("v",))) == 1
    rank = 8 * (4 * 2 * _WIDE + 3 * (_WIDE + _MLP)) / (3 * 2 * _WIDE)
    assert COSTS.rank(ref) == pytest.approx(rank)
    more_s = COSTS.host_layer_s(256, rank, 4) - COSTS.host_layer_s(256, rank)
    assert more_s == pytest.approx(3 * (0.2e-3 + 1e-6 * 256))


def test_costs_are_plain_data() -> None:
    assert msgspec.json.decode(msgspec.json.encode(COSTS), type=AssistCosts) == COSTS


@given(st.integers(1, 4096), st.sampled_from((8, 16, 32, 64, 128, 256)), st.booleans(), st.booleans())
def test_assisted_prefills_lie_between_cached_and_the_host_alone(
    tokens: int, rank: int, waits: bool, one_group: bool
) -> None:
    costs = msgspec.structs.replace(COSTS, waits=waits, one_group=one_group)
    times = costs.times(tokens, rank)
    first_token_s = costs.assisted(adapter_of_rank(rank), tokens).first_token_s
    assert times.cached_s <= first_token_s + 1e-12
    assert first_token_s <= times.layers * times.host_s + 1e-12
