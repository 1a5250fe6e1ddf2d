"""Log probabilities in the two shapes that OpenAI's API has."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.plan import Token
from lorikeet.server.texts import Texts

_LOWEST = -9999.0
"""JSON knows no infinity; this is what vLLM sends in its place."""


def chat_logprobs(texts: Texts, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion."""
    content = []
    for token in tokens:
        entry = _entry(texts, token.token_id, token.logprob)
        content.append(entry | {"top_logprobs": [_entry(texts, *pair) for pair in token.top]})
    return {"content": content}


def completion_logprobs(texts: Texts, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a completion; ``offset`` is where the first token's text begins."""
    strings = [texts.token(token.token_id).text for token in tokens]
    offsets = []
    for string in strings:
        offsets.append(offset)
        offset += len(string)
    return {
        "tokens": strings,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(texts, token, string) for token, string in zip(tokens, strings, strict=True)],
        "text_offset": offsets,
    }


def _top(texts: Texts, token: Token, string: str) -> dict[str, float]:
    """The chosen token is among them even if it is not one of the likeliest, as in vLLM."""
    top = {string: _finite(token.logprob)}
    for token_id, logprob in token.top:
        top.setdefault(texts.token(token_id).text, _finite(logprob))
    return top


def _entry(texts: Texts, token_id: int, logprob: float | None) -> dict[str, Any]:
    token = texts.token(token_id)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": token.utf8}


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None else max(logprob, _LOWEST)
