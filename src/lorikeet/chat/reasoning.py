"""Separates the thoughts of a model from its answer while the text arrives."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """Thoughts that a model writes before its answer."""

    text: str


class ReasoningFormat(NamedTuple):
    """Format of thoughts in a family of models.

    Attributes:
        name: vLLM's name of its parser.
        begin, end: markers around the thoughts. Both may be special tokens, and stay in the text of an answer.
        begins_open: whether an answer without ``begin`` also begins with thoughts.
    """

    name: str
    begin: str
    end: str
    begins_open: bool = False

    @property
    def markers(self) -> tuple[str, str]:
        """Markers, which may be special tokens."""
        return self.begin, self.end

    def is_open(self, prompt_end: str) -> bool:
        """Return whether an answer begins with thoughts, given the last words of its prompt."""
        return prompt_end.rstrip().endswith(self.begin) or (self.begins_open and not self.is_closed(prompt_end))

    def is_closed(self, prompt_end: str) -> bool:
        """Return whether the prompt has ended the thoughts, so that the answer has none."""
        return prompt_end.rstrip().endswith(self.end)

    def parser(self, prompt_end: str) -> "ReasoningParser":
        """Return a parser of one answer, given the last words of its prompt."""
        return ReasoningParser(self, self.is_open(prompt_end))


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", begins_open=True),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}
"""Formats by name. ``qwen3`` also fits other models that think between ``<think>`` and ``</think>``."""


class ReasoningParser:
    """Splits an answer into thoughts and the rest, and drops spaces and newlines around the thoughts.

    Args:
        reasoning_format: the model's format.
        is_open: whether the answer begins with thoughts.
    """

    def __init__(self, reasoning_format: ReasoningFormat, is_open: bool) -> None:
        self._format = reasoning_format
        self._is_open = is_open
        self._read = self._read_start
        self._held = ""
        self._is_fresh = True
        """Whether only spaces have come since the thoughts, or the answer behind them, began."""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and not ended."""
        return self._read == self._read_thoughts

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return new thoughts and new text of the answer."""
        self._held += text
        return self._read()

    def finish(self) -> tuple[str, str]:
        """Return the thoughts and the answer's text that were held back, at the end of the text."""
        if self._read == self._read_start:
            self._read = self._read_thoughts if self._is_open else self._read_plain
        thoughts, answer = self._read()
        if self._read == self._read_thoughts:
            thoughts += self._held.rstrip()
        return thoughts, answer

    def _read_start(self) -> tuple[str, str]:
        begun = self._held.lstrip()
        if len(begun) < len(self._format.begin) and self._format.begin.startswith(begun):
            return "", ""
        if begun.startswith(self._format.begin):
            self._held = begun.removeprefix(self._format.begin)
            self._read = self._read_thoughts
        else:
            self._read = self._read_thoughts if self._is_open else self._read_plain
        return self._read()

    def _read_thoughts(self) -> tuple[str, str]:
        text, end, rest = self._held.partition(self._format.end)
        if end:
            self._held = rest
            self._read = self._read_answer
        else:  # Text that may become the end marker waits, with the spaces before it.
            sizes = range(len(self._format.end))
            text = text[: len(text) - max(size for size in sizes if text.endswith(self._format.end[:size]))]
        sent = text.rstrip()
        if not end:
            self._held = self._held[len(sent) :]
        thoughts = self._without_space(sent)
        if not end:
            return thoughts, ""
        self._is_fresh = True
        return thoughts, self._read_answer()[1]

    def _read_answer(self) -> tuple[str, str]:
        return "", self._without_space(self._read_plain()[1])

    def _read_plain(self) -> tuple[str, str]:
        text = self._held
        self._held = ""
        return "", text

    def _without_space(self, text: str) -> str:
        """Return text without the leading spaces of thoughts or an answer."""
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return text
