"""Passes a streamed answer from backend to client, and makes the body with which another backend resumes it.

An answer is resumed from its text: another backend gets the prompt followed by the text so far, and a limit that is
lower by the tokens of that text. The backend counts these tokens (``continuous_usage_stats``); without counts, each
chunk counts as a token. Tokens without text yet are not counted and are generated again. Answers that cannot be resumed
are passed through. This module handles bytes and bodies, not connections.
"""

import re
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from lorikeet.chat.protocol import usage_wanted
from lorikeet.http.answer_stream import EventLines
from lorikeet.router.proxied_request import CHAT, COMPLETIONS, RESPONSES, RequestBody

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_weight_versions": (False,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "truncate_prompt_tokens": (),
}
"""Fields that make an answer more than its text, or dependent on more than prompt and text so far; with the values for
which that is not so. null is such a value for all fields."""


def why_not_resumable(body: RequestBody) -> str | None:
    """Return the reason why an answer cannot be resumed at another backend; None if it can."""
    if body.path not in (COMPLETIONS, CHAT):
        return f"it is one of {body.path}"
    for name, neutral in _NEUTRAL.items():
        value = body.fields.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            return f"the request has {name}"
    if not isinstance(body.fields.get("stream_options"), dict | None):
        return "its stream_options are not understood"
    if body.is_chat:
        return _why_not_resumable_chat(body)
    prompt = body.fields.get("prompt")
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    return None if isinstance(prompt, str) or is_tokens else "it has several prompts"


def _why_not_resumable_chat(body: RequestBody) -> str | None:
    messages = body.fields.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return "its messages are not understood"
    if body.fields.get("continue_final_message") is True:
        return None if isinstance(messages[-1].get("content"), str) else "its last message is not plain text"
    has_opening = body.fields.get("add_generation_prompt") is not False
    return None if has_opening else "the request has add_generation_prompt: false"


DONE = b"data: [DONE]\n\n"


class BackendFailed(RuntimeError):
    """A backend sent an error or an invalid event, ``event``, in the middle of a stream."""

    def __init__(self, message: str, event: bytes) -> None:
        super().__init__(message)
        self.event = event


