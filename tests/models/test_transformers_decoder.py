"""A probe finds the needs of a model of transformers; unsupported models are refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorikeet.adapters.checkpoint import AdapterChecks, DescribeOptions, ServedBase, describe_folder
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import reference
from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.geometry import KvShape, ReplaceableWeights
from lorikeet.core.request import Request, RequestId, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.kernels.interface import RotaryPairs
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import read_model_config, wants_own_decoder
from lorikeet.models.default import NAME
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.models.transformers_attention import Mask, UnsupportedAttention, window_of
from lorikeet.models.transformers_decoder import TransformersDecoder, _check_batch, load_model
from lorikeet.models.transformers_modules import AdaptedLinear, replaceable_weights
from lorikeet.worker.rank_setup import load_rank
from tests.models.checkpoints import make_checkpoint
from tests.models.library_bases import make_base
from tests.models.library_runs import make_peft_adapter

CPU = torch.device("cpu")


def decoder(folder: Path, kind: str, **overrides: Any) -> TransformersDecoder:
    make_base(folder, kind, **overrides)
    return TransformersDecoder(load_model(folder, torch.float32, CPU), ReferenceKernels(), 128)


def test_a_window_is_found_by_evaluating_the_mask() -> None:
    assert window_of(Mask(lambda b, h, q, k: k <= q), 1000) is None
    assert window_of(Mask(lambda b, h, q, k: (k <= q) & (k > q - 7)), 1000) == 7
    assert window_of(Mask(lambda b, h, q, k: (k <= q) & (k > q - 700)), 1000) == 700
    for mask in (
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
        lambda b, h, q, k: torch.zeros(3)[q] <= k,
    ):
        with pytest.raises(UnsupportedAttention, match="its mask"):
            window_of(Mask(mask), 1000)


def test_a_mask_in_chunks_is_causal_within_one_chunk() -> None:
    mask = Mask(lambda b, h, q, k: (k <= q) & (k // 512 == q // 512))
    assert window_of(mask, 512) is None
    with pytest.raises(UnsupportedAttention, match="lower max_model_len"):
        window_of(mask, 1024)


def test_layers_that_share_keys_store_none_and_shapes_may_differ(tmp_path: Path) -> None:
    """Gemma 4: two layers of six use the keys of others; full layers have heads of another size."""
    geometry = decoder(tmp_path, "gemma4_text").geometry
    assert geometry.layers == 6
    assert len(geometry.kv_layers) == 4
    assert len({shape.key_dim for shape in geometry.kv_layers}) == 2
    assert all(isinstance(shape, KvShape) for shape in geometry.kv_layers)
    assert geometry.kv_elements_per_token() == sum(shape.elements for shape in geometry.kv_layers)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("musicgen", "its input is not a row of tokens"), ("gemma4_unified_assistant", "shared_kv_states cannot be None")],
)
def test_unsupported_models_are_refused(tmp_path: Path, kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedAttention, match=reason):
        decoder(tmp_path, kind)


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("llama", {RotaryPairs(8)}),
        ("glm4", {RotaryPairs(4, are_neighbours=True)}),
        ("diffllama", {None}),  # attends twice by the same queries
        ("gpt2", {None}),  # does not rotate
    ],
)
def test_a_kernel_rotates_where_it_would_do_the_same(tmp_path: Path, kind: str, pairs: set[RotaryPairs | None]) -> None:
    """The model is compared with transformers' own attention when it is loaded."""
    assert {call.pairs for call in decoder(tmp_path, kind)._calls} == pairs


def test_projections_of_the_same_input_in_a_list_are_several_layers(tmp_path: Path) -> None:
    """Gemma 3n has three such beside its layers. Each has its own adapter, so they are not computed as one."""
    make_base(tmp_path, "gemma3n_text")
    model = load_model(tmp_path, torch.float32, CPU)
    projections = model.get_submodule("model.altup_projections")
    TransformersDecoder(model, ReferenceKernels(), 128)
    computed = [projection.forward for projection in projections.children()]
    assert [type(each) for each in computed] == [AdaptedLinear] * 3


