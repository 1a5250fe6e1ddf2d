from collections.abc import Iterator

import msgspec
import pytest

from lorikeet.core.geometry import ModuleShape
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import compose_profile, load_profile, profile_names, token_curve
from lorikeet.costs.devices import DEVICES, MODELS, Device
from lorikeet.costs.model import CostModel, StepWork
from lorikeet.costs.operators import (
    LIMITS,
    OPERATORS_OF_A_LAYER,
    all_reduce,
    gemm_s,
    measured_shares,
    operator_medians,
    operator_ratio,
)
from lorikeet.costs.profile import Constant, Curve, ProfileError
from lorikeet.costs.published_lora import LoraPaper

SEVEN_B, SEVENTY_B = MODELS["llama-2-7b"], MODELS["llama-2-70b"]


def seconds_at(device: Device, tokens: int, degree: int = 1) -> float:
    return dict(token_curve(device, SEVEN_B, degree).points)[tokens]


def test_a_step_is_all_layers_and_the_embedding_once() -> None:
    # A100, one token, as the source prints it (test_tables.py): 5 + 65 + 5 + 25 + 5 + 116 + 7 + 60 + 2 µs a layer.
    assert seconds_at(DEVICES["a100-80"], 1) == pytest.approx((32 * 290 + 3) * 1e-6)


def test_tensor_parallelism_adds_two_all_reduces_a_layer() -> None:
    # H100, four ranks, 4096 tokens of 4096 features in two bytes: 32 MiB lie between two measured sizes.
    reduce_s, _ = all_reduce(DEVICES["h100"], 4)
    with_collectives = seconds_at(DEVICES["h100"], 4096, 4)
    medians = operator_medians("h100", "llama-2-7b", 4)[4096]
    layer_s = sum(medians.values()) - medians["emb"]
    assert with_collectives == pytest.approx(32 * (layer_s + 2 * reduce_s(32 * 2**20)) + medians["emb"])


def test_without_a_table_an_all_reduce_is_a_ring() -> None:
    reduce_s, source = all_reduce(DEVICES["a40"], 4)
    assert reduce_s(31_507_692) == pytest.approx(1.5e-3, rel=1e-6)
    assert "not measured" in source


def test_slower_links_lengthen_the_measured_all_reduce_by_the_rings_bytes() -> None:
    h800, _ = all_reduce(DEVICES["h800"], 8)
    h100, _ = all_reduce(DEVICES["h100"], 8)
    assert h800(2**26) - h100(2**26) == pytest.approx(2 * 7 / 8 * 2**26 * (1 / 200e9 - 1 / 450e9))


def test_one_rank_needs_no_collective() -> None:
    assert all_reduce(DEVICES["a40"], 1)[0](2**20) == 0.0


def test_the_same_chip_is_as_fast_as_measured() -> None:
    assert token_curve(DEVICES["h800"], SEVEN_B, 1).points == token_curve(DEVICES["h100"], SEVEN_B, 1).points


@pytest.mark.parametrize(("name", "few", "many"), [("a10", 696 / 600, 149.7 / 125), ("a100-40", 2039 / 1555, 1.0)])
def test_devices_scale_by_bandwidth_at_few_tokens_and_by_peak_at_many(name: str, few: float, many: float) -> None:
    device = DEVICES[name]
    measured = DEVICES[device.measured]
    assert seconds_at(device, 1) / seconds_at(measured, 1) == pytest.approx(few)
    assert seconds_at(device, 4096) / seconds_at(measured, 4096) == pytest.approx(many, rel=0.04)


def test_a_product_takes_the_larger_of_its_bytes_and_operations() -> None:
    a100, square = DEVICES["a100-80"], ModuleShape(4096, 4096)
    assert gemm_s(a100, square, 1, LIMITS) == pytest.approx(2 * (4096**2 + 8192) / 2039e9)
    assert gemm_s(a100, square, 4096, LIMITS) == pytest.approx(2 * 4096**3 / 312e12)


