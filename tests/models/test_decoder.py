"""The decoder gives the logits of transformers for any division of the work into steps."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import SingleRankGroup
from tests.models.arenas import Arena
from tests.models.checkpoints import SIZES, VARIANTS, make_checkpoint, oracle_logits
from tests.support.recording_kernels import RecordingKernels

TOLERANCE = 1e-4


def tokens(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator).tolist()


def decoder_and_arena(folder: Path) -> tuple[Decoder, Arena]:
    """Return a decoder of the checkpoint and an empty arena for it."""
    config = read_model_config(folder)
    weights = load_weights(folder, config, torch.float32)
    decoder = Decoder(config, weights, ReferenceKernels(), SingleRankGroup())
    return decoder, Arena.make(config, decoder)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Fail if logits differ by more than the bound."""
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers_in_prefill_chunks_and_decode(variant: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, variant)
    decoder, arena = decoder_and_arena(tmp_path)
    prompt = tokens(30, seed=1)
    expected = oracle_logits(model, prompt)

    whole = decoder.forward(arena.batch([("whole", prompt)]), arena.kv)
    assert_close(whole, expected)

    cuts = [0, 7, 8, 19, *range(20, 31)]
    parts = [prompt[a:b] for a, b in pairwise(cuts)]
    stepped = [decoder.forward(arena.batch([("stepped", part)]), arena.kv) for part in parts]
    assert_close(torch.cat(stepped), expected)


def test_an_embedding_for_long_sequences_is_that_of_the_longest_ones(tmp_path: Path) -> None:
    """Phi-3's; transformers takes the factors that belong to the length of a sequence."""
    model = make_checkpoint(tmp_path, "phi3-longrope")
    config = read_model_config(tmp_path)
    prompt = tokens(70, seed=1)
    for longest_tokens, length in ((64, 60), (65, 70)):
        chosen = config.for_lengths(longest_tokens)
        decoder = Decoder(chosen, load_weights(tmp_path, chosen, torch.float32), ReferenceKernels(), SingleRankGroup())
        arena = Arena.make(chosen, decoder)
        logits = decoder.forward(arena.batch([("a", prompt[:length])]), arena.kv)
        assert_close(logits, oracle_logits(model, prompt[:length]))


@pytest.mark.parametrize("variant", ["llama-tied", "mistral-window", "qwen3", "qwen3-5"])
def test_sequences_in_all_phases_share_a_step_without_touching_each_other(variant: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, variant)
    decoder, arena = decoder_and_arena(tmp_path)
    prompts = {name: tokens(length, seed=length) for name, length in {"a": 18, "b": 5, "c": 23, "d": 9}.items()}
    taken = dict.fromkeys(prompts, 0)
    collected: dict[str, list[Tensor]] = {name: [] for name in prompts}
    # Each line is a step: a prefill, decodes of different lengths, chunks with and without context, a new sequence.
    for step in ({"a": 16}, {"b": 4, "a": 1, "c": 9}, {"a": 1, "b": 1, "c": 13}, {"d": 9, "c": 1}):
        work = [(name, prompts[name][taken[name] : taken[name] + count]) for name, count in step.items()]
        logits = decoder.forward(arena.batch(work), arena.kv)
        for (name, part), rows in zip(work, logits.split([len(part) for _, part in work]), strict=True):
            collected[name].append(rows)
            taken[name] += len(part)
    assert taken == {name: len(prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        assert_close(torch.cat(collected[name]), oracle_logits(model, prompt))


def test_logits_are_given_for_the_sample_rows_alone_and_in_the_weights_dtype(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16)
    decoder = Decoder(config, weights, ReferenceKernels(), SingleRankGroup())
    arena = Arena.make(config, decoder)
    batch = arena.batch([("a", tokens(6, seed=2)), ("b", tokens(5, seed=3))])
    kv = arena.kv.bfloat16()
    every = decoder.forward(batch, kv)
    chosen = decoder.forward(replace(batch, sample_rows=torch.tensor([10, 5])), kv)
    assert every.dtype == chosen.dtype == torch.bfloat16
    torch.testing.assert_close(chosen, every[[10, 5]], atol=0.1, rtol=0.01)


def test_a_batch_without_adapters_makes_no_adapter_call(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    config = read_model_config(tmp_path)
    kernels = RecordingKernels(ReferenceKernels())
    decoder = Decoder(config, load_weights(tmp_path, config, torch.float32), kernels, SingleRankGroup())
    arena = Arena.make(config, decoder)
    decoder.forward(arena.batch([("a", tokens(6, seed=2))]), arena.kv)
    names = [call[0] for call in kernels.calls]
    layer = ["add_norm", "linear", "rotary_store", "attention", "linear"]
    mlp = ["add_norm", "linear", "silu_mul", "linear"]
    assert names == (layer + mlp) * config.layers + ["add_norm", "logits"]
