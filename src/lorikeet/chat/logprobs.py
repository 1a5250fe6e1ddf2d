"""Writes the tokens and log probabilities of answers in the forms of OpenAI and vLLM."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from lorikeet.chat.text_processor import TextProcessor
from lorikeet.core.plan import PromptToken, Token

_MIN_LOGPROB = -9999.0
"""Value for minus infinity, which JSON lacks, as in vLLM."""


class TokenNames:
    """Names tokens by their text, or by their ids as vLLM does.

    Args:
        text_processor: the model's text processor.
        as_ids: whether names have the form ``token_id:ID``.
    """

    def __init__(self, text_processor: TextProcessor, *, as_ids: bool = False) -> None:
        self.text_processor = text_processor
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        return _by_id(token_id) if self._as_ids else self.text_processor.token(token_id).text

    def entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        """Return a token as an entry of a chat completion's log probabilities."""
        return {
            "token": self.name(token_id),
            "logprob": _finite(logprob),
            "bytes": self.text_processor.token(token_id).utf8,
        }


def chat_logprobs(names: TokenNames, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion."""
    content = []
    for token in tokens:
        entry = names.entry(token.token_id, token.logprob)
        content.append(entry | {"top_logprobs": [names.entry(*pair) for pair in token.top]})
    return {"content": content}


class TextOffsets:
    """Counts the offsets of tokens in an answer's text; the parts of a character have its offset.

    Args:
        text_processor: the model's text processor.
        skip_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(self, text_processor: TextProcessor, *, skip_special_tokens: bool) -> None:
        self._text_processor = text_processor
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token_id: int, *, is_shown: bool = False) -> int:
        """Return the offset of the next token; ``is_shown`` for a special token that stays in the text."""
        begin = self._offset
        if is_shown or not (self._skip_special_tokens and self._text_processor.is_special(token_id)):
            self._offset += len(self._decoder.decode(bytes(self._text_processor.token(token_id).utf8)))
        return begin


def completion_logprobs(
    names: TokenNames, tokens: Sequence[Token], offsets: TextOffsets, *, echoed: int = 0
) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a completion.

    Args:
        names: names the tokens.
        tokens: tokens of the answer, after the tokens of an echoed prompt, whose first token has no log probability.
        offsets: counts the offsets from the first token on.
        echoed: number of tokens that belong to the prompt.
    """
    return {
        "tokens": [names.name(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _top(names, token) for token in tokens],
        "text_offset": [offsets.add(token.token_id, is_shown=at < echoed) for at, token in enumerate(tokens)],
    }


def echoed_tokens(token_ids: Sequence[int], scored: Mapping[int, PromptToken]) -> list[Token]:
    """Return the tokens of a prompt with their log probabilities, which the first token lacks."""
    tokens = [Token(token_id) for token_id in token_ids[:1]]
    for position in range(1, len(token_ids)):
        found = scored[position]
        tokens.append(Token(found.token_id, found.logprob, found.top))
    return tokens


def prompt_logprobs(
    names: TokenNames, token_ids: Sequence[int], scored: Mapping[int, PromptToken]
) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: null for the first token; for others the token and the likeliest, by id."""
    entries: list[dict[str, Any] | None] = [None]
    for position in range(1, len(token_ids)):
        token = scored[position]
        ranked = [(token.token_id, token.logprob, token.rank)]
        ranked += [(*pair, rank) for rank, pair in enumerate(token.top, start=1) if pair[0] != token.token_id]
        entries.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": names.text_processor.token(token_id).text,
                }
                for token_id, logprob, rank in ranked
            }
        )
    return entries


def _top(names: TokenNames, token: Token) -> dict[str, float]:
    """Return the log probabilities of the likeliest tokens and the chosen one, by name, as in vLLM.

    Tokens of the same text, such as a letter and its byte, get vLLM's other name for a token.
    """
    top = {names.name(token.token_id): _finite(token.logprob)}
    for token_id, logprob in token.top:
        if token_id != token.token_id:
            name = names.name(token_id)
            top[_by_id(token_id) if name in top else name] = _finite(logprob)
    return top


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float | None) -> float:
    return _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)