class TokenUsage(msgspec.Struct):
    """A backend's token counts of a prompt and its answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class PassthroughAnswer:
    """Passes a streamed answer through line by line.

    The answer cannot be resumed once it has begun. The interface is that of :class:`ResumableAnswer`.

    Args:
        body: body of the request.
        why: the reason why the answer cannot be resumed.
        is_counted: whether to count the answer's tokens.

    Attributes:
        tokens: number of tokens of the answer, by the backend's usage, or else the number of its events; 0 if they are
            not counted.
    """

    is_whole = False
    needs_tokens = False
    tokens = 0
    text = ""
    failure: BackendFailed | None = None

    def __init__(self, body: RequestBody, why: str, *, is_counted: bool = False) -> None:
        self.stuck: str | None = None
        self.is_done = False
        self._body = body
        self._why = why
        self._rest = b""
        self._is_counted = is_counted
        self._usage: TokenUsage | None = None

    @property
    def counts(self) -> TokenUsage | None:
        """The token counts of prompt and answer; None without counts."""
        return self._usage

    def _count(self, lines: bytes) -> None:
        """Count the events of whole lines, unless the backend counts their tokens."""
        for line in lines.splitlines():
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                usage = _read_usage(line[5:]) if b'"usage"' in line else None
                if usage is not None and usage.prompt is not None:
                    self._usage = TokenUsage(usage.prompt, usage.answer or 0)
                self.tokens = self.tokens + 1 if self._usage is None else self._usage.completion_tokens

    def next_body(self, text_tokens: list[int] | None = None) -> bytes:
        """Return the body as received."""
        self._rest = b""
        return self._body.content

    def feed(self, piece: bytes) -> bytes:
        """Add bytes from a backend. Return the completed lines for the client."""
        lines, end, self._rest = (self._rest + piece).rpartition(b"\n")
        if lines:
            self.stuck = self._why
            self.is_done = self.is_done or lines.rstrip().endswith((b"data: [DONE]", b"data:[DONE]"))
            if self._is_counted:
                self._count(lines)
        return lines + end

    def closing(self) -> bytes:
        """Return empty bytes: the last events of such an answer are unknown."""
        return b""


_LAST_EVENTS = frozenset(
    {
        *(b"message_stop", b"error"),
        *(b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"),
    }
)


class NamedEventsAnswer(PassthroughAnswer):
    """Passes through a stream of ``/v1/messages`` or ``/v1/responses``, which ends with an event of a known name.

    Attributes:
        answer_id: id of a stored response; empty until the id has arrived.
    """

    def __init__(self, body: RequestBody, why: str) -> None:
        super().__init__(body, why)
        self.answer_id = ""
        self._is_last = False
        self._prompt_tokens: int | None = None
        self._waits_for_id = body.path == RESPONSES

    def feed(self, piece: bytes) -> bytes:
        """Add bytes from a backend. Return the completed lines for the client."""
        out = super().feed(piece)
        for line in out.splitlines():
            if line.startswith(b"event:"):
                self._is_last = line[6:].strip() in _LAST_EVENTS
            elif line.startswith(b"data:"):
                self.is_done = self.is_done or self._is_last
                if self._waits_for_id or b'"usage"' in line:
                    self._read(line[5:])
        return out

    def _read(self, data: bytes) -> None:
        """Read the answer's id and the token counts from an event."""
        try:
            event = _NAMED_EVENT.decode(data)
        except msgspec.DecodeError:
            return
        self.answer_id = self.answer_id or event.response.id
        self._waits_for_id = self._waits_for_id and not self.answer_id
        for usage in (event.message.usage, event.usage, event.response.usage):
            if usage is None:
                continue
            if usage.prompt is not None:
                self._prompt_tokens = usage.prompt
            if usage.answer is not None:
                self.tokens = usage.answer

    @property
    def counts(self) -> TokenUsage | None:
        """The token counts of prompt and answer; None if the backend has not counted them."""
        return None if self._prompt_tokens is None else TokenUsage(self._prompt_tokens, self.tokens)


