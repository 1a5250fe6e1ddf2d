"""Reads a streamed answer: splits bytes into events, and takes token times and counts from the events."""

from typing import Any

import msgspec


class EventLines:
    """Splits the bytes of a stream of server-sent events into the ``data`` of whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def has_rest(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._rest)

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the lines that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content)))


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class AnswerStream:
    """Collects the events of one answer, of the chat or the completions route.

    An event has tokens if it has text or, if the server sends counts in every event, if the count has risen. An answer
    without any visible text has one token time, at its end.

    Attributes:
        token_times_s: arrival times of the events with tokens.
        prompt_tokens, completion_tokens, cached_tokens: the server's counts; None before they arrive.
        finished: whether the end of the answer was received.
        error: message of an error in the middle of the answer.
    """

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finished = False
        self.error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Number of tokens of the answer: the server's count, or the number of events with text."""
        return len(self.token_times_s) if self.completion_tokens is None else self.completion_tokens

    def take(self, data: bytes, now_s: float) -> None:
        """Add one event.

        Raises:
            msgspec.DecodeError: the event is neither JSON of the expected form nor the end mark.
        """
        if data == b"[DONE]":
            self.finished = True
            return
        event = _DECODER.decode(data)
        if event.error is not None:
            self.error = _message(event.error)
            return
        counted = self._count(event.usage)
        if not event.choices:
            return
        choice = event.choices[0]
        ends = choice.finish_reason is not None
        self.finished = self.finished or ends
        if choice.has_text or counted or (ends and not self.token_times_s):
            self.token_times_s.append(now_s)

    def _count(self, usage: _Usage | None) -> bool:
        """Set the server's counts; return True if the answer has grown."""
        if usage is None:
            return False
        # A first count that arrives after tokens is the total at the end, not growth.
        counts_along = self.completion_tokens is not None or not self.token_times_s
        grown = counts_along and usage.completion_tokens > (self.completion_tokens or 0)
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        return grown


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def error_text(body: bytes) -> str:
    """Return the message of an error body in OpenAI's form; for another body, its start."""
    try:
        error = msgspec.json.decode(body)
        return _message(error.get("error", error) if isinstance(error, dict) else error)
    except msgspec.DecodeError:
        return body[:300].decode(errors="replace")
