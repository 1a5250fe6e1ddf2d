"""Writes the answer of a generation as one JSON object or as a stream of chunks, for completions and chats."""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from lorikeet.chat.logprobs import (
    TokenNames,
    prompt_logprobs,
)
from lorikeet.chat.protocol import (
    GenerationBody,
    StreamOptions,
)
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.client.client import RequestHandle
from lorikeet.config import ServerSettings
from lorikeet.core.plan import Token
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.streaming import CancelOnDisconnect, DirectBody, EventStream, begun
from lorikeet.http.threads import off_the_loop
from lorikeet.serving.generation import Generation, OutputDelta
from lorikeet.serving.usage import metrics_of, token_counts, usage_of

_DONE = b"data: [DONE]\n\n"
_TEXT = "text of a chunk"
"""Placeholder, in the pattern of a chunk, for the text that the chunk adds."""
_encode = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """Writes the answers of one route.

    Attributes:
        id_prefix: start of the answer's ``id``.
        object: value of ``object`` in a complete answer.
        chunk_object: value of ``object`` in a chunk.
        needs_every_token: whether tokens that add no text get a chunk, too.
        is_plain: whether the chunks of a choice, but for the first and the last, differ only in their text.
    """

    id_prefix: str
    object: str
    chunk_object: str
    needs_every_token: bool
    is_plain: bool

    def envelope(self, index: int) -> dict[str, Any]:
        """Return the fields beside the choices, of the answer or of the chunk that opens a choice of a stream."""
        ...

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the chunk that opens a stream; None if the stream has no such chunk."""
        ...

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        ...

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether the choice of a chunk adds anything to the answer."""
        ...

    def complete(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return a complete choice."""
        ...

    def usage(self) -> dict[str, Any]:
        """Return the fields of the usage beside the counts that all routes have."""
        ...


async def respond(
    http: Request,
    body: GenerationBody,
    generation: Generation,
    answer: AnswerFormat,
    model: str,
    settings: ServerSettings,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Response:
    """Return the answer of ``generation``, and close the generation at the end.

    Errors before the first token become an HTTP status; later ones become an event in the stream.

    Args:
        http: the request, whose body has been read.
        body: the body, with its fields for streams.
        generation: the running generation.
        answer: the route's format.
        model: name to report.
        settings: the server's settings.
        fields: further fields of the answer, and of every chunk.
    """
    if settings.force_include_usage and body.stream and body.stream_options is None:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)

    def timed() -> dict[str, Any]:
        return {"metrics": metrics_of(generation)} if settings.request_metrics else {}

    envelope = {
        "id": f"{answer.id_prefix}-{http.state.request_id}",
        "object": answer.chunk_object if body.stream else answer.object,
        "created": int(time.time()),
        "model": model,
        **fields,
    }

    async def make() -> Response:
        if not body.stream:
            whole = await _collect(generation, answer, body, envelope, timed)
            generation.close()  # Closing it now frees the request's place before a slow client has read all.
            return Response(whole, media_type="application/json")
        chunks = _Chunks(generation, answer, body, envelope)
        events = await begun(_events(generation, chunks, answer, body, envelope, timed))
        return EventStream(events, generation.read_until_s, chunks.write_to)

    return CancelOnDisconnect(make, generation.close)


async def _collect(
    generation: Generation,
    answer: AnswerFormat,
    body: GenerationBody,
    envelope: dict[str, Any],
    timed: Callable[[], dict[str, Any]],
) -> bytes:
    deltas: dict[int, list[OutputDelta]] = {choice.index: [] for choice in generation.choices}
    async for delta in generation.deltas():
        deltas[delta.index].append(delta)
    tokens = {index: tokens_of(each) for index, each in deltas.items()}
    times = timed()

    def write() -> bytes:
        kept = _best(tokens, body.choices_per_prompt, body.n or 1)
        choices = [
            answer.complete(index, deltas[index])
            | {"index": number, "system_fingerprint": generation.provenance(index).fingerprint}
            | versions_of(generation, body, index)
            for number, index in enumerate(kept)
        ]
        made_by = {"system_fingerprint": generation.provenance(0).fingerprint}
        whole = envelope | answer.envelope(0) | made_by | {"kv_transfer_params": None} | times
        return msgspec.json.encode(whole | {"choices": choices, "usage": usage_of(generation) | answer.usage()})

    listed = tokens.values() if answer.needs_every_token else ()
    scored = sum(len(choice.handle.prompt_logprobs) for choice in generation.choices)
    return await off_the_loop(write, scored + sum(1 + len(token.top) for each in listed for token in each))


def versions_of(generation: Generation, body: GenerationBody, index: int) -> dict[str, Any]:
    """Return vLLM's field for the weights of each token of a finished choice, if the body requests it."""
    if not body.return_weight_versions:
        return {}
    return {"weight_versions": generation.weight_versions(index, generation.choices[index].completion_tokens)}


def tokens_of(deltas: Iterable[OutputDelta]) -> list[Token]:
    """Return the tokens of several deltas."""
    return [token for delta in deltas for token in delta.tokens]


def _best(tokens: Mapping[int, Sequence[Token]], choices: int, wanted: int) -> list[int]:
    """Return the ``wanted`` likeliest of each prompt's ``choices`` choices, best first.

    The likeliest choice has the highest mean log probability of a token, as at OpenAI.
    """
    if choices == wanted:
        return list(tokens)

    def mean(index: int) -> float:
        return sum(token.logprob or 0.0 for token in tokens[index]) / max(1, len(tokens[index]))

    prompts = (range(first, first + choices) for first in range(0, len(tokens), choices))
    return [index for each in prompts for index in sorted(each, key=mean, reverse=True)[:wanted]]


class _Chunks:
    """Writes the deltas of a generation as events.

    Args:
        generation: the running generation.
        answer: the route's format.
        body: the body, with its fields for streams.
        envelope: fields of every chunk beside its choices.

    Attributes:
        has_begun: whether an event has been written.
    """

    def __init__(
        self, generation: Generation, answer: AnswerFormat, body: GenerationBody, envelope: dict[str, Any]
    ) -> None:
        self.has_begun = False
        self._generation = generation
        self._answer = answer
        self._body = body
        self._envelope = envelope
        self._tells_usage = body.wants_continuous_usage
        self._is_wanted = answer.needs_every_token or self._tells_usage
        self._is_plain = answer.is_plain and not self._tells_usage
        self._patterns: dict[int, tuple[bytes, bytes]] = {}
        """A choice's bytes before and behind the text of a chunk; empty if chunks differ in more than the text."""
        self._opened: set[int] = set()

    def event(self, delta: OutputDelta) -> bytes:
        """Return the chunks of a delta, after the opening of its choice; empty if the delta adds nothing."""
        index = delta.index
        pattern = self._patterns.get(delta.index)
        if pattern is not None and delta.finish_reason is None:
            return b"%b%b%b" % (pattern[0], _encode(delta.text), pattern[1]) if delta.text else b""
        event = b""
        if index not in self._opened:
            self._opened.add(index)
            self.has_begun = True
            opening = self._answer.first(index)
            event = b"" if opening is None else self._chunk(opening, 0, opens=True)
            if self._is_plain:
                sample = self._chunk(self._answer.chunk(OutputDelta(index, _TEXT, (), None, None, 0)), 0)
                before, _, behind = sample.rpartition(_encode(_TEXT))
                self._patterns[index] = before, behind
        choice = self._answer.chunk(delta)
        if delta.finish_reason is not None:
            choice |= versions_of(self._generation, self._body, index)
        if self._is_wanted or delta.finish_reason or self._answer.adds(choice):
            event += self._chunk(choice, delta.completion_tokens)
        return event

    def write_to(self, answer: DirectBody) -> None:
        """Write each delta to the connection as it arrives, as long as the client reads."""

        def write(delta: OutputDelta) -> bool:
            if not answer.is_open:
                return False
            if event := self.event(delta):
                answer.write(event)
            return True

        self._generation.pass_on(write)

    def _chunk(self, choice: dict[str, Any], completion_tokens: int, *, opens: bool = False) -> bytes:
        index = choice["index"]
        value = self._envelope | {"system_fingerprint": self._generation.provenance(index).fingerprint}
        value |= (self._answer.envelope(index) if opens else {}) | {"choices": [choice]}
        if self._tells_usage:
            prompt_tokens = len(self._generation.choices[index].handle.request.prompt_token_ids)
            value["usage"] = token_counts(prompt_tokens, completion_tokens)
        return _event(value)


async def _events(
    generation: Generation,
    chunks: _Chunks,
    answer: AnswerFormat,
    body: GenerationBody,
    envelope: dict[str, Any],
    timed: Callable[[], dict[str, Any]],
) -> AsyncIterator[bytes]:
    try:
        async for delta in generation.deltas():
            if event := chunks.event(delta):
                yield event
    except ApiError as error:
        if not chunks.has_begun:
            raise
        yield _event(error.body()) + _DONE
        return
    if body.wants_usage:
        made_by = {"system_fingerprint": generation.provenance().fingerprint}
        counts = {"choices": [], "usage": usage_of(generation) | answer.usage()}
        yield _event(envelope | made_by | counts | timed())
    yield _DONE


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class TokenReport(NamedTuple):
    """Fields of an answer that describe its tokens.

    Attributes:
        names: names the tokens.
        logprobs: whether the answer has log probabilities.
        prompt_logprobs: whether the answer has log probabilities of the prompt.
        token_ids: whether the answer has token ids, the prompt's included.
    """

    names: TokenNames
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False

    @classmethod
    def of(
        cls, body: GenerationBody, texts: TextProcessor, settings: ServerSettings, *, logprobs: bool
    ) -> "TokenReport":
        """Return the report that a body requests."""
        as_ids = body.return_tokens_as_token_ids
        names = TokenNames(texts, as_ids=settings.return_tokens_as_token_ids if as_ids is None else as_ids)
        return cls(names, logprobs, body.prompt_logprobs is not None, bool(body.return_token_ids))

    @property
    def needs_every_token(self) -> bool:
        """Whether a stream has a chunk for every token."""
        return self.logprobs or self.token_ids

    def of_prompt(self, handle: RequestHandle) -> dict[str, Any]:
        """Return the fields that describe a request's prompt; null where the body does not request them."""
        token_ids = handle.request.prompt_token_ids
        return {
            "prompt_logprobs": prompt_logprobs(self.names, token_ids, handle.prompt_logprobs)
            if self.prompt_logprobs
            else None,
            "prompt_token_ids": token_ids if self.token_ids else None,
        }

    def ids(self, tokens: Sequence[Token]) -> list[int] | None:
        """Return the token ids for the field ``token_ids``; None if the body does not request them."""
        return [token.token_id for token in tokens] if self.token_ids else None


def check_stream(body: GenerationBody) -> None:
    """Check that a body combines ``stream`` only with fields that streams support.

    Raises:
        ApiError: 400, a field needs the whole answer.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
