"""The committed adapter folders: small, clean, and of different shapes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import BASE_MODEL, RECIPES
from safetensors import safe_open

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
LAYERS = 30
PLAIN_TRUTHY_KEYS = {
    "base_model_name_or_path",
    "bias",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "peft_version",
    "r",
    "target_modules",
    "task_type",
    "use_rslora",
}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    return config


def test_the_folders_are_the_recipes_and_hold_two_files_each() -> None:
    assert sorted(folder.name for folder in ADAPTERS.iterdir()) == sorted(RECIPES)
    for name in RECIPES:
        files = sorted(file.name for file in (ADAPTERS / name).iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]


def test_all_adapters_together_take_at_most_20_mb() -> None:
    assert sum(file.stat().st_size for file in ADAPTERS.rglob("*") if file.is_file()) <= 20_000_000


def test_ranks_and_module_sets_differ_and_one_uses_rslora() -> None:
    configs = [config_of(name) for name in RECIPES]
    assert sorted(config["r"] for config in configs) == [8, 16, 32, 64]
    assert len({tuple(config["target_modules"]) for config in configs}) == len(configs)
    assert [config["use_rslora"] for config in configs].count(True) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_says_what_its_recipe_says_and_nothing_exotic(name: str) -> None:
    config, recipe = config_of(name), RECIPES[name]
    assert config["base_model_name_or_path"] == BASE_MODEL
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (recipe.rank, recipe.alpha, recipe.rslora)
    assert config["target_modules"] == sorted(recipe.modules)
    assert config["bias"] == "none"
    assert {key for key, value in config.items() if value} <= PLAIN_TRUTHY_KEYS


@pytest.mark.parametrize("name", RECIPES)
def test_the_weights_are_bf16_finite_and_cover_every_layer(name: str) -> None:
    recipe = RECIPES[name]
    found: set[tuple[int, str, str]] = set()
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            *_, layer, _block, module, half, _weight = key.split(".")
            tensor = file.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert tensor.shape[0 if half == "lora_A" else 1] == recipe.rank, key
            assert math.isfinite(tensor.float().abs().sum()), key
            assert tensor.any(), key
            found.add((int(layer), module, half))
    assert found == {(n, m, h) for n in range(LAYERS) for m in recipe.modules for h in ("lora_A", "lora_B")}
