import pytest

from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import LoraWork, lora_s
from lorikeet.costs.profile import LoraCosts

MS = 1e-3


def costs(name: str, form: KernelForm = KernelForm.UNPADDED) -> LoraCosts:
    return load_profile(name).lora_costs(form)


def toppings_step_s(form: KernelForm, rows: int, rank: int) -> float:
    """Return LoRA's part of a decode step of equal ranks on TOPPINGS' device and model, adapters on q, k and v only."""
    # The three modules of four have 6/8 of the elements.
    return lora_s(costs("a100-80-llama-2-7b@toppings", form), LoraWork(rows * rank * 6 / 8, 0.0, rows * rank * 6 / 8))


@pytest.mark.parametrize(("form", "printed_ms"), [(KernelForm.UNPADDED, 35.9 - 35.3), (KernelForm.PADDED, 35.8 - 34.8)])
def test_toppings_two_instances_differ_as_printed(form: KernelForm, printed_ms: float) -> None:
    difference = toppings_step_s(form, 16, 64) - toppings_step_s(form, 24, 32)
    assert difference == pytest.approx(printed_ms * MS, abs=0.1001 * MS)  # each latency is printed to 0.1 ms


def test_toppings_example_sends_the_request_where_the_paper_does() -> None:
    slo_s = 36 * MS
    for form, printed_ms, fits in (
        (KernelForm.PADDED, 34.8, (False, True)),
        (KernelForm.UNPADDED, 35.3, (True, False)),
    ):
        base_s = printed_ms * MS - toppings_step_s(form, 24, 32)
        grown = {
            KernelForm.PADDED: (toppings_step_s(form, 25, 64), toppings_step_s(form, 17, 64)),
            KernelForm.UNPADDED: (toppings_step_s(form, 26, 32), toppings_step_s(form, 17, 64)),
        }[form]
        assert tuple(base_s + step_s <= slo_s for step_s in grown) == fits


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("a100-80-llama-2-7b", 2.7), ("a100-80x8-llama-2-7b", 1.2), ("a100-80x8-llama-2-70b", 1.45)],
)
def test_loraserve_rank_128_takes_so_much_longer_than_rank_8(name: str, ratio: float) -> None:
    profile = load_profile(f"{name}@loraserve")
    step, tokens = profile.step, 2000
    base_s = dict(step.tokens.points)[tokens] + step.sampled_rows.points[0][1]
    base_s += step.prefill_attention.value * tokens * (tokens + 1) / 2
    per_rank_s = profile.lora_costs(KernelForm.PADDED).prefill_token_rank.value * tokens
    assert (base_s + 128 * per_rank_s) / (base_s + 8 * per_rank_s) == pytest.approx(ratio)


def test_between_two_printed_degrees_loraserves_growth_is_a_power_of_the_degree() -> None:
    one, two, four, eight = (
        costs(f"{name}@loraserve").prefill_token_rank.value
        for name in ("a100-80-llama-2-7b", "a100-80x2-llama-2-7b", "a100-80x4-llama-2-7b", "a100-80x8-llama-2-7b")
    )
    assert one > two > four > eight


def test_chameleon_rank_128_costs_425_where_the_base_costs_400() -> None:
    profile = load_profile("a40-llama-2-7b@chameleon")
    step, tokens = profile.step, 1024
    base_s = dict(step.tokens.points)[tokens] + step.sampled_rows.points[0][1]
    base_s += step.prefill_attention.value * tokens * (tokens + 1) / 2
    adapters_s = 128 * tokens * profile.lora_costs(KernelForm.UNPADDED).prefill_token_rank.value
    assert adapters_s / base_s == pytest.approx(0.425 / 0.400)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_dlora_einsum_of_one_rank_8_adapter_takes_0_389_of_the_base(tokens: int) -> None:
    profile = load_profile("a100-80-llama-2-7b")
    adapters_s = lora_s(profile.lora_costs(KernelForm.EINSUM), LoraWork(0, 8 * tokens, 8, rows=tokens, adapters=1))
    # One token is in the fixed part too, and the operations of rank 8 are added; both are small beside it.
    assert adapters_s == pytest.approx(0.389 * dict(profile.step.tokens.points)[tokens], rel=0.01)


def test_einsums_multiply_each_row_with_each_adapter() -> None:
    profile = load_profile("a100-80-llama-2-7b")
    costs = profile.lora_costs(KernelForm.EINSUM)
    rank_operations = 2 * 4 * 32 * 2 * 4096  # A and B of q, k, v and o on 32 layers
    peak = 312e12 * profile.kernel_efficiency["gemm_flops"].value
    one, many = (lora_s(costs, LoraWork(100 * 64 * count, 0, 64 * count, 100, count)) for count in (1, 31))
    assert many - one == pytest.approx(100 * 30 * 64 * rank_operations / peak)


def test_without_a_paper_decode_is_toppings_and_prefill_the_nearest_papers() -> None:
    for name, paper in (("a40-llama-2-7b", "chameleon"), ("h100-llama-2-7b", "loraserve")):
        assert costs(name).decode_row_rank == costs(f"{name}@toppings").decode_row_rank
        assert costs(name).prefill_token_rank == costs(f"{name}@{paper}").prefill_token_rank


def test_a_paper_without_decode_constants_gets_the_devices_limits() -> None:
    limits = costs("a100-80-llama-2-7b@loraserve")
    share = load_profile("a100-80-llama-2-7b").kernel_efficiency["gemm_bandwidth"].value
    assert limits.adapter_rank.value == pytest.approx(2 * 2**20 / (2039e9 * share))  # 2 MiB a rank
    assert 0 < limits.decode_row_rank.value < limits.adapter_rank.value / 50