def test_a_model_without_tables_is_scaled_from_one_that_has_some() -> None:
    h100, model = DEVICES["h100"], MODELS["llama-2-34b"]
    ratio = {name: operator_ratio(h100, model, 4, name, 1) for name in OPERATORS_OF_A_LAYER}
    assert ratio["attn_pre_proj"] == ratio["attn_post_proj"] == ratio["attn_rope"] == ratio["add"] == 1
    assert ratio["mlp_up_proj"] == pytest.approx(22016 / 28672, rel=1e-3)
    assert ratio["mlp_act"] == pytest.approx(22016 / 28672)
    with_tables, scaled = (dict(token_curve(h100, each, 4).points)[64] for each in (SEVENTY_B, model))
    assert 48 / 80 * 0.8 < scaled / with_tables < 48 / 80


@pytest.mark.parametrize("name", ["a40", "a100-80", "h100"])
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_measured_products_stay_below_the_data_sheet(name: str, model) -> None:  # type: ignore[no-untyped-def]
    for degree in (1, 2, 4, 8):
        shares = measured_shares(DEVICES[name], model, degree)
        assert 0.5 < shares.bandwidth < 1
        assert 0.6 < shares.flops < 1


def test_the_pool_is_what_the_weights_leave_of_nine_tenths() -> None:
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096)
    assert load_profile("a40-llama-2-7b").pool_bytes == int(0.9 * 48 * 2**30) - weights
    with pytest.raises(ProfileError, match=r"a40x2-llama-2-70b: the weights do not fit"):
        compose_profile(DEVICES["a40"], SEVENTY_B, 2)


def test_attention_reads_the_kv_of_its_share_of_heads() -> None:
    profile = load_profile("a100-80x4-llama-2-70b")
    share = profile.kernel_efficiency["gemm_bandwidth"].value
    kv_bytes = 80 * 2 * 8 * 128 * 2 / 4
    assert profile.step.decode_attention.value == pytest.approx(kv_bytes / (2039e9 * share))
    assert profile.step.prefill_attention.value == pytest.approx(4 * 8192 * 80 / 4 / (312e12 * 0.615))


def test_links_reach_what_was_measured_of_their_generation_of_pci_express() -> None:
    a40, h100 = load_profile("a40-llama-2-7b").transfers, load_profile("h100x2-llama-2-7b").transfers
    assert a40.host_to_device is not None
    assert h100.host_to_device is not None
    assert a40.host_to_device.bandwidth.value == pytest.approx(24.8e9)
    assert h100.host_to_device.bandwidth.value == pytest.approx(2 * 55.6e9)
    assert h100.device_to_host == h100.host_to_device
    assert h100.source_to_host == h100.source_to_device
    assert a40.host_to_device.seconds(0) == 6e-6
    assert a40.source_to_host is not None
    assert a40.source_to_host.seconds(6_800_000) == pytest.approx(80e-6 + 1e-3)


def figures_of(part: object) -> Iterator[Constant | Curve]:
    """Yield every figure of a part of a profile."""
    if isinstance(part, Constant | Curve):
        yield part
    elif isinstance(part, msgspec.Struct):
        for field in part.__struct_fields__:
            yield from figures_of(getattr(part, field))
    elif isinstance(part, dict):
        for each in part.values():
            yield from figures_of(each)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*profile_names(), *(f"a100-80-llama-2-7b@{paper}" for paper in LoraPaper)])
def test_every_profile_prices_whole_steps_and_says_where_each_figure_is_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.pool_bytes > 0
    counts = [count for count, _ in profile.step.tokens.points]
    assert counts == sorted(set(counts))
    assert set(profile.lora) == set(KernelForm)
    figures = list(figures_of(profile))
    assert len(figures) > 30
    for figure in figures:
        assert figure.source
        assert isinstance(figure, Curve) or figure.value >= 0
    decode = CostModel(profile, KernelForm.UNPADDED).step_s(StepWork(8, 8, 8, 8000, 0, 0, None))
    prefill = CostModel(profile, KernelForm.UNPADDED).step_s(StepWork(2048, 1, 0, 0, 1, 2048 * 2049 // 2, None))
    assert 0 < decode < prefill
