"""Adapters of every kind that PEFT saves, all in one batch, give the tokens of transformers with PEFT.

Some kinds over two tiny bases run by default; with ``--all`` all kinds, over a third one and the default base too.
"""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from peft import PeftModel

from lorikeet.adapters.store import reference
from lorikeet.config import Settings
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.request import Request
from lorikeet.kernels.backends import choose_kernels
from lorikeet.models.config import read_model_config
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model
from tests.models.checkpoints import make_checkpoint
from tests.models.library_bases import make_base, random_ids
from tests.models.library_runs import MAX_MODEL_LEN, log_probabilities, request, run, settings_of
from tests.models.peft_family import GPT2_LIKE, LLAMA_LIKE, SAMPLE, make
from tests.models.peft_runs import load
from tests.support import sampling

TOKENS = 8


class Family(NamedTuple):
    """The adapters over a base: what each was asked, what it answered, and PEFT's model of it."""

    requests: Sequence[Request]
    answers: Sequence[list[int]]
    pefts: Sequence[PeftModel]


def serve(
    folder: Path,
    base: Path,
    geometry: ModelGeometry,
    kinds: dict[str, Any],
    implementation: str,
    memory_bytes: int = 0,
) -> Family:
    """Make an adapter of each kind, and answer a prompt with each, all in one batch."""
    pefts = []
    requests = []
    long = random_ids(37, 1)
    for number, (name, config) in enumerate(kinds.items()):
        place = folder / name.replace(" ", "-")
        pefts.append(make(load(base), place, config()))
        prompt = long if number % 2 else long[:9]
        requests.append(request(f"r{number}", prompt, reference(place.name, place, geometry), TOKENS))
    # Not for all adapters at once, so that some are evicted and loaded again.
    blocks = 2 * MAX_MODEL_LEN // 4 + 160
    settings = settings_of(base, memory_bytes=memory_bytes or blocks * geometry.block_bytes(4))
    found = run(_by(settings, implementation), [requests])
    return Family(requests, [[t.token_id for t in found.tokens[r.request_id]] for r in requests], pefts)


def _by(settings: Settings, implementation: str) -> Settings:
    model = msgspec.structs.replace(settings.model, model_impl=implementation)
    return msgspec.structs.replace(settings, model=model)


def expected(peft: PeftModel, asked: Request) -> list[int]:
    """Return the tokens that PEFT's model chooses."""
    token_ids = list(asked.prompt_token_ids)
    for _ in range(TOKENS):
        token_ids.append(int(log_probabilities(peft, token_ids, adapted=True)[-1].argmax()))
    return token_ids[len(asked.prompt_token_ids) :]


def check(family: Family, kinds: dict[str, Any]) -> None:
    wrong = {
        name: (answer, by_peft)
        for name, asked, answer, peft in zip(kinds, *family, strict=True)
        if answer != (by_peft := expected(peft, asked))
    }
    assert not wrong


def kinds_of(every: dict[str, Any]) -> dict[str, Any]:
    return every if sampling.runs_all else {name: every[name] for name in SAMPLE}


@pytest.mark.slow
def test_every_kind_answers_as_peft_over_the_own_decoder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_checkpoint(base, "qwen3-biases", vocab_size=96)
    kinds = kinds_of(LLAMA_LIKE)
    check(serve(tmp_path, base, read_model_config(base).geometry(4), kinds, "auto"), kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every"), [("gpt2", GPT2_LIKE), *([("gemma3_text", LLAMA_LIKE)] if sampling.runs_all else [])]
)
def test_every_kind_answers_as_peft_over_the_modules_of_transformers(
    kind: str, every: dict[str, Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    make_base(base, kind)
    kernels = choose_kernels("auto", torch.float32, torch.device("cpu"))
    loaded = load_model(base, torch.float32, torch.device("cpu"))
    geometry = TransformersDecoder(loaded, kernels, MAX_MODEL_LEN).geometry
    kinds = every if sampling.runs_all else dict(list(every.items())[1::3])
    try:
        check(serve(tmp_path, base, geometry, kinds, "transformers"), kinds)
    finally:
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("sample", [SAMPLE] if sampling.runs_all else [SAMPLE[:2]])
def test_every_kind_answers_as_peft_over_the_default_base(
    tmp_path: Path, default_model_cache: Path, sample: Sequence[str]
) -> None:
    base = default_model_cache / "SmolLM2-135M-Instruct"
    geometry = read_model_config(base).geometry(4)
    kinds = {name: LLAMA_LIKE[name] for name in sample}
    check(serve(tmp_path, base, geometry, kinds, "auto", memory_bytes=2**31), kinds)
