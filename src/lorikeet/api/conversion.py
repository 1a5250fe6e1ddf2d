"""Collects whole answers for the routes of other servers."""

from dataclasses import dataclass, field

from lorikeet.core.plan import Token
from lorikeet.serving.generation import ActiveChoice, Generation, OutputDelta


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
