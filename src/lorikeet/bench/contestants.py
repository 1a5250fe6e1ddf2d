"""What an offline comparison asks of each side."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Prompt = list[int]


class Work(NamedTuple):
    """One batch of requests, all given at once.

    Attributes:
        prompts: token ids, all of the same length.
        adapters: for each prompt the index of its adapter, None for the base model.
        output_tokens: tokens to generate for each, end of text ignored.
    """

    prompts: Sequence[Prompt]
    adapters: Sequence[int | None]
    output_tokens: int


class Outcome(NamedTuple):
    """What one batch took.

    Attributes:
        seconds: from the first request to the last token.
        tokens: of each request.
        decode_tok_s: tokens per second after the moment when every request had its first; None where that moment
            is not known, or nothing came after it.
    """

    seconds: float
    tokens: list[list[int]]
    decode_tok_s: float | None = None


class Contestant(Protocol):
    """Runs batches, one after the other, with all adapters in memory; uses no processor between them."""

    name: str
    versions: dict[str, str]
    """Package → version."""

    def run(self, work: Work) -> Outcome:
        """Run one batch, greedily."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...