def test_the_own_decoder_is_chosen_where_it_supports_the_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "llama", "llama")
    make_base(tmp_path / "starcoder2", "starcoder2")
    assert wants_own_decoder(tmp_path / "llama", "auto")
    assert not wants_own_decoder(tmp_path / "llama", "transformers")
    assert not wants_own_decoder(tmp_path / "starcoder2", "auto")
    with pytest.raises(ModelConfigError, match="architectures: \\['Starcoder2ForCausalLM'\\] is not one of"):
        wants_own_decoder(tmp_path / "starcoder2", "lorikeet")
    make_checkpoint(tmp_path / "gelu", "llama", hidden_act="gelu")
    assert not wants_own_decoder(tmp_path / "gelu", "auto")


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe"])
def test_any_base_is_quantised_on_load(tmp_path: Path, kind: str) -> None:
    """Conv1D; experts. What the decoder computes is compared with the dequantised weights when it is made."""
    make_base(tmp_path, kind)
    plain = settings(tmp_path)
    wanted = settings(tmp_path, quantization="int8")
    one, other = (load_rank(each, tmp_path, SingleRankGroup()) for each in (plain, wanted))
    assert other.weights == "int8 in groups of 32, quantised from float32"
    assert one.weights == "float32"
    ids = torch.arange(3, 9)
    logits = []
    for each in (one, other):
        arena = torch.zeros(4, each.geometry.block_elements(4))
        kv = each.decoder.view_kv(arena, 4)
        logits.append(each.decoder.forward(_check_batch(ids, [(0, 6, [1, 2])], 4), kv))
    change = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 1e-4 < change < 0.2
    with pytest.raises(ValueError, match=r"quantization: fp8 is not what .* has: it is not quantised"):
        load_rank(settings(tmp_path, quantization="fp8"), tmp_path, SingleRankGroup())


def settings(folder: Path, model_impl: str = "auto", quantization: str = "auto", **engine: Any) -> Settings:
    small = {"block_size": 4, "memory_bytes": 32 * 2**20, "host_memory_bytes": 0, "threads": 1, **engine}
    model = ModelSettings(
        str(folder), dtype="float32", model_impl=model_impl, max_model_len=64, quantization=quantization
    )
    return Settings(model, EngineSettings(**small), AdapterSettings())


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    make_base(tmp_path, "starcoder2")
    with pytest.raises(ModelConfigError, match="Starcoder2ForCausalLM runs by transformers' modules, which are not"):
        load_rank(settings(tmp_path, tensor_parallel=2), tmp_path, SingleRankGroup())


def test_a_merging_preset_runs_unmerged_with_a_note(tmp_path: Path) -> None:
    make_base(tmp_path, "starcoder2")
    replica = build_replica(settings(tmp_path, preset="dlora"))
    replica.engine.close()
    assert replica.notes[0] == "Starcoder2ForCausalLM runs by transformers 5.23.0, in float32"
    assert any("none is merged" in note for note in replica.notes)


def test_the_hidden_size_is_that_of_the_output_layer(tmp_path: Path) -> None:
    """OPT may project its embeddings to larger hidden states, and these back before the output layer."""
    geometry = decoder(tmp_path, "opt", word_embed_proj_dim=16).geometry
    assert geometry.hidden_size == 16
    assert geometry.modules["layers.{}.self_attn.q_proj"].in_features == 32
    assert geometry.replaceable is not None
    assert (geometry.replaceable.embedding, geometry.replaceable.head) == ("embed_tokens", "lm_head")


def test_an_embedding_of_another_size_than_hidden_states_cannot_be_replaced() -> None:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(10, 4)
    model.norm = torch.nn.LayerNorm(6)
    model.head = torch.nn.Linear(6, 10, bias=False)
    model.get_input_embeddings = lambda: model.embed
    model.get_output_embeddings = lambda: model.head
    vectors = {"norm.weight": 6, "norm.bias": 6}
    assert replaceable_weights(model, "", [model.norm], 6) == ReplaceableWeights("", "", 0, vectors)
    assert replaceable_weights(model, "", [model.norm], 4) == ReplaceableWeights("embed", "head", 10, vectors)