class ReportedUsage(msgspec.Struct, frozen=True):
    """The tokens in a route's ``usage``; OpenAI's completions use one pair of names, other routes another pair."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def prompt(self) -> int | None:
        """Number of tokens of the prompt; None if the usage lacks it."""
        return self.input_tokens if self.prompt_tokens is None else self.prompt_tokens

    @property
    def answer(self) -> int | None:
        """Number of tokens of the answer; None if the usage lacks it."""
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens


class _Answer(msgspec.Struct, frozen=True):
    id: str = ""
    usage: ReportedUsage | None = None


class _NamedEvent(msgspec.Struct):
    """An event with usage: the first and the last but one of a message, or the last one of a response."""

    response: _Answer = _Answer()
    message: _Answer = _Answer()
    usage: ReportedUsage | None = None


_NAMED_EVENT = msgspec.json.Decoder(_NamedEvent)
_USAGE_EVENT = msgspec.json.Decoder(_Answer)


def _read_usage(data: bytes) -> ReportedUsage | None:
    try:
        return _USAGE_EVENT.decode(data).usage
    except msgspec.DecodeError:
        return None


class _TextForm(NamedTuple):
    """The form of a backend's events that hold only text. All bytes but text and counts are the same in each.

    Attributes:
        before: bytes before the text.
        after: bytes from the end of the text to the end of the event, or to the counts.
        kept: ``after`` without counts, as the client gets it.
        has_counts: whether counts follow.
    """

    before: bytes
    after: bytes
    kept: bytes
    has_counts: bool

    @classmethod
    def of(cls, data: bytes, field: bytes, text: str) -> "_TextForm | None":
        """Return the form of an event; None if the bytes of its text or of its counts are not certain.

        Args:
            data: the data of the event.
            field: name of the field with the text.
            text: the text.
        """
        found = list(re.finditer(rb'"%b":\s*("(?:[^"\\]|\\.)*")' % field, data))
        if len(found) != 1 or msgspec.json.decode(found[0][1]) != text:
            return None
        start, end = found[0].span(1)
        before = b"data: " + data[:start]
        if b'"usage"' not in data:
            return cls(before, data[end:] + b"\n\n", data[end:] + b"\n\n", has_counts=False)
        counts = _COUNTS_KEY.search(data, end)
        if counts is None or _COUNTS.fullmatch(data[counts.end() :] + b"\n\n") is None:
            return None
        return cls(before, data[end : counts.end()], data[end : counts.start()] + b"}\n\n", has_counts=True)


_COUNTS_KEY = re.compile(rb',\s*"usage":\s*')
_COUNTS = re.compile(rb"(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})\s*\}\n\n")
"""The counts, with which an event ends."""


class ResumableAnswer:
    """Collects one answer from all backends that contribute to it.

    Args:
        body: body of a request for which :func:`why_not_resumable` returns None.

    Attributes:
        stuck: the reason why the answer can no longer be resumed; None if it can be.
        prompt_tokens: number of the prompt's tokens, from the first backend's count; None before.
        is_finished: whether the last chunk has arrived.
        is_done: whether the end mark has arrived, too.
        failure: the backend's error, which comes after the events that :meth:`feed` has returned.
    """

    def __init__(self, body: RequestBody) -> None:
        self.stuck: str | None = None
        self.prompt_tokens: int | None = None
        self.is_finished = False
        self.is_done = False
        self._body = body
        self._options: dict[str, Any] = body.fields.get("stream_options") or {}
        at_the_end, along = (self._options.get(name) for name in ("include_usage", "continuous_usage_stats"))
        self._wants_usage, self._wants_counts = usage_wanted(at_the_end, along)
        self._text: list[str] = []
        self._before = 0
        """Tokens of the text from earlier backends."""
        self._counted = 0
        """Tokens of the text from this backend."""
        self._chunks = 0
        self._head: dict[str, Any] = {}
        self._ids: dict[str, Any] = {}
        self._is_chat = body.is_chat
        self._has_opened = False
        self._has_usage = False
        self.failure: BackendFailed | None = None
        self._lines = EventLines()
        self._form: _TextForm | None = None
        """The form of events that are copied; None before the first, and for a backend that resumes."""
        self._has_form = self._wants_counts
        """Whether the form was looked for. A client that wants the counts of each event gets no copies."""
        self._unread: list[bytes] = []
        """Texts of copied events, as JSON."""
        self._unread_counts = b""
        """Counts of the last copied event."""
        if body.received is not None and body.received.text:
            self._text.append(body.received.text)
            self._counted = body.received.tokens
            self._has_opened = True
            kind = "chat.completion.chunk" if self._is_chat else "text_completion"
            self._head = {"id": "", "object": kind, "created": int(time.time()), "model": body.model}

    @property
    def text(self) -> str:
        """Text of the answer so far."""
        self._read_copied()
        return "".join(self._text)

    @property
    def tokens(self) -> int:
        """Number of tokens of the text so far."""
        self._read_copied()
        return self._before + self._counted

    @property
    def counts(self) -> TokenUsage | None:
        """The token counts of prompt and answer; None if no backend has counted them."""
        return None if self.prompt_tokens is None else TokenUsage(self.prompt_tokens, self.tokens)

    @property
    def needs_tokens(self) -> bool:
        """Whether :meth:`next_body` needs the text so far as token ids, because the prompt is given as token ids."""
        return bool(self._text) and isinstance(self._body.fields.get("prompt"), list)

    @property
    def is_whole(self) -> bool:
        """Whether all tokens have been generated, so that only :meth:`closing` is missing."""
        limit = self._body.max_tokens
        return self.is_finished or (bool(self._text) and limit is not None and self.tokens >= limit)

    def next_body(self, text_tokens: list[int] | None = None) -> bytes:
        """Return the body for the next backend: the original body, or a body that resumes the answer.

        Args:
            text_tokens: token ids of the text so far, if :attr:`needs_tokens`.
        """
        self._before = self.tokens
        self._form = None
        self._has_form = self._wants_counts or bool(self._ids)
        self._counted = 0
        self._chunks = 0
        self._lines = EventLines()
        self.failure = None
        fields = dict(self._body.fields)
        fields["stream_options"] = {**self._options, "include_usage": True, "continuous_usage_stats": True}
        if self._text:
            fields |= self._rest_of_chat() if self._body.is_chat else self._rest_of_completion(text_tokens)
            fields |= self._rest_of_limits()
        return msgspec.json.encode(fields)

    def _rest_of_completion(self, text_tokens: list[int] | None) -> dict[str, Any]:
        prompt = self._body.fields["prompt"]
        if isinstance(prompt, str):
            return {"prompt": prompt + self.text}
        assert text_tokens is not None  # The prompt is given as token ids.
        return {"prompt": prompt + text_tokens}

    def _rest_of_chat(self) -> dict[str, Any]:
        messages = self._body.fields["messages"]
        if self._body.fields.get("continue_final_message") is True:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + self.text}]
        else:
            messages = [*messages, {"role": "assistant", "content": self.text}]
        return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    def _rest_of_limits(self) -> dict[str, Any]:
        fields = self._body.fields
        given = [name for name in ("max_tokens", "max_completion_tokens") if isinstance(fields.get(name), int)]
        rest: dict[str, Any] = {name: fields[name] - self._before for name in given}
        if self._body.max_tokens is not None and not given:
            rest["max_tokens"] = self._body.max_tokens - self._before
        if isinstance(fields.get("min_tokens"), int):
            rest["min_tokens"] = max(0, fields["min_tokens"] - self._before)
        return rest

    def feed(self, piece: bytes) -> bytes:
        """Add bytes from a backend. Return the completed events for the client."""
        if self._form is not None and (copied := self._copied(self._form, piece)):
            return copied
        self._read_copied()
        out = b""
        for data in self._lines.feed(piece):
            try:
                out += self._take(data)
            except BackendFailed as failure:
                self.failure = failure
                break
        return out

    def _copied(self, form: _TextForm, piece: bytes) -> bytes:
        """Return an event of text without its counts; empty if the piece is not exactly such an event.

        Most pieces are. They are copied as bytes, and read only when the answer is resumed.
        """
        if self._lines.has_rest or not piece.startswith(form.before):
            return b""
        start = len(form.before)
        at = piece.find(form.after, start)
        text = piece[start:at]
        # Quotes in a text are escaped, so further ones are fields that the form lacks.
        if at < 0 or len(text) < 3 or text.count(b'"') - text.count(b'\\"') != 2:
            return b""
        if form.has_counts:
            counts = _COUNTS.fullmatch(piece, at + len(form.after))
            if counts is None:
                return b""
            self._unread_counts = counts[1]
        elif at + len(form.after) != len(piece):
            return b""
        self._unread.append(text)
        return form.before + text + form.kept

    def _read_copied(self) -> None:
        """Add the texts and counts of copied events."""
        if not self._unread:
            return
        try:
            self._text += msgspec.json.decode(b"[" + b",".join(self._unread) + b"]", type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.stuck = "its text is not valid"
        self._chunks += len(self._unread)
        self._unread.clear()
        counts = None
        with suppress(msgspec.DecodeError):
            counts = self._count(msgspec.json.decode(self._unread_counts))
        self._counted = self._chunks if counts is None else counts

    def _take(self, data: bytes) -> bytes:
        """Add the data of one event from a backend. Return the event for the client, if it gets one.

        Raises:
            BackendFailed: the event is an error or is not valid.
        """
        if data == b"[DONE]":
            self.is_done = True
            return self._last_usage() + DONE
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise BackendFailed(f"no event: {error}", _event({"error": str(error)})) from error
        if not _is_answer(event):
            raise BackendFailed(f"in its stream: {data[:300].decode(errors='replace')}", b"data: " + data + b"\n\n")
        usage = event.pop("usage", None)
        choices = event.get("choices")
        if not self._ids:
            self._head = {name: value for name, value in event.items() if name != "choices"}
            self._ids = {name: event[name] for name in ("id", "created") if name in event}
        event |= self._ids
        counted = self._count(usage)
        if choices and not self._take_choice(choices[0], counted):
            return b""
        if not self._has_form and self._text and len(choices or ()) == 1:
            self._has_form = True
            is_only_text = not self.is_finished and self.stuck is None
            if is_only_text and not (self._is_chat and (choices[0].get("delta") or {}).get("role")):
                self._form = _TextForm.of(data, b"content" if self._is_chat else b"text", self._text[-1])
        if not choices and (counted is None or not self._wants_usage):
            return b""
        if usage and (self._wants_counts or not choices):
            event["usage"] = self._usage(usage)
            self._has_usage = self._has_usage or not choices
        return _event(event)

    def _count(self, usage: Any) -> int | None:
        """Read a backend's usage. Return the number of tokens that it has generated; None without a count."""
        if not isinstance(usage, dict) or not isinstance(usage.get("completion_tokens"), int):
            return None
        if self.prompt_tokens is None:
            self.prompt_tokens = usage.get("prompt_tokens", 0) - self._before
        return int(usage["completion_tokens"])

    def _take_choice(self, choice: dict[str, Any], counted: int | None) -> bool:
        """Add a chunk's text. Return whether the client gets the chunk."""
        role = False
        others = list[str]()
        if self._is_chat:
            delta = choice.get("delta") or {}
            text = delta.get("content")
            role = bool(delta.get("role"))
            if others := [name for name, value in delta.items() if value and name not in ("role", "content")]:
                self.stuck = f"it holds {others[0]}"
        else:
            text = choice.get("text")
        if text:
            self._text.append(text)
            self._chunks += 1
            self._counted = self._chunks if counted is None else counted
        if choice.get("finish_reason") is not None:
            self.is_finished = True
            if counted is not None:
                self._counted = counted  # llama.cpp reports usage only here, in a chunk without text.
        opens = role and not self._has_opened
        self._has_opened = self._has_opened or role
        return bool(text or others or opens or self.is_finished or (self._wants_counts and not role))

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole answer: the prompt from the first backend, and the tokens of all backends."""
        prompt_tokens = self.prompt_tokens or 0
        completion_tokens = self._before + usage.get("completion_tokens", 0)
        total_tokens = prompt_tokens + completion_tokens
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total_tokens}
        return {**usage, **counts}

    def closing(self) -> bytes:
        """Return the last events of a whole answer whose backend was lost before it sent them."""
        events = b""
        if not self.is_finished:
            empty: dict[str, Any] = {"delta": {}} if self._body.is_chat else {"text": "", "logprobs": None}
            events += _event({**self._head, "choices": [{"index": 0, **empty, "finish_reason": "length"}]})
            self.is_finished = True
        return events + self._last_usage() + DONE

    def _last_usage(self) -> bytes:
        """Return the event with the usage that the client requested; empty if already sent, or without counts.

        llama.cpp counts a completion in its last chunk, which a lost server may not have sent.
        """
        if self._has_usage or not self._wants_usage or self.prompt_tokens is None:
            return b""
        self._has_usage = True
        return _event({**self._head, "choices": [], "usage": self._usage({"completion_tokens": self._counted})})


def _is_answer(event: Any) -> bool:
    """Return whether an event is part of an answer and not an error or an unknown form."""
    if not isinstance(event, dict) or event.get("error") or event.get("object") == "error":
        return False
    choices = event.get("choices")
    if not choices:
        return True
    if not isinstance(choices, list):
        return False
    for choice in choices:  # noqa: SIM110 - a generator takes three times as long
        if not isinstance(choice, dict):
            return False
    return True


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
