"""Adapters on experts answer like transformers with PEFT, in one batch with each other and the base."""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import reference
from tests.models.library_bases import EXPERTS, make_base, random_ids
from tests.models.library_runs import check, geometry_of, make_peft_adapter, request, run, settings_of


def write_separate_experts(model: PreTrainedModel, folder: Path, names: tuple[str, str, str], rank: int) -> PeftModel:
    """Save an adapter as transformers 4 had it, with a linear layer for each expert; return PEFT's model of it."""
    config = model.config
    hidden = config.hidden_size
    queries = model.get_submodule("model.layers.0.self_attn.q_proj").out_features
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    generator = torch.Generator().manual_seed(rank)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, inputs: int, outputs: int) -> None:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.1

    block, gate, up, down = "block_sparse_moe" if names[0] == "w1" else "mlp", *names
    for layer in range(config.num_hidden_layers):
        add(f"model.layers.{layer}.self_attn.q_proj", hidden, queries)
        add(f"model.layers.{layer}.{block}.gate", hidden, 4)
        for expert in range(4):
            head = f"model.layers.{layer}.{block}.experts.{expert}"
            for name, inputs, outputs in ((gate, hidden, inner), (up, hidden, inner), (down, inner, hidden)):
                add(f"{head}.{name}", inputs, outputs)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "gate", *names]}
    (folder / "adapter_config.json").write_text(json.dumps({**values, "task_type": "CAUSAL_LM"}))
    return PeftModel.from_pretrained(model, str(folder)).eval()


def on_parameters(model: PreTrainedModel, folder: Path, rank: int, **options: Any) -> PeftModel:
    given = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS, "r": rank, **options}
    return make_peft_adapter(model, folder, **given)


@pytest.mark.slow
def test_experts_of_qwen3_equal_peft(tmp_path: Path) -> None:
    """As one parameter, and as a linear layer for each expert."""
    base = make_base(tmp_path / "base", "qwen3_moe")
    peft = {
        "first": on_parameters(copy.deepcopy(base), tmp_path / "first", 3),
        "second": write_separate_experts(
            copy.deepcopy(base), tmp_path / "second", ("gate_proj", "up_proj", "down_proj"), 5
        ),
    }
    serve(tmp_path, base, peft)


@pytest.mark.slow
def test_experts_of_gpt_oss_equal_peft(tmp_path: Path) -> None:
    """Transposed weights, biases and outputs that alternate; one adapter changes a single parameter, by a pattern."""
    base = make_base(tmp_path / "base", "gpt_oss")
    only_down = {"target_parameters": EXPERTS[1:], "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 3}}
    peft = {
        "first": on_parameters(copy.deepcopy(base), tmp_path / "first", 4),
        "second": on_parameters(copy.deepcopy(base), tmp_path / "second", 4, **only_down),
    }
    serve(tmp_path, base, peft)


@pytest.mark.slow
def test_separate_experts_of_mixtral_equal_peft(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "mixtral")
    peft = {"first": write_separate_experts(copy.deepcopy(base), tmp_path / "first", ("w1", "w3", "w2"), 3)}
    serve(tmp_path, base, peft)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"])
def test_all_linear_as_peft_saves_it_equals_peft(tmp_path: Path, kind: str) -> None:
    """Attention, experts and the router, which PEFT adds for most of these bases; beside an adapter of the router."""
    base = make_base(tmp_path / "base", kind)
    router = "router.weight" if kind == "gpt_oss" else "gate.weight"
    everything = {"target_parameters": ["gate_up_proj", router, "down_proj"]} if kind == "gpt_oss" else {}
    patterns = {"rank_pattern": {r"1\.mlp\.\w+\.weight": 2}, "alpha_pattern": {router: 5}, "use_rslora": True}
    peft = {
        "first": make_peft_adapter(
            copy.deepcopy(base),
            tmp_path / "first",
            r=3,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            **everything,
        ),
        "second": make_peft_adapter(
            copy.deepcopy(base), tmp_path / "second", r=5, target_modules=[], target_parameters=[router], **patterns
        ),
    }
    saved = json.loads((tmp_path / "first/adapter_config.json").read_text())
    assert set(saved["target_parameters"]) == {"gate_up_proj", router, "down_proj"}
    serve(tmp_path, base, peft)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_saved_routers_equal_peft(tmp_path: Path, kind: str) -> None:
    base = make_base(tmp_path / "base", kind)
    router = "router" if kind == "gpt_oss" else "gate"
    peft = make_peft_adapter(
        copy.deepcopy(base), tmp_path / "first", target_modules=["q_proj"], modules_to_save=[router]
    )
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "modules_to_save" in name:
                parameter += torch.randn_like(parameter) * 0.1
    peft.save_pretrained(str(tmp_path / "first"))
    router_only = {"target_modules": [], "target_parameters": [f"{router}.weight"]}
    beside = make_peft_adapter(copy.deepcopy(base), tmp_path / "second", **router_only)
    serve(tmp_path, base, {"first": peft, "second": beside})


@pytest.mark.slow
def test_routers_that_compute_in_fp32_have_adapters_in_bfloat16(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "deepseek_v3")
    lora = {"target_modules": [], "target_parameters": ["gate.weight"], "lora_alpha": 80}
    make_peft_adapter(copy.deepcopy(base), tmp_path / "first", **lora)
    geometry = msgspec.structs.replace(geometry_of(tmp_path / "base", "transformers"), dtype_bytes=2)
    settings = settings_of(tmp_path / "base", memory_bytes=32 * 2**20)
    settings = msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, dtype="bfloat16"))
    prompt = random_ids(20, 0)
    requests = [
        request("first", prompt, reference("first", tmp_path / "first", geometry), 5),
        request("base", prompt, None, 5),
    ]
    together = run(settings, [requests]).tokens
    alone = run(settings, [requests[1:]]).tokens
    assert [token.top for token in together["base"]] == [token.top for token in alone["base"]]
    assert together["first"][0].top != together["base"][0].top


