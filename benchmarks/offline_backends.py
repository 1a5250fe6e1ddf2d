"""Defines the interface of a backend in an offline benchmark.

A backend runs a batch of requests and returns its timings.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Prompt = list[int]


class OfflineBatch(NamedTuple):
    """Holds one batch of requests, all submitted at the start.

    Attributes:
        prompts: token ids, all of the same length.
        adapters: index of each prompt's adapter; None for the base model.
        output_tokens: number of tokens to generate for each prompt. The end of text is ignored.
    """

    prompts: Sequence[Prompt]
    adapters: Sequence[int | None]
    output_tokens: int


class OfflineResult(NamedTuple):
    """Holds the result of one batch.

    Attributes:
        seconds: seconds from the first request to the last token.
        tokens: generated tokens of each request.
        decode_tok_s: tokens per second after every request had its first token. None if that time is unknown, or no
            token came after it.
    """

    seconds: float
    tokens: list[list[int]]
    decode_tok_s: float | None = None


class OfflineBackend(Protocol):
    """Runs batches one after the other, with all adapters in memory. A backend uses no CPU between batches."""

    name: str
    versions: dict[str, str]
    """Versions by package name."""

    def run(self, work: OfflineBatch) -> OfflineResult:
        """Run one batch with greedy sampling."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class BaseModelBackend:
    """Runs the same prompts without their adapters.

    Args:
        inner: a backend that was loaded without adapters.
    """

    def __init__(self, inner: OfflineBackend) -> None:
        self._inner = inner
        self.name = f"{inner.name}-base"
        self.versions = inner.versions

    def run(self, work: OfflineBatch) -> OfflineResult:
        """Run one batch on the base model."""
        return self._inner.run(work._replace(adapters=[None] * len(work.prompts)))

    def close(self) -> None:
        """Close the inner backend."""
        self._inner.close()
