"""Settings of a checkpoint are read in both spellings, and unsupported ones are refused by name."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorikeet.core.geometry import ModuleShape
from lorikeet.models.config import read_model_config
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.rope import RopeScaling

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def config_of(folder: Path, **changes: Any):  # type: ignore[no-untyped-def]
    """Write ``PLAIN`` with changes (a value of None is written as null) and read it."""
    (folder / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    return read_model_config(folder)


def test_old_and_new_spellings_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_type": "llama3",
    }
    old = config_of(tmp_path, rope_theta=5e5, rope_scaling=scaling, torch_dtype="float16")
    new = config_of(tmp_path, rope_parameters={**scaling, "rope_theta": 5e5}, torch_dtype=None, dtype="float16")
    assert old == new
    assert old.ropes[0] == RopeScaling(5e5, "llama3", 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0)
    assert old.dtype == "float16"


def test_the_oldest_spelling_of_linear_scaling_is_understood(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.ropes[0] == RopeScaling(10_000.0, "linear", 2.0)


def test_both_spellings_of_rope_with_equal_values_are_accepted(tmp_path: Path) -> None:
    both = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    both |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config_of(tmp_path, **both).ropes[0] == RopeScaling(5e5, "linear", 2.0)


def test_the_original_context_may_stand_outside_the_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = config_of(tmp_path, rope_scaling=scaling, original_max_position_embeddings=128)
    assert (config.ropes[0].original_tokens, config.context_tokens) == (128, 512)


def test_yarn_lengthens_the_context_by_its_factor(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config_of(tmp_path, rope_scaling=scaling).context_tokens == 2048


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert config_of(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert config_of(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert config_of(tmp_path, eos_token_id=None).eos_token_ids == ()


QWEN_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, (16,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 1}, (None,) * 4),
        ({**QWEN_WINDOW, "max_window_layers": 0}, (16,) * 4),
        (
            {**QWEN_WINDOW, "max_window_layers": "none", "layer_types": ["sliding_attention", "full_attention"] * 2},
            (16, None) * 2,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 16,
                "max_window_layers": 3,
                "use_sliding_window": True,
            },
            (None, None, None, 16),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (16, None, 16, None),
        ),
    ],
)
def test_each_architecture_has_its_own_rule_for_windows(
    changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert config_of(tmp_path, **changes).windows == windows


GEMMA_3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 16}


def test_old_and_new_spellings_of_two_rotary_embeddings_mean_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = config_of(tmp_path, **GEMMA_3, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    local = {"rope_type": "default", "rope_theta": 1e4}
    by_type = {"full_attention": {**scaling, "rope_theta": 1e6}, "sliding_attention": local}
    assert old == config_of(tmp_path, **GEMMA_3, rope_parameters=by_type)
    assert old == config_of(tmp_path, **GEMMA_3, rope_scaling=scaling)  # the others are Gemma 3's defaults
    assert old.ropes == (RopeScaling(1e6, "linear", 8.0), RopeScaling(1e4))
    assert old.rotations == (1, 1, 1, 1, 1, 0)
    assert old.windows == (16,) * 5 + (None,)


def test_the_decoder_of_a_vision_model_has_its_own_section_and_defaults(tmp_path: Path) -> None:
    """As in the published config of Gemma 3 4B, which leaves most keys out."""
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    inner |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_model_config(tmp_path)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.tie_word_embeddings, config.dtype, config.context_tokens) == (True, "bfloat16", 131_072)
    assert (config.norm_offset, config.activation, config.embedding_scale) == (1.0, "gelu_pytorch_tanh", 2560**0.5)
    assert config.windows.count(None) == 5


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures: .*MixtralForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config: quant_method"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: short_factor: must be a list"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "64"}, "hidden_size: must be a number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be an integer of at least 1"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 65}, "head_dim: must be even"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters: .* for different layers"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "linear", "factor": 4}},
            "rope_scaling: differs from rope_parameters",
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256},
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings: is 128 here and 256 in rope_scaling",
        ),
        ({"attention_bias": "yes"}, "attention_bias: must be true or false"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}},
            "rope_scaling: needs 4 factors, not 3",
        ),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config: is missing"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 4,
            },
            "layer_types: chunked_attention",
        ),
    ],
)
def test_unsupported_values_are_refused_with_file_and_key(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelConfigError, match=rf"config\.json: {complaint}"):
        config_of(tmp_path, **changes)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)


def test_a_rank_holds_its_share_of_every_module(tmp_path: Path) -> None:
    geometry = config_of(tmp_path).geometry(dtype_bytes=2, tensor_parallel=4)
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype_bytes) == (4, 1, 8, 2)
    assert geometry.modules == {
        "q": ModuleShape(64, 16),
        "k": ModuleShape(64, 8),
        "v": ModuleShape(64, 8),
        "o": ModuleShape(16, 64),
        "gate": ModuleShape(64, 24),
        "up": ModuleShape(64, 24),
        "down": ModuleShape(24, 64),
    }


def test_ranks_beyond_the_kv_heads_hold_the_head_that_their_queries_use(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert [config.module_shard("k", rank, 4).outputs for rank in range(4)] == [slice(0, 8)] * 2 + [slice(8, 16)] * 2


@pytest.mark.parametrize(
    ("changes", "ranks", "complaint"),
    [
        ({}, 3, "8 attention heads cannot be split over 3"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8},
            6,
            "4 key/value heads cannot be split over 6",
        ),
        ({"intermediate_size": 98}, 4, "intermediate size 98 cannot be split over 4"),
        ({}, 0, "at least one rank"),
    ],
)
def test_sizes_that_do_not_divide_by_the_ranks_are_named(
    changes: dict[str, Any], ranks: int, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        config_of(tmp_path, **changes).geometry(dtype_bytes=2, tensor_parallel=ranks)


QWEN_3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}


def test_a_rank_holds_its_share_of_a_delta_rule(tmp_path: Path) -> None:
    config = config_of(tmp_path, **QWEN_3_5)
    assert config.recurrence is not None
    assert config.recurrence.on == (True, True, True, False)
    geometry = config.geometry(dtype_bytes=2, tensor_parallel=2)
    named = ("q", "recurrence_q", "recurrence_v", "recurrence_b")
    assert {name: geometry.modules[name].out_features for name in named} == {
        "q": 128,
        "recurrence_q": 8,
        "recurrence_v": 32,
        "recurrence_b": 2,
    }
    assert geometry.module_layers["q"] == (3,)
    assert len(geometry.kv_layers) == 1
    assert {(state.layer, state.name, state.parts, state.shape) for state in geometry.states if state.layer == 1} == {
        (1, "conv", 6, (3, 8)),
        (1, "recurrent", 2, (8, 16)),
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: must have both of"),
        ({"linear_num_value_heads": 3}, "3 do not divide among 2 key heads"),
    ],
)
def test_a_wrong_delta_rule_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        config_of(tmp_path, **(QWEN_3_5 | changes))


@pytest.mark.parametrize(
    ("ranks", "stages", "complaint"), [(4, 1, "2 heads of linear attention"), (1, 2, "cannot be pipeline stages")]
)
def test_a_delta_rule_that_cannot_be_split_is_named(ranks: int, stages: int, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        config_of(tmp_path, **QWEN_3_5).check_divides(ranks, stages)


GRANITE_HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "mamba_n_heads": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 8,
}


def test_a_rank_holds_its_share_of_a_state_space(tmp_path: Path) -> None:
    config = config_of(tmp_path, **GRANITE_HYBRID)
    rule = config.recurrence
    assert rule is not None
    assert (rule.on, rule.step_limits) == ((True, True, False, True), (0.0, math.inf))
    assert config.rotations == (-1,) * 4
    assert config_of(tmp_path, **GRANITE_HYBRID, position_embedding_type="rope").rotations == (0,) * 4
    values = 2 * config.hidden_size
    geometry = config.geometry(dtype_bytes=2, tensor_parallel=2)
    assert "recurrence_b" not in geometry.modules
    named = ("recurrence_q", "recurrence_v", "recurrence_z", "recurrence_a")
    assert [geometry.modules[name].out_features for name in named] == [16, values // 2, values // 2, 8]
    assert geometry.names is not None
    paths = {path.path: path.modules for path in geometry.names.paths}
    assert {path: modules for path, modules in paths.items() if "mamba" in path or "shared" in path} == {
        "layers.{}.mamba.in_proj": tuple(f"recurrence_{name}" for name in "zvkqa"),
        "layers.{}.mamba.out_proj": ("recurrence_o",),
        "layers.{}.shared_mlp.input_linear": ("gate", "up"),
        "layers.{}.shared_mlp.output_linear": ("down",),
    }


def test_a_hybrid_may_have_attention_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, **(GRANITE_HYBRID | {"layer_types": ["attention"] * 4}))
    geometry = config.geometry(dtype_bytes=2)
    assert (config.recurrence, geometry.states) == (None, ())
    assert geometry.names is not None
    assert geometry.names.paths[-1].path == "layers.{}.shared_mlp.output_linear"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_local_experts": 4}, "num_local_experts: mixtures of experts are not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias: biases of projections"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: state spaces are supported with silu only"),
        ({"mamba_n_heads": 5}, "mamba_n_heads: 5 heads do not divide"),
        ({"time_step_limit": [0.1]}, "time_step_limit: must be two numbers"),
        ({"time_step_limit": [0.1, "long"]}, "time_step_limit: must be two numbers"),
    ],
)
def test_a_wrong_state_space_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        config_of(tmp_path, **(GRANITE_HYBRID | changes))


def test_groups_of_a_state_space_that_cannot_be_split_are_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, **(GRANITE_HYBRID | {"mamba_n_groups": 1}))
    with pytest.raises(ModelConfigError, match="1 groups of a state space cannot be split over 2"):
        config.check_divides(2)


def test_reading_a_config_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, lorikeet.models.config, lorikeet.models.default; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
