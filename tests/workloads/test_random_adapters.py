from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.models.config import read_model_config
from lorikeet.workloads.random_adapters import spread_ranks, write_random_adapter


@pytest.fixture(scope="module")
def geometry(model_folder: Path) -> ModelGeometry:
    return read_model_config(model_folder).geometry(4)


def test_a_made_adapter_loads_in_peft_with_every_tensor_and_changes_the_logits(
    model_folder: Path, geometry: ModelGeometry, tmp_path: Path
) -> None:
    folder = write_random_adapter(tmp_path / "a", geometry, 8, modules=LORA_MODULES, rank_pattern={"v": 4}, rslora=True)
    base = LlamaForCausalLM.from_pretrained(model_folder)
    tokens = torch.arange(10)[None]
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, folder)
    report = adapted.load_adapter(folder, adapter_name="again")
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert not torch.allclose(adapted(tokens).logits, before, atol=1e-2)


def test_a_made_adapter_has_the_ranks_asked_for(geometry: ModelGeometry, tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path / "a", geometry, 8, modules=("q", "v"), rank_pattern={"v": 4})
    assert describe_folder(folder, DescribeOptions(geometry)).ranks(geometry) == {"q": (8, 8), "v": (4, 4)}


def test_the_seed_alone_decides_the_weights(geometry: ModelGeometry, tmp_path: Path) -> None:
    one, same, other = (
        (write_random_adapter(tmp_path / name, geometry, 8, seed=seed) / "adapter_model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same
    assert one != other


def test_ranks_spread_from_the_lowest_to_the_highest_in_multiples_of_eight() -> None:
    ranks = spread_ranks(8)
    assert (ranks[0], ranks[-1]) == (8, 128)
    assert ranks == sorted(ranks)
    assert all(rank % 8 == 0 for rank in ranks)
    assert spread_ranks(1) == [8]
