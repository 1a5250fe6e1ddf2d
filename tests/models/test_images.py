"""Models that see answer as transformers and PEFT do, with images in one batch, in chunks, and from the cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lorikeet.adapters.store import reference
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.request import Request
from tests.models.library_bases import VOCABULARY
from tests.models.library_runs import (
    Outcome,
    geometry_of,
    linear_layers,
    make_peft_adapter,
    request,
    run,
    settings_of,
)
from tests.models.vision_bases import IMAGE, KINDS, Seen, make_vision_base, marks, prompt_with

OWN: tuple[str, ...] = ()
"""Kinds whose language model our decoder runs."""


def asked(name: str, seen: Seen, adapter: AdapterRef | None, tokens: int) -> Request:
    """A greedy request with images, which does not answer by placeholders."""
    made = request(name, seen.token_ids, adapter, tokens, logit_bias=((IMAGE, -100.0),))
    return msgspec.structs.replace(made, images=seen.images)


def expected(model: PeftModel, seen: Seen, token_ids: list[int], *, adapted: bool) -> Tensor:
    """What transformers computes in one pass, ``[tokens, vocabulary]``."""
    ids = torch.tensor([token_ids])
    given: dict[str, Any] = {**seen.given, **marks(model.base_model.model, ids, len(seen.token_ids))}
    model.base_model.model.model.rope_deltas = None
    with torch.inference_mode():
        if adapted:
            return model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)
        with model.disable_adapter():
            return model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)


def worst(outcome: Outcome, asks: Sequence[tuple[Request, Seen]], model: PeftModel) -> float:
    """The largest difference of a log probability, relative to large ones."""
    found = 0.0
    for each, seen in asks:
        answer = outcome.tokens[each.request_id]
        assert len(answer) == each.sampling.max_tokens
        token_ids = [*seen.token_ids, *(token.token_id for token in answer)]
        wanted = expected(model, seen, token_ids, adapted=each.adapter is not None)
        for position, token in enumerate(answer, start=len(seen.token_ids) - 1):
            values = torch.full((VOCABULARY,), torch.nan)
            for token_id, logprob in token.top:
                values[token_id] = logprob
            difference = (values - wanted[position]) / (1 + 0.1 * wanted[position].abs())
            found = max(found, float(difference.abs().max()))
    return found


def language_layers(model: PreTrainedModel) -> list[str]:
    return [name for name, _ in linear_layers(model) if "language_model" in name or "text_model.layers" in name]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_prompts_with_images_are_answered_as_by_transformers(tmp_path: Path, kind: str) -> None:
    """Several images, an adapter and the base in one batch, in chunks of 16 tokens; then prefixes from the cache."""
    base = make_vision_base(tmp_path / "base", kind)
    peft = make_peft_adapter(base, tmp_path / "adapter", target_modules=language_layers(base))
    impl = "lorikeet" if kind in OWN else "transformers"
    geometry = geometry_of(tmp_path / "base", impl)
    ref = reference("a", tmp_path / "adapter", geometry)
    prompts = [prompt_with(base, kind, numbers, 7) for numbers in ((0, 1), (1,), (2, 0), ())]
    asks = [
        (asked(f"{number}{adapter is None}", seen, adapter, 4), seen)
        for number, seen in enumerate(prompts)
        for adapter in (None, ref)
    ]
    again = [
        (asked(f"again{number}{adapter is None}", seen, adapter, 3), seen)
        for number, seen in enumerate(prompts)
        for adapter in (None, ref)
    ]
    largest = max(len(seen.token_ids) for seen in prompts)
    tokens = largest if kind == "paligemma" else 20 if kind in ("llava_next", "llava_onevision") else 16
    settings = settings_of(tmp_path / "base", impl, max_num_batched_tokens=tokens)
    outcome = run(settings, [[each for each, _ in asks], [each for each, _ in again]])
    assert worst(outcome, asks + again, peft) < 1e-4
    assert outcome.cached_tokens > 0
