"""The same chats twice, the second time with something going wrong: every token must come, once, and be the same."""

from collections.abc import Sequence
from typing import Any

from benchmarks.accept.streams import Stream

TIE = 1e-4
_SAME_LOGPROB = 1e-3
_TOPICS = ("birds", "the sea", "old trains", "bread", "mountains", "music", "a lost key", "rain", "chess", "the moon")


def chat_body(model: str, index: int, tokens: int) -> dict[str, Any]:
    """Return a greedy chat whose answer has exactly so many tokens, each with its log probability."""
    topic = f"Tell me about {_TOPICS[index % len(_TOPICS)]}, number {index}."
    return {
        "model": model,
        "messages": [{"role": "user", "content": topic}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }


def what_is_wrong(stream: Stream, tokens: int) -> str:
    """Return what is wrong with a stream, empty for nothing; every token must have been shown exactly once."""
    shown = "" if len(stream.tokens) == tokens else f"{len(stream.tokens)} tokens shown of {tokens}"
    return stream.problem(tokens) or shown


def compare(calm: Sequence[Stream], disturbed: Sequence[Stream]) -> tuple[int, int]:
    """Return how many streams differ, and how many part ways at a tie (what follows a tie cannot be compared)."""
    differing = ties = 0
    for before, after in zip(calm, disturbed, strict=True):
        pairs = zip(before.tokens, after.tokens, before.gaps, strict=False)
        for (text, logprob), (other_text, other_logprob), gap in pairs:
            if text != other_text or abs(logprob - other_logprob) > _SAME_LOGPROB:
                ties += gap < TIE
                differing += gap >= TIE
                break
        else:
            differing += len(before.tokens) != len(after.tokens)
    return differing, ties
