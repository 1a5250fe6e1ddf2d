"""Serves the routes of other servers: names their fields in errors, and collects whole answers."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from lorikeet.core.plan import Token
from lorikeet.http.errors import ApiError
from lorikeet.serving.generation import ActiveChoice, Generation, OutputDelta


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors within the context to a dialect's names.

    Args:
        words: the dialect's name of each field of a completion.
    """
    try:
        yield
    except ApiError as error:
        # "prompt" is also an English word, so the text gets new names only for names with an underscore.
        said = re.sub(r"\b\w+_\w+\b", lambda found: words.get(found[0], found[0]), error.message)
        param = None if error.param is None else words.get(error.param, error.param)
        raise ApiError(error.status, said, param=param, type=error.type, headers=error.headers) from error


@dataclass
class Answer:
    """Collects the deltas of one choice.

    Attributes:
        choice: the running or finished choice.
        text: the generated text.
        tokens: the generated tokens.
        finish_reason, stop_reason: the last delta's reasons.
    """

    choice: ActiveChoice
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Add a delta's text and tokens."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.choice.handle.request.prompt_token_ids


async def whole_answers(generation: Generation) -> list[Answer]:
    """Wait for all choices, close the generation and return them.

    Raises:
        ApiError: the generation failed; see ``Generation.deltas``.
    """
    answers = [Answer(choice) for choice in generation.choices]
    async for delta in generation.deltas():
        answers[delta.index].add(delta)
    generation.close()  # Closing it now frees the request's place before a slow client has read all.
    return answers
