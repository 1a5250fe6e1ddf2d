"""Compares the weights that a server answers with with a live PEFT model, by their log probabilities.

torch and PEFT are those of the caller, who has the model; this module imports torch when it is called.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

_PROMPTS = 2
_PROMPT_TOKENS = 48
_TIMEOUT_S = 600.0


class ServerDiffers(Exception):
    """The server refuses the comparison; the message is the server's."""


class ServedComparison(NamedTuple):
    """The differences between a model and a server, in nats.

    Attributes:
        difference: largest difference of the log probability of a token, between the model and the server.
        base_difference: the same between the model without its adapter and the server; 0 if the server answers as
            the base in the same arithmetic. None for a model without adapters.
        fingerprint: the server's ``system_fingerprint``.
        tokens: number of compared tokens.
    """

    difference: float
    base_difference: float | None
    fingerprint: str
    tokens: int

    def is_same(self, tolerance: float = 1e-3) -> bool:
        """Return whether the server has the model's weights.

        Args:
            tolerance: the largest difference of the same weights: 1e-3 is ample in fp32, and 0.3 in bf16.
        """
        is_nearer = self.base_difference is None or self.difference <= self.base_difference
        return self.difference <= tolerance and is_nearer


def compare_with_server(
    model: Any,
    name: str,
    url: str = "http://127.0.0.1:8000",
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    api_key: str | None = None,
    expect_digest: str | None = None,
) -> ServedComparison:
    """Score prompts by a live model and by the adapter that a server has, and compare each token.

    Args:
        model: a causal language model of transformers, or PEFT's model around one, with its active adapter. Its mode
            and gradients stay as they are.
        name: the adapter's name at the server.
        url: address of the server.
        prompts: token ids of the texts that are scored; None for random ones, which tell weights apart well.
        api_key: key for the server.
        expect_digest: digest that the server's version must have.

    Raises:
        ServerDiffers: the server does not answer, has no such adapter, or has another digest than expected.
    """
    import torch

    config: Any = model.config
    if prompts is None:
        generator = torch.Generator().manual_seed(0)
        shape = (_PROMPTS, _PROMPT_TOKENS)
        prompts = torch.randint(config.vocab_size, shape, generator=generator).tolist()
    served, fingerprint = _served(url, api_key, name, prompts, expect_digest)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            difference = _largest(served, [_scores(model, prompt) for prompt in prompts])
            base_difference = None
            if hasattr(model, "disable_adapter"):
                with model.disable_adapter():
                    base_difference = _largest(served, [_scores(model, prompt) for prompt in prompts])
    finally:
        model.train(was_training)
    return ServedComparison(difference, base_difference, fingerprint, sum(map(len, served)))


def _scores(model: Any, prompt: Sequence[int]) -> list[float]:
    """Return the log probability of each token of a prompt but the first."""
    import torch

    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    scores: list[float] = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return scores


def _largest(served: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> float:
    pairs = zip(served, own, strict=True)
    return max(abs(one - other) for each in pairs for one, other in zip(*each, strict=True))


def _served(
    url: str, api_key: str | None, name: str, prompts: Sequence[Sequence[int]], expect_digest: str | None
) -> tuple[list[list[float]], str]:
    """Return the server's log probabilities of the same tokens, and its fingerprint."""
    body = {
        "model": name,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": 0,
        "prompt_logprobs": 0,
        "expect_digest": expect_digest,
    }
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    asked = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        raise ServerDiffers(f"{error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise ServerDiffers(f"{url}: {error}") from error
    scored = [
        [_of(entry, token) for entry, token in zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)]
        for choice, prompt in zip(answer["choices"], prompts, strict=True)
    ]
    return scored, str(answer["system_fingerprint"])


def _of(entry: dict[str, Any], token: int) -> float:
    return float(entry[str(token)]["logprob"])
