"""The delta that is read from a checkpoint equals PEFT's."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lorikeet.adapters.checkpoint import PROJECTIONS, DescribeOptions, describe_folder
from lorikeet.adapters.store import reference
from lorikeet.adapters.weights import load_weights
from lorikeet.core.geometry import LORA_MODULES
from tests.adapters.builders import KV_HEADS, LAYERS, geometry, peft_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1 on q": {"r": 1, "target_modules": ["q_proj"]},
    "rank 8 on q, v": {"r": 8, "lora_alpha": 16},
    "rank 64 on all": {"r": 64, "lora_alpha": 13, "target_modules": ALL},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "rsLoRA": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ATTENTION},
    "a regular expression": {"r": 4, "target_modules": r".*\.layers\.(0|2)\.mlp\.(gate|down)_proj"},
    "some layers": {"r": 4, "target_modules": ["o_proj"], "layers_to_transform": [1]},
    "one layer by pattern": {"target_modules": ["up_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
    "an expression with a flag": {
        "r": 4,
        "target_modules": r"(?i).*\.(Q|v)_proj",
        "exclude_modules": r"(?i).*LAYERS\.0.*",
    },
    "layers, and an empty pattern": {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": ""},
    "MiCA": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "mica"},
    "a key for transposed weights": {"r": 4, "target_modules": ["q_proj"], "fan_in_fan_out": True},
    "a pattern for each module": {
        "r": 8,
        "target_modules": ALL,
        # in the order in which PEFT saves them
        "rank_pattern": {r"layers\.\d\.mlp\.gate_proj": 7, "layers.1.self_attn.v_proj": 5}
        | {f"model.layers.{layer}.mlp.{name}": 2 + layer for layer in range(3) for name in ("gate_proj", "up_proj")}
        | {"self.attn.k_proj": 6, "v_proj": 9},
        "alpha_pattern": {"layers.2.mlp.down_proj": 5, "model.layers.0.mlp.up_proj": 11, "up_proj": 3},
    },
    "excluded": {"r": 4, "target_modules": ATTENTION, "exclude_modules": ["k_proj", "model.layers.1.self_attn.q_proj"]},
    "excluded by expression": {"r": 4, "target_modules": ALL, "exclude_modules": r".*layers\.0.*"},
    "patterns": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": ALL,
        # the first match counts; keys match whole endings, so "proj" matches nothing
        "rank_pattern": {"layers.1.self_attn.q_proj": 32, "q_proj": 2, "proj": 5, r"model.layers.\d+.mlp.up_proj": 3},
        "alpha_pattern": {"k_proj": 40, r"layers\.(0|2)\.mlp\.down_proj": 1, "down_proj": 2},
    },
    "patterns that are odd in another dialect": {
        "r": 8,
        "target_modules": ATTENTION,
        "rank_pattern": {r"k_proj(?#,{2})": 3, "o_proj{e<=1}": 5, "layers.{i}.self_attn.v_proj": 6, "a)|(.*q_proj": 7},
        "alpha_pattern": {"layers.{i}.self_attn.q_proj": 128, "[[:alpha:]]_proj": 64, r"layers\.\d++\..*v_proj": 2},
    },
    "a target that the base lacks": {"target_modules": ["q_proj", "c_attn"]},
    "biases that the base lacks": {"target_modules": ["q_proj"], "bias": "all"},
    "patterns with rsLoRA": {
        "r": 8,
        "use_rslora": True,
        "target_modules": ATTENTION,
        "rank_pattern": {"^model.layers.2.self_attn.o_proj": 20},
        "alpha_pattern": {"self_attn.v_proj": 3},
    },
}


class Weights(NamedTuple):
    layer: int
    module: str
    a: Tensor
    bt: Tensor


def tensors(folder: Path, dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1) -> list[Weights]:
    """What is read, as tensors."""
    ref = reference("x", folder, geometry())
    name = str(dtype).removeprefix("torch.")
    return [
        Weights(layer, module, *(torch.from_numpy(side.copy()).view(dtype) for side in (a, bt)))
        for layer, module, a, bt in load_weights(ref, geometry(size), name, rank, size)
    ]


def deltas(folder: Path) -> dict[tuple[int, str], Tensor]:
    return {(w.layer, w.module): w.bt.t() @ w.a for w in tensors(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_every_module_gets_the_delta_that_peft_computes(tmp_path: Path, options: dict[str, Any]) -> None:
    model = peft_adapter(tmp_path, **options)
    expected = {
        (layer, module): part.get_delta_weight("default")
        for layer in range(LAYERS)
        for module in LORA_MODULES
        if hasattr(
            part := model.get_submodule(f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}"), "lora_A"
        )
    }
    found = deltas(tmp_path)
    assert found.keys() == expected.keys()
    assert list(found) == sorted(found, key=lambda k: (k[0], LORA_MODULES.index(k[1]))), "not in packing order"
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_ranks_by_layer_equal_the_tensors(tmp_path: Path, options: dict[str, Any]) -> None:
    model = peft_adapter(tmp_path, **options)
    ranks = describe_folder(tmp_path, DescribeOptions(geometry())).ranks(geometry())
    for module in LORA_MODULES:
        for layer in range(LAYERS):
            part = model.get_submodule(f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}")
            expected = part.r["default"] if hasattr(part, "lora_A") else 0
            assert ranks.get(module, (0,) * LAYERS)[layer] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scaling_is_multiplied_in_fp32_before_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    peft_adapter(tmp_path, r=6, lora_alpha=7)  # 7/6 rounds
    exact = {(w.layer, w.module): w for w in tensors(tmp_path)}
    for weights in tensors(tmp_path, dtype):
        assert weights.a.dtype == weights.bt.dtype == dtype
        assert torch.equal(weights.bt, exact[weights.layer, weights.module].bt.to(dtype))
        assert torch.equal(weights.a, exact[weights.layer, weights.module].a.to(dtype))


def test_a_bfloat16_checkpoint_reads_as_its_values(tmp_path: Path) -> None:
    model = peft_adapter(tmp_path / "fp32").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    rounded = deltas(tmp_path / "bf16")
    part = model.get_submodule("base_model.model.model.layers.1.self_attn.v_proj")
    expected = part.lora_B["default"].weight.float() @ part.lora_A["default"].weight.float() * part.scaling["default"]
    torch.testing.assert_close(rounded[1, "v"], expected)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tensor_parallel_shares_recombine_to_the_whole(tmp_path: Path, size: int) -> None:
    peft_adapter(tmp_path, r=5, target_modules=ALL)
    whole = tensors(tmp_path)
    shares = [tensors(tmp_path, rank=rank, size=size) for rank in range(size)]
    for index, weights in enumerate(whole):
        parts = [share[index] for share in shares]
        assert {(part.layer, part.module) for part in parts} == {(weights.layer, weights.module)}
        _assert_recombines(weights, parts)


def _assert_recombines(whole: Weights, parts: list[Weights]) -> None:
    if whole.module in ("o", "down"):
        assert torch.equal(torch.cat([part.a for part in parts], dim=1), whole.a)
        assert all(torch.equal(part.bt, whole.bt) for part in parts)
        return
    assert all(torch.equal(part.a, whole.a) for part in parts)
    copies = max(len(parts) // KV_HEADS, 1) if whole.module in ("k", "v") else 1
    for index, part in enumerate(parts):  # each KV head lies on `copies` neighbouring ranks
        assert torch.equal(part.bt, parts[index // copies * copies].bt)
    assert torch.equal(torch.cat([part.bt for part in parts[::copies]], dim=1), whole.bt)
