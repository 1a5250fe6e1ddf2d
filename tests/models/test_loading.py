"""Weights are loaded completely or refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet.models.config import read_model_config
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.loading import WeightError, load_weights
from lorikeet.models.weights import DecoderWeights
from tests.models.checkpoints import make_checkpoint


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> DecoderWeights:  # type: ignore[no-untyped-def]
    """Load the checkpoint in ``folder``."""
    return load_weights(folder, read_model_config(folder), dtype, **options)


def assert_equal(one: DecoderWeights, other: DecoderWeights) -> None:
    """Fail unless all tensors are equal."""
    assert torch.equal(one.embedding, other.embedding)
    assert torch.equal(one.final_norm, other.final_norm)
    assert torch.equal(one.lm_head, other.lm_head)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name, tensor in vars(mine).items():
            assert (tensor is None) == (vars(theirs)[name] is None)
            assert tensor is None or torch.equal(tensor, vars(theirs)[name]), name


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of ``model.safetensors``; ``__`` in a name stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_shards_give_the_weights_of_a_single_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "single", "llama")
    make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    assert_equal(load(tmp_path / "sharded"), load(tmp_path / "single"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_dtypes_are_converted_to_the_requested_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    model.to(dtype).save_pretrained(tmp_path)
    weights = load(tmp_path, torch.float32)
    assert weights.layers[0].qkv.dtype == torch.float32
    assert torch.equal(weights.layers[1].down, model.model.layers[1].mlp.down_proj.weight.float())


def test_the_ranks_shares_put_together_are_the_whole(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama-biases")
    whole = load(tmp_path).layers[2]
    shares = [load(tmp_path, rank=rank, tensor_parallel=2).layers[2] for rank in (0, 1)]
    assert torch.equal(torch.cat([share.o for share in shares], dim=1), whole.o)
    assert torch.equal(torch.cat([share.down for share in shares], dim=1), whole.down)
    gates, ups = zip(*(share.gate_up.chunk(2) for share in shares), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), whole.gate_up)
    assert shares[0].o_bias is not None
    assert shares[1].o_bias is None


def test_tied_embeddings_are_one_tensor_even_if_the_file_repeats_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama-tied")
    change_tensors(tmp_path, lm_head__weight=load(tmp_path).embedding)
    weights = load(tmp_path)
    assert weights.lm_head is weights.embedding


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    """Transformers would use it, and warn; others would use the embedding."""
    make_checkpoint(tmp_path, "llama-tied")
    head = load(tmp_path).embedding.clone()
    head[3, 5] += 1
    change_tensors(tmp_path, lm_head__weight=head)
    with pytest.raises(
        WeightError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings"
    ):
        load(tmp_path)


def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    change_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(6))
    load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("model__norm__weight", None, r"model\.norm\.weight is missing"),
        ("model__layers__0__self_attn__q_proj__bias", torch.zeros(48), r"q_proj\.bias is not part of the model"),
        (
            "model__layers__3__mlp__up_proj__weight",
            torch.zeros(80, 48),
            r"layers\.3\.mlp\.up_proj\.weight is not part of the model",
        ),
        ("lm_head__weight", torch.zeros(96, 48), r"lm_head\.weight has shape \[96, 48\], not \[97, 48\]"),
        ("lm_head__weight", torch.zeros(97, 48, dtype=torch.int8), r"lm_head\.weight has dtype I8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, tensor: torch.Tensor | None, complaint: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    change_tensors(tmp_path, **{name: tensor})
    with pytest.raises(WeightError, match=complaint):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="50KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-\d+\.safetensors"):
        load(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    settings = json.loads(index.read_text())
    settings["weight_map"]["lm_head.weight"] = "../other.safetensors"
    index.write_text(json.dumps(settings))
    with pytest.raises(WeightError, match=r"'\.\./other\.safetensors' is not a file of the folder"):
        load(tmp_path)


def test_pickle_checkpoints_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin: pickle files are not loaded"):
        load(tmp_path)


def test_the_error_of_a_folder_without_weights_names_the_expected_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_dummy_weights_need_no_files_and_follow_the_seed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-biases")
    (tmp_path / "model.safetensors").unlink()
    weights = load(tmp_path, load_format="dummy", seed=1)
    assert_equal(load(tmp_path, load_format="dummy", seed=1), weights)
    assert not torch.equal(load(tmp_path, load_format="dummy", seed=2).embedding, weights.embedding)
    share = load(tmp_path, load_format="dummy", seed=1, rank=1, tensor_parallel=2)
    assert torch.equal(share.layers[0].o, weights.layers[0].o[:, 32:])


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    heard: list[tuple[str, int, int]] = []
    load(tmp_path, progress=lambda stage, done, total: heard.append((stage, done, total)))
    tensors = 3 + 9 * 3
    assert [done for _, done, _ in heard] == list(range(tensors + 1))
    assert {total for *_, total in heard} == {tensors}


def test_sizes_that_do_not_divide_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ModelConfigError, match="4 attention heads cannot be split over 3"):
        load(tmp_path, rank=0, tensor_parallel=3)
    with pytest.raises(WeightError, match="load format 'pt'"):
        load(tmp_path, load_format="pt")