@pytest.mark.parametrize("spelled", ["parts", "whole"])
def test_fused_and_split_names_mean_the_same(tmp_path: Path, spelled: str) -> None:
    """Phi-3 has fused layers, Llama split ones; an adapter may use either spelling with either."""
    kind = "phi3" if spelled == "parts" else "llama"
    geometry = decoder(tmp_path / "base", kind).geometry
    q = "layers.{}.self_attn.q_proj"
    k = "layers.{}.self_attn.k_proj"
    other = make_base(tmp_path / "other", "llama" if kind == "phi3" else "phi3")
    names = ["q_proj", "k_proj", "v_proj"] if spelled == "parts" else ["qkv_proj"]
    make_peft_adapter(other, tmp_path / "adapter", target_modules=names)
    found = describe_folder(tmp_path / "adapter", DescribeOptions(geometry))
    assert {each.module for each in found.modules} == {q, k, "layers.{}.self_attn.v_proj"}
    by_place = {(each.layer, each.module): each for each in found.modules}
    if spelled == "whole":
        assert by_place[0, q].a == by_place[0, k].a
        assert by_place[0, q].b.stop == by_place[0, k].b.start
    assert by_place[0, k].b.shape == (geometry.modules[k].out_features, 4)


def test_the_base_that_an_adapter_names_is_compared(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    geometry = read_model_config(tmp_path / "base").geometry(4)
    base.config._name_or_path = "someone/Other-7B"
    base.name_or_path = "someone/Other-7B"
    make_peft_adapter(base, tmp_path / "adapter", revision="f" * 40)
    folder = tmp_path / "adapter"

    def warnings(*names: str, **options: Any) -> tuple[str, ...]:
        return describe_folder(
            folder, DescribeOptions(geometry, AdapterChecks(base=ServedBase(names, **options)))
        ).warnings

    (warning,) = warnings("Base-7B")
    assert warning.startswith(
        "adapter_config.json: base_model_name_or_path is 'someone/Other-7B', but the base model served is 'Base-7B'"
    )
    assert warnings("Base-7B", "another/other-7b") == ()
    assert warnings("/models/Other-7B/") == ()
    with pytest.raises(AdapterError, match=r"someone/Other-7B.*--base-alias"):
        warnings("Base-7B", is_strict=True)
    config = folder / "adapter_config.json"
    kept = config.read_text()
    config.write_text(kept.replace('"r": 4', '"r": 3'))
    with pytest.raises(AdapterError, match=r"rank 4; .* 3; .*'someone/Other-7B', but .* is 'Base-7B'$"):
        warnings("Base-7B")
    config.write_text(kept)
    (warning,) = warnings("someone/Other-7B", revision="e" * 40)
    assert warning == f"adapter_config.json: revision is {'f' * 40}, but that of the base model served is {'e' * 40}"


@pytest.mark.long
@pytest.mark.slow
def test_the_default_model_answers_as_by_the_own_decoder(default_model_cache: Path) -> None:
    """Greedily in fp32, with a sample adapter beside the base."""
    adapter = Path(__file__).parents[2] / "examples/adapters/pirate"
    adapter = adapter if adapter.is_dir() else next((Path(__file__).parents[2] / "examples/adapters").iterdir())
    answers = []
    for model_impl in ("lorikeet", "transformers"):
        replica = build_replica(settings(default_model_cache / NAME, model_impl, memory_bytes=128 * 2**20))
        ref = reference("sample", adapter, replica.sizes.geometry)
        tokens: dict[str, list[int]] = {}
        for i in range(4):
            prompt = [1, *range(500 + 40 * i, 520 + 40 * i)]
            sampling = SamplingParams(max_tokens=12, temperature=0.0)
            replica.engine.submit(Request(RequestId(str(i)), prompt, sampling, 0.0, ref if i % 2 else None))
        while replica.engine.has_requests or replica.engine.is_busy:
            for output in replica.engine.step().tokens:
                tokens.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
            if not replica.engine.is_busy:
                replica.engine.wait_for_transfer(1.0)
        replica.engine.close()
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]["0"]) == 12


def test_tokens_are_refused_where_a_tied_output_layer_has_a_bias(tmp_path: Path) -> None:
    """PEFT changes the rows of both; such an output layer cannot be changed."""
    base = make_base(tmp_path / "base", "roberta")
    make_peft_adapter(base, tmp_path / "adapter", target_modules=["query"], trainable_token_indices=[5, 9])
    geometry = decoder(tmp_path / "again", "roberta").geometry
    with pytest.raises(AdapterError, match="trainable_tokens_delta"):
        reference("adapter", tmp_path / "adapter", geometry)
