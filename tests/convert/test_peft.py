"""Adapters of other types are converted to LoRA: exactly if they are of low rank, else with the error stated."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel, PeftType
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import CONVERTED_TYPES, REFUSED_TYPES, SERVED_TYPES
from lorikeet.cli.app import app
from lorikeet.convert.peft import convert, low_rank
from lorikeet.models.config import read_model_config
from tests.models.checkpoints import make_checkpoint
from tests.models.library_bases import random_ids
from tests.models.library_runs import log_probabilities
from tests.models.peft_family import CONVERTED, LINEAR, LLAMA_LIKE, lora, make
from tests.models.peft_runs import load
from tests.support import sampling

runner = CliRunner()
TRIED = sorted(CONVERTED) if sampling.runs_all else ["PiSSA", "ROAD", "VERA"]


def test_every_type_of_peft_is_served_converted_or_refused_and_in_the_docs() -> None:
    known = [*SERVED_TYPES, *CONVERTED_TYPES, *REFUSED_TYPES]
    assert sorted(known) == sorted(each.value for each in PeftType)
    tried = {config().peft_type for family in (LLAMA_LIKE, CONVERTED) for config in family.values()}
    assert {*SERVED_TYPES, *CONVERTED_TYPES} == tried
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    rows = page.partition("<!-- types -->")[2].partition("<!-- end of types -->")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\w+)", rows, re.MULTILINE)
    outcomes = {
        **dict.fromkeys(SERVED_TYPES, "served"),
        **dict.fromkeys(CONVERTED_TYPES, "converted"),
        **dict.fromkeys(REFUSED_TYPES, "refused"),
    }
    assert {(name, how) for name, how in listed if how != "initialised"} == set(outcomes.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRIED)
def test_peft_loads_a_converted_adapter(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    folder = tmp_path / "adapter"
    target = tmp_path / "converted"
    make_checkpoint(base, "llama", vocab_size=96)
    make(load(base), folder, CONVERTED[kind]())
    with pytest.raises(AdapterError, match="lorikeet adapters convert"):
        describe_folder(folder, DescribeOptions(read_weights=True))
    found = convert(folder, target, base, 1024, 1e-6)
    assert max(each.error for each in found) <= 1e-6
    described = describe_folder(target, DescribeOptions(read_model_config(base).geometry(4), read_weights=True))
    assert not described.warnings
    ids = random_ids(11, 1)
    expected = log_probabilities(PeftModel.from_pretrained(load(base), folder).eval(), ids, adapted=True)
    again = log_probabilities(PeftModel.from_pretrained(load(base), target).eval(), ids, adapted=True)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def save_word_tokenizer(base: Path) -> None:
    """Save a tokenizer whose words ``w0`` to ``w94`` are the tokens of these numbers."""
    words = {f"w{number}": number for number in range(95)} | {"?": 95}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(str(base))


@pytest.fixture(scope="module")
def word_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base with a tokenizer."""
    base = tmp_path_factory.mktemp("words") / "base"
    make_checkpoint(base, "llama", vocab_size=96)
    save_word_tokenizer(base)
    return base


@pytest.mark.parametrize("prompt", ["w3 w5 w9 w7 w8 w2", "w3 w5 w9 w2"])
def test_the_commands_apply_an_alora_from_its_invocation_on(prompt: str, word_base: Path, tmp_path: Path) -> None:
    peft = make(
        load(word_base),
        tmp_path / "alora",
        lora(target_modules=LINEAR, alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM"),
    )
    arguments = ["--check", "--base", str(word_base), "--prompt", prompt, "--tokens", "4"]
    done = runner.invoke(app, ["adapters", "inspect", str(tmp_path / "alora"), *arguments])
    assert done.exit_code == 0, done.output
    assert "check: 4 tokens equal PEFT's" in done.output
    ids = [int(word[1:]) for word in prompt.split()]
    for _ in range(4):
        ids.append(int(peft(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    command = ["generate", prompt, "--model", word_base, "--adapter", tmp_path / "alora", "--dtype", "float32", "--raw"]
    done = runner.invoke(app, [*map(str, command), "--max-tokens", "4"])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [f"w{token}" for token in ids[-4:]]


@pytest.mark.slow
def test_the_commands_convert_and_compare_an_answer_with_peft(tmp_path: Path) -> None:
    base = tmp_path / "base"
    folder = tmp_path / "adapter"
    target = tmp_path / "converted"
    make_checkpoint(base, "llama", vocab_size=96)
    save_word_tokenizer(base)
    make(load(base), folder, CONVERTED["LOKR"]())
    done = runner.invoke(app, ["adapters", "convert", str(folder), str(target), "--base", str(base)])
    assert done.exit_code == 0, done.output
    assert "LoRA of rank" in done.output
    arguments = ["--check", "--base", str(base), "--prompt", "w3 w5 w9", "--tokens", "4"]
    done = runner.invoke(app, ["adapters", "inspect", str(target), *arguments])
    assert done.exit_code == 0, done.output
    assert "check: 4 tokens equal PEFT's" in done.output


def test_too_small_a_rank_is_refused_with_its_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "llama", vocab_size=96)
    make(load(tmp_path / "base"), tmp_path / "adapter", CONVERTED["LOHA"]())
    with pytest.raises(AdapterError, match=r"at rank 1 the error is 0\.\d+ of the change, above the tolerance of 0.01"):
        convert(tmp_path / "adapter", tmp_path / "converted", tmp_path / "base", 1, 0.01)
    assert not (tmp_path / "converted").exists()


def test_the_error_is_the_norm_of_the_difference() -> None:
    torch.manual_seed(0)
    delta = torch.randn(20, 30)
    for rank in (1, 7, 20):
        a, b, error, _ = low_rank(delta, rank, 0.0)
        assert len(a) == rank
        assert float((delta - b @ a).norm() / delta.norm()) == pytest.approx(error, abs=1e-5)
    a, _, error, _ = low_rank(delta, 20, 0.3)
    assert error <= 0.3 < low_rank(delta, len(a) - 1, 0.0)[2]


def test_a_rank_that_needs_more_than_the_weight_is_refused_with_the_errors_of_smaller_ones() -> None:
    torch.manual_seed(0)
    delta = torch.randn(60, 60)
    with pytest.raises(
        ValueError, match=r"needs rank \d+, where .* \(errors at smaller ranks: 0\.\d+ at 8, 0\.\d+ at 16"
    ):
        low_rank(delta, 0, 0.01)
    assert len(low_rank(delta, 60, 0.01)[0]) > 30


@pytest.mark.parametrize("rank", [0, 12])
def test_a_random_projection_equals_the_whole_decomposition(rank: int) -> None:
    torch.manual_seed(0)
    decay = 2.0 ** -torch.arange(200.0)
    left, right = (torch.linalg.qr(torch.randn(size, 200)).Q for size in (320, 240))
    delta = left * decay @ right.T
    a, b, error, at = low_rank(delta, rank, 1e-3)
    values = torch.linalg.svdvals(delta.double())
    share = (values.square().flip(0).cumsum(0).flip(0).sqrt() / values.norm()).tolist()
    assert len(a) == next(size for size in range(200) if share[size] <= 1e-3)
    assert error == pytest.approx(share[len(a)], rel=0.02)
    assert float((delta - b @ a).norm() / delta.norm()) == pytest.approx(error, rel=0.02)
    assert at == {8: pytest.approx(share[8], rel=0.02)}
