"""Checks an adapter for ``lorikeet adapters inspect --check``: compares greedy answers of the engine and of PEFT."""

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import adapted, reference
from lorikeet.cli.local_engine import GenerationError, run_alone
from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.convert.peft import load_base, quiet, with_adapter
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica


class Comparison(NamedTuple):
    """The greedy answers of engine and PEFT to one prompt.

    Attributes:
        own, by_peft: tokens of the engine's and PEFT's answer.
        logprob_difference: largest difference between the log probabilities of a token that both chose.
    """

    own: list[int]
    by_peft: list[int]
    logprob_difference: float


def compare(folder: Path, base: Path, prompt: str, tokens: int) -> Comparison:
    """Answer a prompt greedily in fp32, with the engine and with PEFT.

    Args:
        folder: the adapter's folder.
        base: the folder of the base model.
        prompt: text to continue, without a chat template.
        tokens: number of tokens to compute.

    Raises:
        AdapterError: the adapter cannot be served, PEFT cannot load it, or the request fails.
    """
    by_peft: list[int] = []
    difference = 0.0
    with quiet():
        token_ids = AutoTokenizer.from_pretrained(base, local_files_only=True)(prompt)["input_ids"]
        own, logprobs = _own_answer(folder, base, token_ids, tokens)
    with quiet(), torch.inference_mode():
        model = with_adapter(load_base(base), folder)
        for token, logprob in zip(own, logprobs, strict=True):
            ids = torch.tensor([[*token_ids, *by_peft]])
            expected = model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
            by_peft.append(int(expected.argmax()))
            if by_peft[-1] != token:
                break
            difference = max(difference, abs(logprob - float(expected[token])))
    return Comparison(own, by_peft, difference)


def _own_answer(folder: Path, base: Path, token_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
    model = ModelSettings(str(base), dtype="float32", max_model_len=len(token_ids) + tokens)
    replica = build_replica(Settings(model, EngineSettings(host_memory_bytes=0), AdapterSettings()))
    engine = replica.engine
    try:
        ref = reference(folder.name, folder, replica.sizes.geometry, "float32")
        adapter, start = adapted(ref, replica.sizes.geometry, token_ids)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=1)
        now_s = MonotonicClock().now()
        request = Request(RequestId("check"), token_ids, sampling, now_s, adapter, adapter_start=start)
        answer = list(run_alone(engine, request))
    except GenerationError as error:
        raise AdapterError(str(error)) from error
    finally:
        engine.close()
    return [token.token_id for token in answer], [dict(token.top)[token.token_id] for token in answer]
