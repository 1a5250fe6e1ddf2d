"""Tensors besides A and B are recognised by their names, and must fit the base and the config."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lorikeet.adapters.checkpoint import AdapterChecks, DescribeOptions, describe_folder
from lorikeet.adapters.errors import AdapterError
from lorikeet.core.geometry import ModelGeometry, ReplaceableWeights
from tests.adapters.builders import HIDDEN, LAYERS, Tensors, geometry, key, lora_tensors, write_adapter

VOCABULARY = 24
BASE = msgspec.structs.replace(
    geometry(),
    replaceable=ReplaceableWeights("embed_tokens", "lm_head", VOCABULARY, {"norm.weight": HIDDEN}),
    hidden_size=HIDDEN,
)
EMBEDDING = "base_model.model.model.embed_tokens"
MAGNITUDES = {
    key(layer, module, "A").replace("lora_A.weight", "lora_magnitude_vector"): (BASE.modules[module].out_features,)
    for layer in range(LAYERS)
    for module in ("q", "v")
}


def with_ones(**shapes: tuple[int, ...]) -> Tensors:
    return {**lora_tensors(), **{name: np.ones(shape, np.float32) for name, shape in shapes.items()}}


def test_a_dora_has_magnitudes_factors_and_summands(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, with_ones(**MAGNITUDES), use_dora=True)
    found = describe_folder(folder, DescribeOptions(BASE, read_weights=True))
    extras = {(each.kind, each.module): each for each in found.extras_of(BASE)}
    assert extras.keys() == {(kind, module) for kind in ("magnitude", "scale", "shift") for module in ("q", "v")}
    assert extras["scale", "q"].rows == (1,) * LAYERS
    assert extras["scale", "q"].columns == HIDDEN
    plain = describe_folder(write_adapter(tmp_path / "plain"), DescribeOptions(BASE, read_weights=True))
    assert found.digest != plain.digest
    assert not plain.extras


@pytest.mark.parametrize(
    ("shapes", "config", "reason"),
    [
        (MAGNITUDES, {}, "a magnitude for model.layers.0.self_attn.q_proj, which adapter_config.json does not"),
        (dict(list(MAGNITUDES.items())[1:]), {"use_dora": True}, "no magnitude for model.layers.0.self_attn.q_proj"),
        ({**MAGNITUDES, next(iter(MAGNITUDES)): (7,)}, {"use_dora": True}, r"has shape \[7\]; the base model needs"),
        ({"base_model.model.model.norm.weight": (HIDDEN,)}, {}, "a whole weight of model.norm"),
        ({"base_model.model.model.norm.weight": (9,)}, {"modules_to_save": ["norm"]}, r"norm.weight has shape \[9\]"),
        ({"base_model.model.v_head.weight": (2, HIDDEN)}, {"modules_to_save": ["v_head"]}, "v_head.weight belongs to"),
        ({}, {"modules_to_save": ["norm"]}, "modules_to_save names 'norm'"),
        ({}, {"target_modules": ["q_proj", "v_proj", "lm_head"]}, "targets lm_head, but"),
        ({}, {"trainable_token_indices": [3]}, "has no trained tokens"),
        (
            {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (2, HIDDEN)},
            {"trainable_token_indices": [3]},
            "has 2 rows; adapter_config.json names 1",
        ),
        (
            {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (1, HIDDEN)},
            {"trainable_token_indices": [VOCABULARY]},
            f"tokens beyond the {VOCABULARY}",
        ),
        ({f"{EMBEDDING}.lora_embedding_A": (4, VOCABULARY)}, {}, "only one of lora_embedding_A and _B"),
        ({"base_model.model.model.layers.9.self_attn.q_proj.bias": (HIDDEN,)}, {"bias": "all"}, "it has 3"),
    ],
)  # fmt: skip
def test_extras_that_do_not_fit_the_base_are_refused(
    shapes: dict[str, tuple[int, ...]], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, with_ones(**shapes), **config)
    with pytest.raises(AdapterError, match=reason):
        describe_folder(folder, DescribeOptions(BASE))


@pytest.mark.parametrize("base", [BASE, None])
def test_ia3_on_an_input_of_several_products_is_refused_with_and_without_a_base(
    base: ModelGeometry | None, tmp_path: Path
) -> None:
    tensors = {"base_model.model.model.layers.0.mlp.gate_proj.ia3_l": np.ones((1, HIDDEN), np.float32)}
    modules = {"target_modules": ["gate_proj"], "feedforward_modules": ["gate_proj"]}
    folder = write_adapter(tmp_path, tensors, peft_type="IA3", **modules)
    with pytest.raises(AdapterError, match="scales the input of a product with others: convert it"):
        describe_folder(folder, DescribeOptions(base))


def test_a_server_of_low_rank_matrices_reports_why(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, with_ones(**MAGNITUDES), use_dora=True)
    with pytest.raises(AdapterError, match="magnitude of q, magnitude of v: merges adapters"):
        describe_folder(folder, DescribeOptions(BASE, AdapterChecks(only_low_rank="merges adapters")))


def test_tensor_parallel_ranks_take_vectors_but_no_whole_linear_layers(tmp_path: Path) -> None:
    options = DescribeOptions(BASE, AdapterChecks(only_vectors="ranks do not split these"))
    describe_folder(write_adapter(tmp_path / "dora", with_ones(**MAGNITUDES), use_dora=True), options)
    whole = with_ones(**{"base_model.model.model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN)})
    folder = write_adapter(tmp_path / "whole", whole, modules_to_save=["o_proj"])
    with pytest.raises(AdapterError, match="weight of o: ranks do not split these"):
        describe_folder(folder, options)


def test_a_saved_base_embedding_with_lora_on_it_is_ignored(tmp_path: Path) -> None:
    lora = {f"{EMBEDDING}.lora_embedding_A": (4, VOCABULARY), f"{EMBEDDING}.lora_embedding_B": (HIDDEN, 4)}
    same = with_ones(**lora, **{f"{EMBEDDING}.base_layer.weight": (VOCABULARY, HIDDEN)})
    resized = {f"{EMBEDDING}.lora_embedding_A": (4, VOCABULARY + 1), f"{EMBEDDING}.lora_embedding_B": (HIDDEN, 4)}
    other = with_ones(**resized, **{f"{EMBEDDING}.base_layer.weight": (VOCABULARY + 1, HIDDEN)})
    targets = {"target_modules": ["q_proj", "v_proj", "embed_tokens"]}
    found = describe_folder(write_adapter(tmp_path / "same", same, **targets), DescribeOptions(BASE))
    assert {(each.kind, each.rows) for each in found.extras} == {("a", VOCABULARY), ("b", 4)}
    found = describe_folder(write_adapter(tmp_path / "other", other, **targets), DescribeOptions(BASE))
    assert ("weight", VOCABULARY) in {(each.kind, each.rows) for each in found.extras}
    assert "those from 24 on are not used" in found.warnings[0]


@pytest.mark.parametrize("tokens", [[3, VOCABULARY], [VOCABULARY, VOCABULARY + 1], {"embed_tokens": [2, VOCABULARY]}])
def test_trained_tokens_of_a_resized_vocabulary_are_those_of_the_base(tokens: Any, tmp_path: Path) -> None:
    head = EMBEDDING.replace("model.embed_tokens", "lm_head")
    shapes = {}
    for name in (EMBEDDING, head):  # PEFT saves both of a tied base, and may name the embedding alone.
        shapes[f"{name}.token_adapter.base_layer.weight"] = (VOCABULARY + 2, HIDDEN)
        shapes[f"{name}.token_adapter.trainable_tokens_delta"] = (2, HIDDEN)
    folder = write_adapter(tmp_path, with_ones(**shapes), trainable_token_indices=tokens)
    found = describe_folder(folder, DescribeOptions(BASE))
    below = tuple(
        token for token in (tokens if isinstance(tokens, list) else tokens["embed_tokens"]) if token < VOCABULARY
    )
    assert [each.tokens for each in found.extras if each.kind == "rows"] == ([below, below] if below else [])
    assert [each.rows for each in found.extras if each.kind == "weight"] == [VOCABULARY, VOCABULARY]
    assert sum("tokens that are not used" in warning for warning in found.warnings) == 2


def test_trained_tokens_of_the_base_behind_others_are_refused(tmp_path: Path) -> None:
    shapes = {
        f"{EMBEDDING}.token_adapter.base_layer.weight": (VOCABULARY + 2, HIDDEN),
        f"{EMBEDDING}.token_adapter.trainable_tokens_delta": (2, HIDDEN),
    }
    folder = write_adapter(tmp_path, with_ones(**shapes), trainable_token_indices=[VOCABULARY, 3])
    with pytest.raises(AdapterError, match="has tokens of the base model after others, which it lacks: it has 24"):
        describe_folder(folder, DescribeOptions(BASE))


def test_an_untrained_copy_is_left_out_and_alone_refused(tmp_path: Path) -> None:
    copy = f"{EMBEDDING}.original_module.weight"
    saved = {f"{EMBEDDING}.{ending}": (VOCABULARY + 1, HIDDEN) for ending in ("weight", "modules_to_save.weight")}
    both = with_ones(**saved, **{copy: (VOCABULARY + 1, HIDDEN)})
    options = {"modules_to_save": ["embed_tokens"]}
    found = describe_folder(write_adapter(tmp_path / "both", both, **options), DescribeOptions(BASE))
    assert [(each.kind, each.entry.name) for each in found.extras if each.entry] == [("weight", f"{EMBEDDING}.weight")]
    alone = write_adapter(tmp_path / "alone", with_ones(**{copy: (VOCABULARY, HIDDEN)}), **options)
    with pytest.raises(AdapterError, match="is an untrained copy of a module; the file lacks the trained one"):
        describe_folder(alone, DescribeOptions(BASE))
