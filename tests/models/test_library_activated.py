"""aLoRA on bases of transformers' modules: an adapter that acts from its invocation on, in every way of attention.

Through the whole engine: prompts in chunks, prefixes and states from the base's cache, decode steps beside each other.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import reference
from lorikeet.adapters.task import AdapterTask
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.request import Request
from tests.models.library_bases import VOCABULARY, make_base, random_ids
from tests.models.library_runs import geometry_of, linear_layers, make_peft_adapter, request, run, settings_of
from tests.support import sampling

INVOCATION = [7, 11]
SAMPLE = ("doge", "openai-gpt", "qwen3_5_text")
"""Linear layers of cached values; no cache; a gated delta rule."""
KINDS = (*SAMPLE, "bamba", "bart", "gpt2", "roberta", "stablelm") if sampling.runs_all else SAMPLE
"""A state space; one sequence at a time; Conv1D; positions that the model counts; attention that cannot be replaced."""


def invoked(name: str, prompt: list[int], adapter: AdapterRef) -> Request:
    """The request as the server makes it."""
    start = AdapterTask(invocation_token_ids=tuple(INVOCATION)).start(prompt)
    return msgspec.structs.replace(request(name, prompt, adapter, 4), adapter_start=start)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_acts_from_its_invocation_on(kind: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", kind)
    targets = [name for name, _ in linear_layers(base) if not name.endswith("out_proj") or kind != "bamba"]
    options = {"alora_invocation_tokens": INVOCATION, "task_type": "CAUSAL_LM", "target_modules": targets}
    peft = make_peft_adapter(base, tmp_path / "adapter", **options)
    adapter = reference("adapter", tmp_path / "adapter", geometry_of(tmp_path / "base", "transformers"))
    document = random_ids(21, 1)
    waves = [
        [request("base", document, None, 4), invoked("alone", [3, *INVOCATION, *random_ids(22, 2)], adapter)],
        [invoked("after", [*document, *INVOCATION, 5], adapter), invoked("at once", [*INVOCATION, 9], adapter)],
        [invoked("again", [*document, *INVOCATION, 5, *random_ids(6, 3)], adapter)],
    ]
    found = run(settings_of(tmp_path / "base", memory_bytes=2**24), waves)
    assert found.cached_tokens >= 20
    for each in [each for wave in waves for each in wave]:
        tokens = found.tokens[each.request_id]
        expected = by_peft(peft, each, [token.token_id for token in tokens])
        for token, logprobs in zip(tokens, expected, strict=True):
            for token_id, logprob in token.top:
                assert abs(logprob - float(logprobs[token_id])) < 1e-4, each.request_id


def by_peft(peft: PeftModel, asked: Request, answer: list[int]) -> torch.Tensor:
    """Return the log probabilities of an answer's tokens, ``[tokens, vocabulary]``."""
    ids = torch.tensor([[*asked.prompt_token_ids, *answer]])
    with torch.inference_mode():
        if asked.adapter is None:
            with peft.disable_adapter():
                logits = peft.get_base_model()(input_ids=ids, use_cache=False).logits
        else:
            logits = peft(input_ids=ids, use_cache=False).logits
    assert logits.shape[-1] == VOCABULARY
    return logits[0, len(asked.prompt_token_ids) - 1 : -1].log_softmax(-1)


def test_it_is_refused_where_all_tokens_of_a_sequence_have_one_adapter(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "xlnet")
    make_peft_adapter(base, tmp_path / "adapter", alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM")
    with pytest.raises(AdapterError, match="alora_invocation_tokens: adapters of this base act on all tokens"):
        reference("adapter", tmp_path / "adapter", geometry_of(tmp_path / "base", "transformers"))
