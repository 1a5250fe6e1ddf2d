"""What an offline comparison asks of each side."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Prompt = list[int]


class Work(NamedTuple):
    """One batch of requests, all given at once.

    Attributes:
        prompts: token ids, all of the same length.
        adapters: for each prompt the index of its adapter.
        output_tokens: tokens to generate for each, end of text ignored.
    """

    prompts: Sequence[Prompt]
    adapters: Sequence[int]
    output_tokens: int


class Outcome(NamedTuple):
    """Time from the first request to the last token, and the tokens of each request."""

    seconds: float
    tokens: list[list[int]]


class Contestant(Protocol):
    """Runs batches, one after the other, with all adapters in memory."""

    name: str

    def run(self, work: Work) -> Outcome:
        """Run one batch, greedily."""
        ...