@pytest.mark.slow
@pytest.mark.parametrize("model_impl", ["lorikeet", "transformers"])
def test_parameters_of_linear_layers_and_vocabulary_equal_peft(tmp_path: Path, model_impl: str) -> None:
    base = make_base(tmp_path / "base", "llama", tie_word_embeddings=False)
    linear = ["q_proj.weight", "self_attn.o_proj.weight", "up_proj.weight", "layers.1.mlp.down_proj.weight"]
    vocabulary = ["embed_tokens.weight", "lm_head.weight"]
    peft = {
        "first": make_peft_adapter(
            copy.deepcopy(base),
            tmp_path / "first",
            target_modules=["k_proj"],
            target_parameters=[*linear, *vocabulary],
            rank_pattern={"q_proj.weight": 2, "up_proj": 7},
        ),
        "second": make_peft_adapter(
            copy.deepcopy(base), tmp_path / "second", target_modules=[], target_parameters=linear[:1]
        ),
    }
    serve(tmp_path, base, peft, model_impl)


@pytest.mark.slow
def test_parameters_with_a_row_for_each_input_equal_peft(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "gpt2")
    names = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    peft = {
        "first": make_peft_adapter(
            copy.deepcopy(base), tmp_path / "first", target_modules=[], target_parameters=names, fan_in_fan_out=False
        ),
        "second": make_peft_adapter(copy.deepcopy(base), tmp_path / "second"),
    }
    serve(tmp_path, base, peft)


def serve(folder: Path, base: PreTrainedModel, peft: dict[str, PeftModel], model_impl: str = "transformers") -> None:
    """Compare prompts in chunks, prefixes from the cache and decodes of all adapters and the base in one batch."""
    geometry = geometry_of(folder / "base", model_impl)
    refs = {name: reference(name, folder / name, geometry) for name in peft}
    names = [*peft, "base"]
    waves = [
        [request(f"{name} {length} {i}", random_ids(length, i), refs.get(name), 5) for i in range(2) for name in names]
        for length in (20, 24)
    ]
    outcome = run(settings_of(folder / "base", model_impl, memory_bytes=32 * 2**20, max_num_seqs=8), waves)
    requests = [each for wave in waves for each in wave]
    for name, model in peft.items():
        own = [each for each in requests if each.request_id.startswith(name)]
        assert check(outcome, own, base, model) < 1e-4
    first = next(iter(peft.values()))
    assert check(outcome, [each for each in requests if each.adapter is None], base, first) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target_parameters": ["mlp.router.weight"]}, "target_parameters names 'mlp.router.weight'"),
        ({"target_parameters": ["gate.weight"]}, "lora_A.weight belongs to a module on which LoRA is not supported"),
        ({"target_parameters": [*EXPERTS, "gate.weight"]}, "targets model.layers.0.mlp.gate.weight, but"),
        ({"use_dora": True}, "use_dora is set together with target_parameters, which PEFT does not allow"),
        ({"r": 2}, r"4 experts of rank 2 need \[8, 32\]"),
    ],
)
def test_adapters_that_do_not_fit_the_experts_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    base = make_base(tmp_path / "base", "qwen3_moe")
    on_parameters(base, tmp_path / "adapter", 3)
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(AdapterError, match=reason):
        describe_folder(tmp_path / "adapter", DescribeOptions(geometry_of(tmp_path / "base", "transformers")))
