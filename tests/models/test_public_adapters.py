"""Adapters shaped like 48 published ones are accepted.

The shares of bases, ranks and targets are those of a sample of public ``adapter_config.json`` files. Their tensors are
rebuilt over tiny bases. A few bases run by default, all with ``--all``.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from lorikeet.adapters.checkpoint import AdapterChecks, DescribeOptions, ServedBase, describe_folder
from lorikeet.core.geometry import DECODER_NAMES, ModelGeometry
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import read_model_config
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model, read_transformers_config
from tests.models.checkpoints import make_checkpoint
from tests.models.library_bases import make_base
from tests.support import sampling

QV = ("q_proj", "v_proj")
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
SEVEN = (*QKVO, "gate_proj", "up_proj", "down_proj")
TOWERS = r".*language_model.*\.(self_attn|mlp)\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


class Shape(NamedTuple):
    """Some adapters of one shape.

    Attributes:
        base: type of the base's config.
        count: how many of the sample.
        rank, targets: of the adapter; a string is a regular expression.
        base_name: what the config calls the base.
    """

    base: str
    count: int
    rank: int
    targets: tuple[str, ...] | str
    base_name: str = "someone/base"


SHAPES = (
    Shape("llama", 7, 16, SEVEN),
    Shape("llama", 5, 16, SEVEN, "unsloth/base-bnb-4bit"),
    Shape("llama", 4, 8, QV),
    Shape("llama", 2, 16, QKVO),
    Shape("llama", 1, 8, (*QV, "lm_head")),
    Shape("mistral", 3, 64, SEVEN, "unsloth/base-bnb-4bit"),
    Shape("mistral", 1, 8, QV),
    Shape("qwen2", 4, 64, SEVEN),
    Shape("qwen2", 2, 8, QV),
    Shape("qwen3", 2, 32, SEVEN),
    Shape("qwen3", 1, 32, SEVEN, "unsloth/base-bnb-4bit"),
    Shape("gpt2", 2, 8, ("c_attn",)),
    Shape("gpt2", 1, 16, ("c_attn", "c_proj", "c_fc")),
    Shape("gemma", 1, 16, SEVEN),
    Shape("gemma2", 1, 8, QV),
    Shape("gemma4_text", 1, 16, SEVEN),
    Shape("qwen3_vl", 1, 16, SEVEN),
    Shape("qwen3_vl", 1, 16, TOWERS),
    Shape("smolvlm", 1, 8, QKVO),
    Shape("phi", 1, 32, ("q_proj", "k_proj", "v_proj", "dense")),
    Shape("glm4", 1, 16, (*QKVO, "gate_up_proj", "down_proj")),
    Shape("hunyuan_v1_dense", 1, 16, SEVEN),
    Shape("qwen3_5", 2, 16, SEVEN),
    Shape("codegen", 1, 16, ("qkv_proj",)),
    Shape("falcon", 1, 16, ("query_key_value",)),
)
"""48 for valid decoders; the other seven of the 55 are of encoders, and of decoders that do not exist."""
OWN = ("llama", "mistral", "qwen2", "qwen3")
TRIED = [each for each in SHAPES if sampling.runs_all or each.base in (*OWN, "gpt2", "qwen3_vl", "codegen", "qwen3_5")]


@functools.cache
def geometry(base: str) -> ModelGeometry:
    """Return the geometry of a tiny base.

    Raises:
        ModelConfigError, UnsupportedAttention: it is refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if base in OWN:
            make_checkpoint(path, base)
            return read_model_config(path).geometry(4)
        make_base(path, base)
        read_transformers_config(path)
        model = load_model(path, torch.float32, torch.device("cpu"))
        return TransformersDecoder(model, ReferenceKernels(), 128).geometry


def write_like(folder: Path, shape: Shape, base: ModelGeometry) -> Path:
    """Write an adapter of a shape for a base."""
    folder.mkdir(parents=True)
    names = base.names or DECODER_NAMES
    tensors: dict[str, torch.Tensor] = {}
    for path in names.paths:
        last = path.path.rpartition(".")[2]
        wanted = last in shape.targets if isinstance(shape.targets, tuple) else last in SEVEN
        if not wanted:
            continue
        for layer in range(base.layers):
            if not all(base.has_module(layer, module) for module in path.modules):
                continue
            name = f"base_model.model.{names.prefixes[0]}{path.path.replace('{}', str(layer))}"
            rows = sum(base.modules[module].out_features for module in path.modules)
            inputs = base.modules[path.modules[0]].in_features
            tensors[f"{name}.lora_A.weight"] = torch.zeros(shape.rank, inputs)
            tensors[f"{name}.lora_B.weight"] = torch.zeros(rows, shape.rank)
    if "lm_head" in shape.targets:
        assert base.replaceable is not None
        vocabulary = base.replaceable.vocab_size
        hidden = base.hidden_size
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(shape.rank, hidden)
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(vocabulary, shape.rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": shape.rank,
        "lora_alpha": 2 * shape.rank,
        "target_modules": shape.targets if isinstance(shape.targets, str) else list(shape.targets),
        "base_model_name_or_path": shape.base_name,
        "fan_in_fan_out": shape.base == "gpt2",
        "bias": "none",
        "lora_dropout": 0.05,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("shape", TRIED, ids=lambda shape: f"{shape.base}-r{shape.rank}-{len(shape.targets)}")
def test_an_adapter_is_accepted(shape: Shape, tmp_path: Path) -> None:
    served = ServedBase(("base", "someone/base", "unsloth/base-bnb-4bit"), is_strict=True)

    base = geometry(shape.base)
    folder = write_like(tmp_path / "adapter", shape, base)
    found = describe_folder(folder, DescribeOptions(base, AdapterChecks(base=served), read_weights=True))
    assert found.modules
    assert not found.warnings


def test_the_sample_is_whole() -> None:
    assert sum(shape.count for shape in SHAPES) == 48
