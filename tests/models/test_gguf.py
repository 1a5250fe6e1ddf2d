"""GGUF files are read like by the gguf library, and like by transformers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GgufConfig, PreTrainedModel

from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.default import find_gguf, prepare_default_model
from lorikeet.models.gguf import GGUF_FILE, gguf_config, read_gguf, transformers_names
from lorikeet.models.gguf_folder import prepare_gguf
from lorikeet.models.gguf_weights import decode_gguf
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.loading import WeightError, load_weights
from lorikeet.models.parallel import SingleRankGroup
from lorikeet.models.weights import DecoderWeights
from tests.models.arenas import Arena
from tests.models.checkpoints import make_checkpoint, oracle_logits
from tests.models.gguf_files import SCALES, random_blocks, write_model, write_tensors

PACKED = {
    Type.Q4_0: (4, 32),
    Type.Q4_1: (4, 32),
    Type.Q5_0: (8, 32),
    Type.Q5_1: (8, 32),
    Type.Q8_0: (8, 32),
    Type.Q4_K: (4, 32),
    Type.Q5_K: (8, 32),
    Type.Q6_K: (8, 16),
}
"""Types that stay packed: bits and inputs of a group."""


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_blocks_mean_the_numbers_of_the_library(kind: Type, tmp_path: Path) -> None:
    blocks = random_blocks(kind, (5, 512), seed=1, largest=3.0)
    file = read_gguf(write_tensors(tmp_path / "x.gguf", {"blk.0.x.weight": (kind, blocks)}))
    found = decode_gguf(file, "blk.0.x.weight")
    assert isinstance(found, QuantizedWeight) is (kind in PACKED)
    if isinstance(found, QuantizedWeight):
        assert (found.bits, found.group) == PACKED[kind]
        found = found.dequantized(torch.float32)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_unquantised_types_are_read(kind: Type, tmp_path: Path) -> None:
    stored = gguf.quants.quantize(np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32), kind)
    file = read_gguf(write_tensors(tmp_path / "x.gguf", {"blk.0.x.weight": (kind, stored)}))
    assert np.array_equal(decode_gguf(file, "blk.0.x.weight").numpy(), gguf.quants.dequantize(stored, kind))


def folder_of(path: Path) -> Path:
    """Return a folder from which the file is served."""
    folder = path.parent / path.stem
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(gguf_config(read_gguf(path))))
    (folder / GGUF_FILE).symlink_to(path)
    return folder


def by_transformers(path: Path) -> PreTrainedModel:
    """Return transformers' model of a file."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


def logits_of(config: ModelConfig, weights: DecoderWeights, tokens: list[int]) -> torch.Tensor:
    """Return the own decoder's logits ``[T, vocab]`` of one sequence."""
    decoder = Decoder(config, weights, ReferenceKernels(), SingleRankGroup())
    arena = Arena.make(config, decoder)
    return decoder.forward(arena.batch([("one", tokens)]), arena.kv)


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama-tied": ("llama-tied", "llama", {}),
    "qwen2": ("qwen2", "qwen2", {"qwen2.rope.freq_base": 1e6}),
    "qwen3": ("qwen3", "qwen3", {}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    variant, architecture, metadata = MODELS[name]
    path = tmp_path / "model.gguf"
    sizes = {**SIZES, "head_dim": 128} if name == "qwen3" else SIZES  # transformers takes any Qwen 3's heads for 128
    write_model(path, make_checkpoint(tmp_path / "made", variant, **sizes), architecture, **metadata)
    folder = folder_of(path)
    config = read_model_config(folder)
    weights = load_weights(folder, config, torch.float32)
    assert weights.are_quantized
    assert weights.stored.startswith("GGUF Q4_0, GGUF Q4_1, GGUF Q4_K, GGUF Q5_K, GGUF Q6_K, GGUF Q8_0")
    tokens = [5, 3, 90, 17, 1, 44, 60, 2, 8, 71]
    wanted = oracle_logits(by_transformers(path), tokens)
    torch.testing.assert_close(logits_of(config, weights, tokens), wanted, rtol=1e-4, atol=1e-4)
    plain = load_weights(folder, config, torch.float32, quantization="none")
    torch.testing.assert_close(logits_of(config, plain, tokens), logits_of(config, weights, tokens), rtol=0, atol=0)


def test_the_ranks_shares_put_together_are_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, make_checkpoint(tmp_path / "made", "llama", **SIZES), "llama")
    folder = folder_of(path)
    config = read_model_config(folder)
    whole = load_weights(folder, config, torch.float32).layers[1]
    shares = [load_weights(folder, config, torch.float32, rank=rank, tensor_parallel=4).layers[1] for rank in range(4)]
    for product in ("o", "down"):
        parts = [getattr(share, product).dequantized(torch.float32) for share in shares]
        assert torch.equal(torch.cat(parts, dim=1), getattr(whole, product).dequantized(torch.float32))


