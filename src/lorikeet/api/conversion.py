"""What the dialects share: errors that name their own fields, and answers that are read whole."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from lorikeet.core.plan import Token
from lorikeet.http.errors import ApiError
from lorikeet.serving.generation import ActiveChoice, Generation, OutputDelta


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Let errors within the context name fields as a dialect does.

    Args:
        words: names of fields of a completion, and the dialect's names of them.
    """
    try:
        yield
    except ApiError as error:
        # "prompt" is also a word of English, so only names with an underscore are replaced in the text.
        said = re.sub(r"\b\w+_\w+\b", lambda found: words.get(found[0], found[0]), error.message)
        param = None if error.param is None else words.get(error.param, error.param)
        raise ApiError(error.status, said, param=param, type=error.type, headers=error.headers) from error


@dataclass
class Answer:
    """One choice so far.

    Attributes:
        choice: running or finished.
        text: generated.
        tokens: generated.
        finish_reason, stop_reason: as of ``OutputDelta``.
    """

    choice: ActiveChoice
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Add what was generated."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.choice.handle.request.prompt_token_ids


async def whole_answers(generation: Generation) -> list[Answer]:
    """Return all choices once they have finished; the generation is closed then.

    Raises:
        ApiError: as ``Generation.deltas``.
    """
    answers = [Answer(choice) for choice in generation.choices]
    async for delta in generation.deltas():
        answers[delta.index].add(delta)
    generation.close()  # now, so that a slow client does not hold the request's place
    return answers
