"""Quantised checkpoints give the numbers that their formats define, packed or not."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorikeet.config import ConfigError
from lorikeet.kernels.quantized import QuantizedWeight, quantize
from lorikeet.models.config import read_model_config
from lorikeet.models.default import prepare_default_model
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.loading import WeightError, load_weights
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.models.transformers_decoder import load_model
from lorikeet.models.weights import DecoderWeights
from lorikeet.worker.rank_setup import load_rank
from tests.models import quantized_checkpoints as writers
from tests.models.checkpoints import make_checkpoint
from tests.models.quantized_checkpoints import Tensors, Writer, write_quantized
from tests.support.driver import fp32_settings

SAMPLES = Path(__file__).parents[2] / "examples/adapters"
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def packed_ints(bits: int) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}}


FORMATS: dict[str, tuple[Writer, dict[str, Any], bool]] = {
    "awq": (writers.awq(16), AWQ, True),
    "gptq": (writers.gptq(4, 16), GPTQ, True),
    "gptq-symmetric": (writers.gptq(4, 16, symmetric=True), GPTQ | {"sym": True}, True),
    "gptq-v2": (writers.gptq(4, 16, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}, True),
    "gptq-8-bits-by-output": (writers.gptq(8, -1), GPTQ | {"bits": 8, "group_size": -1}, True),
    "gptq-2-bits": (writers.gptq(2, 16), GPTQ | {"bits": 2}, True),
    "gptq-reordered": (writers.gptq(4, 16, reordered=True), GPTQ | {"desc_act": True}, False),
    "int4": (
        writers.compressed_packed(16),
        COMPRESSED | {"format": "pack-quantized", "config_groups": packed_ints(4)},
        True,
    ),
    "int4-asymmetric": (
        writers.compressed_packed(16, asymmetric=True),
        COMPRESSED | {"format": "pack-quantized", "config_groups": packed_ints(4)},
        True,
    ),
    "int8": (writers.compressed_int8, COMPRESSED | {"format": "int-quantized"}, True),
    "fp8": (writers.compressed_fp8, COMPRESSED | {"format": "float-quantized"}, False),
    "fp8-blocks": (writers.fp8_blocks(32), {"quant_method": "fp8", "weight_block_size": [32, 32]}, False),
    "nf4": (writers.nf4(nested=False), BNB, False),
    "nf4-nested": (writers.nf4(nested=True), BNB, False),
    "bnb-int8": (writers.bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, True),
}
formats = pytest.mark.parametrize("name", FORMATS)


def make_quantized(folder: Path, name: str, variant: str = "llama") -> Tensors:
    """Save a tiny checkpoint in one of ``FORMATS``; return what its weights are."""
    make_checkpoint(folder, variant)
    writer, quantization, _ = FORMATS[name]
    return write_quantized(folder, writer, quantization)


def load(folder: Path, **options: Any) -> DecoderWeights:
    return load_weights(folder, read_model_config(folder), torch.float32, **options)


def plain(weight: Any) -> Tensor:
    return weight.dequantized(torch.float32) if isinstance(weight, QuantizedWeight) else weight


def assert_means(weights: DecoderWeights, meant: Tensors) -> None:
    """Fail unless the linear weights are exactly these numbers."""
    for i, layer in enumerate(weights.layers):
        attention = f"model.layers.{i}.self_attn."
        mlp = f"model.layers.{i}.mlp."
        parts = {
            "qkv": [attention + f"{module}_proj.weight" for module in "qkv"],
            "o": [attention + "o_proj.weight"],
            "gate_up": [mlp + "gate_proj.weight", mlp + "up_proj.weight"],
            "down": [mlp + "down_proj.weight"],
        }
        for product, names in parts.items():
            assert torch.equal(plain(getattr(layer, product)), torch.cat([meant[name] for name in names])), product


@pytest.mark.slow
@formats
def test_dequantised_numbers_follow_the_format(name: str, tmp_path: Path) -> None:
    meant = make_quantized(tmp_path, name)
    weights = load(tmp_path)
    is_packed = FORMATS[name][2]
    assert_means(weights, meant)
    linear = [getattr(layer, product) for layer in weights.layers for product in ("qkv", "o", "gate_up", "down")]
    assert all(isinstance(weight, QuantizedWeight) is is_packed for weight in linear)
    assert ("dequantised to float32" in weights.stored) is not is_packed
    assert isinstance(weights.lm_head, Tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq", "int4", "fp8-blocks", "nf4"])
@pytest.mark.parametrize("variant", ["qwen3-5", "granite-hybrid"])
def test_projections_of_a_recurrence_follow_the_format(variant: str, name: str, tmp_path: Path) -> None:
    """A part of a product that is not quantised, such as the gates of the delta rule, dequantises the product."""
    meant = make_quantized(tmp_path, name, variant)
    weights = load(tmp_path)
    rule = read_model_config(tmp_path).recurrence
    assert rule is not None
    for number in rule.layers:
        prefix = f"model.layers.{number}."
        parts: dict[str, Tensor] = {}
        for path, sections in rule.projections().items():
            whole = meant[f"{prefix}{rule.module}.{path}.weight"]
            rows = whole.split([section.features for section in sections])
            parts |= {section.name: part for section, part in zip(sections, rows, strict=True)}
        layer = weights.layers[number]
        assert torch.equal(plain(layer.qkv), torch.cat([parts[module] for module in rule.inputs]))
        assert torch.equal(plain(layer.o), meant[f"{prefix}{rule.module}.out_proj.weight"])
        assert isinstance(layer.o, QuantizedWeight) is FORMATS[name][2]
        assert isinstance(layer.qkv, QuantizedWeight) is (FORMATS[name][2] and not rule.is_delta)


@pytest.mark.slow
@formats
def test_the_modules_of_transformers_get_the_numbers_of_the_format(name: str, tmp_path: Path) -> None:
    meant = make_quantized(tmp_path, name)
    found = load_model(tmp_path, torch.float32, torch.device("cpu")).state_dict()
    for name, tensor in meant.items():
        torch.testing.assert_close(found[name], tensor.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@formats
def test_none_dequantises_everything(name: str, tmp_path: Path) -> None:
    meant = make_quantized(tmp_path, name)
    weights = load(tmp_path, quantization="none")
    assert_means(weights, meant)
    assert not weights.are_quantized
    assert weights.stored.endswith("dequantised to float32")


@pytest.mark.slow
@formats
def test_the_ranks_shares_put_together_are_the_whole(name: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, name)
    whole = load(tmp_path).layers[2]
    shares = [load(tmp_path, rank=rank, tensor_parallel=2).layers[2] for rank in (0, 1)]
    for product in ("o", "down"):
        assert torch.equal(
            torch.cat([plain(getattr(share, product)) for share in shares], 1), plain(getattr(whole, product))
        )
    gates, ups = zip(*(plain(share.gate_up).chunk(2) for share in shares), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), plain(whole.gate_up))


def test_zero_biases_that_only_the_format_has_are_passed_over(tmp_path: Path) -> None:
    make_quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(80)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"up_proj\.bias is not part of the model"):
        load(tmp_path)


def test_a_tensor_of_a_format_that_is_missing_is_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"down_proj\.scales is missing"):
        load(tmp_path)


def test_scales_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.scales"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"down_proj\.weight: is not a valid gptq weight: "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("int4", "is quantised already \\(awq\\), so it cannot be served as int4"),
        ("gptq", "quantization: gptq is not what .* has: it is quantised by awq"),
        ("int3", "'int3' is not one of auto, none, int8"),
    ],
)
def test_tensors_that_do_not_fit_the_checkpoint_are_refused(asked: str, complaint: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, "awq")
    with pytest.raises(WeightError, match=complaint):
        load(tmp_path, quantization=asked)
    assert_means(load(tmp_path, quantization="awq_marlin"), make_quantized(tmp_path, "awq"))


def test_a_preset_that_merges_is_refused_on_a_quantised_checkpoint(tmp_path: Path) -> None:
    make_quantized(tmp_path, "awq")
    said = r"preset dlora: merges adapters into the weights, and these are quantised \(awq"
    with pytest.raises(ConfigError, match=said):
        load_rank(fp32_settings(kernels="reference", preset="dlora"), tmp_path, SingleRankGroup())


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "aqlm"}, "quant_method: 'aqlm' is not supported"),
        (GPTQ | {"bits": 3}, "bits: only 2, 4 and 8"),
        (GPTQ | {"dynamic": {"x": {}}}, "dynamic"),
        (AWQ | {"version": "gemv"}, "version: 'gemv'"),
        (AWQ | {"group_size": 15}, "group_size: must be even"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format: 'nvfp4-pack-quantized'"),
        (COMPRESSED | {"config_groups": packed_ints(3)}, "weights of 3 bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: must be two sizes"),
    ],
)
def test_a_method_or_option_that_is_not_read_is_named(
    quantization: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    with pytest.raises(ModelConfigError, match=complaint):
        load(tmp_path)


@pytest.mark.parametrize("bits", [8, 4])
def test_any_checkpoint_is_quantised_on_load(bits: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-biases", hidden_size=64)
    exact = load(tmp_path)
    weights = load(tmp_path, quantization=f"int{bits}")
    for mine, theirs in zip(weights.layers, exact.layers, strict=True):
        assert isinstance(mine.qkv, QuantizedWeight)
        assert mine.qkv.bits == bits
        error = (plain(mine.qkv) - theirs.qkv).norm() / theirs.qkv.norm()
        assert error < (0.006 if bits == 8 else 0.09)
        assert torch.equal(mine.qkv_bias, theirs.qkv_bias)
    assert isinstance(weights.lm_head, QuantizedWeight)
    assert weights.lm_head.bits == 8
    assert torch.equal(weights.embedding, exact.embedding)
    assert f"int{bits} in groups of 32, output layer int8, quantised from float32: " in weights.stored


def test_ranks_quantise_the_same_model_or_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=128)
    whole = load(tmp_path, quantization="int4").layers[0]
    shares = [load(tmp_path, quantization="int4", rank=rank, tensor_parallel=2).layers[0] for rank in (0, 1)]
    for product in ("o", "down"):
        assert torch.equal(
            torch.cat([plain(getattr(share, product)) for share in shares], 1), plain(getattr(whole, product))
        )
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(WeightError, match=r"down_proj\.weight: .* groups of 32 inputs, and a rank has 40: they cannot"):
        load(tmp_path, quantization="int4", tensor_parallel=2)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "reference"), [(8, Type.Q8_0), (4, Type.Q4_0)])
def test_the_default_model_with_an_adapter_merged_in_loses_no_more_than_by_round_to_nearest(
    bits: int, reference: Type, default_model_cache: Path
) -> None:
    """Its own weights are of 4-bit origin, so without the adapter an error would say little."""
    adapter = SAMPLES / "pirate"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    lora = load_file(adapter / "adapter_model.safetensors")
    base = prepare_default_model(default_model_cache)
    scale = settings["lora_alpha"] / settings["r"]
    ours = 0.0
    theirs = 0.0
    names = sorted(name.removesuffix(".lora_A.weight") for name in lora if name.endswith("lora_A.weight"))[::5]
    with safe_open(base / "model.safetensors", framework="pt") as tensors:
        for name in names:
            a, b = (lora[f"{name}.lora_{side}.weight"].float() for side in "AB")
            weight = tensors.get_tensor(f"{name.removeprefix('base_model.model.')}.weight").float() + scale * (b @ a)
            blocks = gguf.quants.quantize(weight.numpy(), reference)
            nearest = torch.from_numpy(gguf.quants.dequantize(blocks, reference))
            ours += float((quantize(weight, bits).dequantized(torch.float32) - weight).square().sum())
            theirs += float((nearest - weight).square().sum())
    assert len(names) > 10
    assert ours <= theirs