@pytest.mark.slow
def test_gemma_3_names_and_norms_equal_transformers(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, sliding_window=16, max_position_embeddings=128, query_pre_attn_scalar=64,
    )  # fmt: skip
    torch.manual_seed(1)
    path = tmp_path / "gemma.gguf"
    made = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    window = {"gemma3.attention.sliding_window": 16, "gemma3.rope.freq_base": 1e6}
    write_model(path, made, "gemma3", **window)
    theirs = by_transformers(path)
    file = read_gguf(path)
    names = transformers_names(file)
    stored = theirs.state_dict()
    assert names.keys() == stored.keys() - {"lm_head.weight"}
    for name, in_file in names.items():
        found = decode_gguf(file, in_file)
        found = found.dequantized(torch.float32) if isinstance(found, QuantizedWeight) else found
        torch.testing.assert_close(found, stored[name], rtol=0, atol=1e-6)
    settings = gguf_config(file)
    assert settings["architectures"] == ["Gemma3ForCausalLM"]
    for key, value in settings.items():
        if key in ("vocab_size", "hidden_size", "head_dim", "layer_types", "sliding_window", "rms_norm_eps"):
            assert value == getattr(config, key), key


def test_scalings_by_metadata(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "made", "llama", **SIZES)
    factor = {"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 32}
    for kind, wanted in (
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    ):
        path = write_model(tmp_path / "x.gguf", model, "llama", **factor, **{"llama.rope.scaling.type": kind})
        assert gguf_config(read_gguf(path))["rope_scaling"] == wanted
    path = write_model(tmp_path / "x.gguf", model, "llama", **factor, **{"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ModelConfigError, match=r"rope\.scaling\.type: 'longrope' is not supported"):
        gguf_config(read_gguf(path))


def test_llama_3s_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "made", "llama", **SIZES)
    path = write_model(tmp_path / "model.gguf", model, "llama")
    file = read_gguf(path)
    rotations = 8192 / (2 * np.pi * 10_000.0 ** (2 * np.arange(32) / 64))
    kept = np.clip((rotations - 1) / 3, 0, 1)
    divisors = (1 / ((1 - kept) / 8 + kept)).astype(np.float32)
    tensors = {
        "token_embd.weight": (Type.F32, np.zeros((97, 256), np.float32)),
        "rope_freqs.weight": (Type.F32, divisors),
    }
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("GGUF")}
    scaled = read_gguf(write_tensors(tmp_path / "scaled.gguf", tensors, metadata))
    assert gguf_config(scaled)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors["rope_freqs.weight"] = (Type.F32, divisors[::-1].copy())
    with pytest.raises(ModelConfigError, match=r"rope_freqs\.weight: only the scaling of Llama 3"):
        gguf_config(read_gguf(write_tensors(tmp_path / "other.gguf", tensors, metadata)))


@pytest.mark.long
@pytest.mark.slow
def test_the_default_models_file_has_the_config_and_tokenizer_of_the_converted_model(
    default_model_cache: Path, tmp_path: Path
) -> None:
    converted = prepare_default_model(default_model_cache)
    told = []
    folder = prepare_gguf(find_gguf(), tmp_path, None, told.append)
    assert told == ["converting the tokenizer of SmolLM2-135M-Instruct.Q4_1.gguf (once)"]
    assert read_model_config(folder) == read_model_config(converted)
    one, other = (json.loads((each / "tokenizer.json").read_text()) for each in (folder, converted))
    assert one == other
    template = "chat_template.jinja"
    assert (folder / template).read_text() == (converted / template).read_text()


def test_broken_files_are_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "made", "llama", **SIZES)
    path = write_model(tmp_path / "model.gguf", model, "llama")
    content = path.read_bytes()
    for broken, complaint in (
        (b"GGML" + content[4:], "is not a GGUF file"),
        (content[:4] + b"\1" + content[5:], "version 1 is not supported"),
        (content[:300], "is cut off"),
        (content[:-1000], "is cut off inside of tensor"),
        (b"", "cannot be read"),
    ):
        other = tmp_path / "broken.gguf"
        other.write_bytes(broken)
        with pytest.raises(ModelConfigError, match=f"broken.gguf: .*{complaint}"):
            read_gguf(other)
    with pytest.raises(ModelConfigError, match=r"general.architecture: 'mamba' is not supported"):
        gguf_config(read_gguf(write_tensors(tmp_path / "mamba.gguf", {}, {"general.architecture": "mamba"})))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "made", "llama", **SIZES)
    folder = folder_of(write_model(tmp_path / "model.gguf", model, "llama"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))
    with pytest.raises(WeightError, match=r"model.gguf: model.layers.2.input_layernorm.weight.* missing"):
        load_weights(folder, read_model_config(folder), torch.float32)
