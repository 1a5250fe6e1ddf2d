"""``POST /v1/completions`` and ``POST /v1/chat/completions``.

Both submit a body to the service and write the generation's deltas as one JSON object or as a stream of chunks. They
differ only in how prompts are encoded and how choices are written.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.chat_output import AnswerPart, AnswerReader, whole_calls
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.conversation import content_text
from lorikeet.chat.logprobs import (
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    echoed_tokens,
    prompt_logprobs,
)
from lorikeet.chat.prompt_embeds import read_prompt_embeds, token_count
from lorikeet.chat.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    StreamOptions,
    check_prompt_embeds,
    prompts_of,
    refuse_unsupported,
    validated,
)
from lorikeet.chat.sampling import of_prompt, truncated
from lorikeet.chat.structured_output import grammar_spec
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.client.client import RequestHandle
from lorikeet.config import ServerSettings
from lorikeet.core.plan import Token
from lorikeet.core.request import PromptEmbeds
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.model_routes import CHAT, CHAT_BATCH, COMPLETIONS
from lorikeet.http.routes import Routes
from lorikeet.http.streaming import CancelOnDisconnect, DirectBody, EventStream, begun
from lorikeet.http.threads import off_the_loop
from lorikeet.serving.chat_answer import ChatAnswer, start_chat
from lorikeet.serving.generation import Generation, OutputDelta
from lorikeet.serving.large_bodies import PreparedBody, prepared_body
from lorikeet.serving.requests import GenerationSpec, Sender
from lorikeet.serving.service import Service
from lorikeet.serving.usage import metrics_of, token_counts, usage_of

_DONE = b"data: [DONE]\n\n"
_TEXT = "text of a chunk"
"""Stands in the pattern of a chunk for what it adds."""
_encode = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """How one route writes its answers.

    Attributes:
        id_prefix: start of the answer's ``id``.
        object: value of ``object`` in a complete answer.
        chunk_object: value of ``object`` in a chunk.
        needs_every_token: send a chunk also for tokens that add no text.
        is_plain: chunks of a choice, but for the first and the last, differ only in their text.
    """

    id_prefix: str
    object: str
    chunk_object: str
    needs_every_token: bool
    is_plain: bool

    def envelope(self, index: int) -> dict[str, Any]:
        """Return fields of the answer beside its choices, or of the chunk that opens a choice of a stream."""
        ...

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the chunk that opens a stream; None for no such chunk."""
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
        """Return what the usage has beside the counts of all routes."""
        ...


async def respond(
    http: Request,
    body: GenerationBody,
    generation: Generation,
    answer: AnswerFormat,
    model: str,
    settings: ServerSettings,
) -> Response:
    """Return the answer of ``generation``, which is closed in the end.

    Errors before the first token become an HTTP status; later ones an event in the stream.

    Args:
        http: the request, its body read.
        body: says whether and how to stream.
        generation: running.
        answer: the route's format.
        model: name to report.
        settings: of the server.
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
    }

    async def make() -> Response:
        if not body.stream:
            whole = await _collect(generation, answer, body, envelope, timed)
            generation.close()  # now, so that a slow client does not hold the request's place
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
    tokens = {index: _tokens(each) for index, each in deltas.items()}
    times = timed()

    def write() -> bytes:
        kept = _best(tokens, body.choices_per_prompt, body.n or 1)
        choices = [answer.complete(index, deltas[index]) | {"index": number} for number, index in enumerate(kept)]
        whole = envelope | answer.envelope(0) | {"system_fingerprint": None, "kv_transfer_params": None} | times
        return msgspec.json.encode(whole | {"choices": choices, "usage": usage_of(generation) | answer.usage()})

    listed = tokens.values() if answer.needs_every_token else ()
    scored = sum(len(choice.handle.prompt_logprobs) for choice in generation.choices)
    return await off_the_loop(write, scored + sum(1 + len(token.top) for each in listed for token in each))


def _tokens(deltas: Iterable[OutputDelta]) -> list[Token]:
    return [token for delta in deltas for token in delta.tokens]


def _best(tokens: Mapping[int, Sequence[Token]], choices: int, wanted: int) -> list[int]:
    """Return the choices to answer with: of the ``choices`` of each prompt the ``wanted`` likeliest, best first.

    As at OpenAI the likeliest is that with the highest mean log probability of a token.
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
        generation: running.
        answer: the route's format.
        body: says what is told beside the text.
        envelope: fields of every chunk beside its choices.

    Attributes:
        has_begun: whether there was an event.
    """

    def __init__(
        self, generation: Generation, answer: AnswerFormat, body: GenerationBody, envelope: dict[str, Any]
    ) -> None:
        self.has_begun = False
        self._generation = generation
        self._answer = answer
        self._envelope = envelope
        self._tells_usage = body.wants_continuous_usage
        self._is_wanted = answer.needs_every_token or self._tells_usage
        self._is_plain = answer.is_plain and not self._tells_usage
        self._patterns: dict[int, tuple[bytes, bytes]] = {}
        """What is before and behind the text in a chunk, by choice; nothing if chunks differ in more."""
        self._opened: set[int] = set()

    def event(self, delta: OutputDelta) -> bytes:
        """Return the chunks of a delta, the opening of its choice before them; empty if it adds nothing."""
        index, pattern = delta.index, self._patterns.get(delta.index)
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
        if self._is_wanted or delta.finish_reason or self._answer.adds(choice):
            event += self._chunk(choice, delta.completion_tokens)
        return event

    def write_to(self, answer: DirectBody) -> None:
        """Write each delta to the connection as it arrives, while its client reads."""

        def write(delta: OutputDelta) -> bool:
            if not answer.is_open:
                return False
            if event := self.event(delta):
                answer.write(event)
            return True

        self._generation.pass_on(write)

    def _chunk(self, choice: dict[str, Any], completion_tokens: int, *, opens: bool = False) -> bytes:
        value = self._envelope | (self._answer.envelope(choice["index"]) if opens else {}) | {"choices": [choice]}
        if self._tells_usage:
            prompt_tokens = len(self._generation.choices[choice["index"]].handle.request.prompt_token_ids)
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
        yield _event(envelope | {"choices": [], "usage": usage_of(generation) | answer.usage()} | timed())
    yield _DONE


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


ROUTES = Routes()

_DEFAULT_MAX_TOKENS = 16


class TokenReport(NamedTuple):
    """What an answer tells of its tokens.

    Attributes:
        names: names the tokens.
        logprobs: whether it has log probabilities.
        prompt_logprobs: whether it has those of the prompt.
        token_ids: whether it has token ids, also of the prompt.
    """

    names: TokenNames
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False

    @classmethod
    def of(
        cls, body: GenerationBody, texts: TextProcessor, settings: ServerSettings, *, logprobs: bool
    ) -> "TokenReport":
        """Return what a body asks for."""
        as_ids = body.return_tokens_as_token_ids
        names = TokenNames(texts, as_ids=settings.return_tokens_as_token_ids if as_ids is None else as_ids)
        return cls(names, logprobs, body.prompt_logprobs is not None, bool(body.return_token_ids))

    @property
    def needs_every_token(self) -> bool:
        """Whether a stream has a chunk for every token."""
        return self.logprobs or self.token_ids

    def of_prompt(self, handle: RequestHandle) -> dict[str, Any]:
        """Return the fields that tell of a request's prompt; null for what is not asked for."""
        token_ids = handle.request.prompt_token_ids
        return {
            "prompt_logprobs": prompt_logprobs(self.names, token_ids, handle.prompt_logprobs)
            if self.prompt_logprobs
            else None,
            "prompt_token_ids": token_ids if self.token_ids else None,
        }

    def ids(self, tokens: Sequence[Token]) -> list[int] | None:
        """Return ``token_ids``."""
        return [token.token_id for token in tokens] if self.token_ids else None


class CompletionFormat:
    """Writes the choices of ``/v1/completions``.

    Args:
        report: what it tells of tokens.
        handles: of all choices.
        echoes: text of each prompt, to open its choices; empty for no echo.
        choices: number of choices of each prompt.
        skip_special_tokens: the texts lack them.
    """

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        report: TokenReport,
        handles: Sequence[RequestHandle],
        *,
        echoes: list[str],
        choices: int,
        skip_special_tokens: bool,
    ) -> None:
        self._report = report
        self._handles = handles
        self._skip_special_tokens = skip_special_tokens
        self._echoes = echoes
        self._choices = choices
        self._offsets: dict[int, TextOffsets] = {}
        self.needs_every_token = report.needs_every_token
        self.is_plain = not report.needs_every_token

    def envelope(self, index: int) -> dict[str, Any]:
        """Return nothing: all is told by choice."""
        return {}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice with the prompt's text, if it is echoed, and its token ids, if they are asked for."""
        if not (self._echoes or self._report.token_ids):
            return None
        logprobs = self._logprobs(index, ()) if self._echoes else None
        choice = _choice(index, self._echo(index), logprobs, None, None)
        prompt = self._handles[index].request.prompt_token_ids
        return choice | {"token_ids": [], "prompt_token_ids": prompt} if self._report.token_ids else choice

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        logprobs = self._logprobs(delta.index, delta.tokens)
        choice = _choice(delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        return choice | {"token_ids": self._report.ids(delta.tokens)} if self._report.token_ids else choice

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether a chunk adds text."""
        return bool(choice["text"])

    def usage(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def complete(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return a complete choice."""
        tokens, last = _tokens(deltas), deltas[-1]
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        choice = _choice(index, text, self._logprobs(index, tokens), last.finish_reason, last.stop_reason)
        return choice | self._report.of_prompt(self._handles[index]) | {"token_ids": self._report.ids(tokens)}

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return the log probabilities of the next tokens; the first time with those of the prompt, if it is echoed."""
        if not self._report.logprobs:
            return None
        offsets, echoed = self._offsets.get(index), list[Token]()
        if offsets is None:
            names, handle = self._report.names, self._handles[index]
            offsets = TextOffsets(names.text_processor, skip_special_tokens=self._skip_special_tokens)
            self._offsets[index] = offsets
            if self._echoes:
                echoed = echoed_tokens(handle.request.prompt_token_ids, handle.prompt_logprobs)
        return completion_logprobs(self._report.names, [*echoed, *tokens], offsets, echoed=len(echoed))


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
    stop_reason: str | int | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


class StartedCompletion(NamedTuple):
    """A running completion.

    Attributes:
        generation: to be closed in the end.
        texts: tokenizer of its model.
        model: name to report.
    """

    generation: Generation
    texts: TextProcessor
    model: str


async def start_completion(
    service: Service,
    body: CompletionRequest,
    sender: Sender,
    prepared: PreparedBody | None = None,
    *,
    default_max_tokens: int = _DEFAULT_MAX_TOKENS,
) -> StartedCompletion:
    """Submit the prompts of a body.

    Args:
        service: running.
        body: checked, but for its prompts and the fields of sampling.
        sender: of the request.
        prepared: what was read of a large body.
        default_max_tokens: limit on an answer if the body sets none.

    Raises:
        ApiError: it cannot be served.
    """
    if prepared:
        target, lease = prepared.target, prepared.lease
    else:
        target, lease = await service.resolver.lease(body.model, body.lora_path, access=sender.access)
    with lease:
        chat = await service.chats.settings_of(target.chat)
        spec = _completion_spec(body, chat, prepared, default_max_tokens)
        generation = await service.start(body, target, lease, spec, sender)
    return StartedCompletion(generation, chat.text_processor, target.name)


def _completion_spec(
    body: CompletionRequest, chat: ChatSettings, prepared: PreparedBody | None, default_max_tokens: int
) -> GenerationSpec:
    """Return how prompts are completed; raises as :func:`start_completion`."""
    embeds: Sequence[PromptEmbeds] = prepared.embeds if prepared else ()
    if body.prompt_embeds is not None and not prepared:
        check_prompt_embeds(body)
        embeds = read_prompt_embeds(body.prompt_embeds, chat.limits.hidden, chat.limits.max_model_len)
    if embeds and not prepared:
        prompts: Sequence[str | list[int]] = [[0] * token_count(each, chat.limits.hidden) for each in embeds]
    else:
        prompts = prepared.prompts if prepared else prompts_of(body)

    async def encode() -> list[list[int]]:
        if prepared:
            return prepared.prompts
        special, limits = body.add_special_tokens is not False, None if body.truncates else chat.limits
        encoded = await chat.text_processor.encode(prompts, add_special_tokens=special, limits=limits)
        return [truncated(token_ids, body, chat.limits) for token_ids in encoded]

    return GenerationSpec(
        chat=chat,
        prompts=len(prompts),
        encode=encode,
        prompt_param="prompt",
        default_max_tokens=default_max_tokens,
        logprobs=0 if body.logprobs is None and body.choices_per_prompt > (body.n or 1) else body.logprobs,
        prompt_logprobs=body.logprobs if body.prompt_logprobs is None and body.echo else body.prompt_logprobs,
        arrival_s=prepared.arrival_s if prepared else None,
        grammar=grammar_spec(body),
        embeds=embeds,
    )


@ROUTES.add(COMPLETIONS)
async def completions(http: Request, body: CompletionRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Continue one or several prompts."""
    refuse_unsupported(body)
    _check_choices(body)
    prepared = prepared_body(http)
    generation, texts, model = await start_completion(service, body, sender, prepared)
    handles = [choice.handle for choice in generation.choices]
    try:
        echoes = list(prepared.texts) if prepared else []
        if body.echo and not prepared:
            own = [handle.request.prompt_token_ids for handle in handles[:: body.choices_per_prompt]]
            echoes = await texts.decode_all(own if body.truncates else prompts_of(body))
    except BaseException:
        generation.close()
        raise
    answer = CompletionFormat(
        TokenReport.of(body, texts, service.settings, logprobs=body.logprobs is not None),
        handles,
        echoes=echoes,
        choices=body.choices_per_prompt,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return await respond(http, body, generation, answer, model, service.settings)


def _check_choices(body: CompletionRequest) -> None:
    """Check ``best_of``, and that a stream need not tell what it cannot.

    Raises:
        ApiError: 400.
    """
    _check_stream(body)
    if body.best_of is None:
        return
    if body.best_of < (body.n or 1):
        raise bad_request(f"best_of is {body.best_of}, less than n.", "best_of")
    if body.stream and body.best_of > (body.n or 1):
        raise bad_request("A stream cannot wait for the best of several answers.", "best_of")


def _check_stream(body: GenerationBody) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


class ChatFormat:
    """Writes the choices of ``/v1/chat/completions``.

    Args:
        report: what it tells of tokens.
        handles: of all choices.
        echo: text that opens every choice.
        readers: what reads each choice, by its index; none if their texts are the content as they are.
        is_named: whether the request names the function to call.
    """

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        report: TokenReport,
        handles: Sequence[RequestHandle],
        *,
        echo: str = "",
        readers: Sequence[AnswerReader] = (),
        is_named: bool = False,
    ) -> None:
        self._report = report
        self._handles = handles
        self._echo = echo
        self._readers = readers
        self._is_named = is_named
        self.needs_every_token = report.needs_every_token
        self.is_plain = not report.needs_every_token and not readers
        self._is_complete = False

    def envelope(self, index: int) -> dict[str, Any]:
        """Return what the answer tells of the prompt; a stream has its token ids, if they are asked for."""
        fields = self._report.of_prompt(self._handles[index])
        return fields if self._is_complete else {key: value for key, value in fields.items() if value is not None}

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice with the role and the echo, which is sent in a chunk of its own."""
        delta = {"role": "assistant", "content": self._echo}
        return self._choice(index, "delta", delta, None, None) | {"logprobs": None}

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        content: dict[str, Any] = {}
        for part in self._parts(delta):
            content = _added(content, part)
        choice = self._choice(delta.index, "delta", content, delta.finish_reason, delta.stop_reason)
        choice |= {"logprobs": self._logprobs(delta.tokens)}
        return choice | {"token_ids": self._report.ids(delta.tokens)} if self._report.token_ids else choice

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether a chunk adds content, thoughts or calls."""
        return bool(choice["delta"])

    def usage(self) -> dict[str, Any]:
        """Return the tokens of thoughts, if they are told apart."""
        counts = [each.reasoning_tokens for each in self._readers if each.reasoning_tokens is not None]
        return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}

    def complete(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return a complete choice."""
        last, parts = deltas[-1], [part for delta in deltas for part in self._parts(delta)]
        content = self._echo + "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts := "".join(part.reasoning for part in parts):
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if calls := [call for part in parts for call in part.calls]:
            message |= {"content": content or None, "tool_calls": whole_calls(calls)}
        choice = self._choice(index, "message", message, last.finish_reason, last.stop_reason)
        self._is_complete = True
        tokens = _tokens(deltas)
        return choice | {"logprobs": self._logprobs(tokens), "token_ids": self._report.ids(tokens)}

    def _parts(self, delta: OutputDelta) -> list[AnswerPart]:
        if not self._readers:
            return [AnswerPart(delta.text)]
        reader = self._readers[delta.index]
        parts = [reader.push(delta.text, len(delta.tokens))]
        return parts if delta.finish_reason is None else [*parts, reader.finish()]

    def _choice(
        self,
        index: int,
        key: str,
        content: dict[str, Any],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        if finish_reason == "stop" and self._readers and self._readers[index].has_calls and not self._is_named:
            finish_reason = "tool_calls"  # as at OpenAI not for a function that the request names
        choice: dict[str, Any] = {"index": index, key: content, "finish_reason": finish_reason}
        return choice if finish_reason is None else choice | {"stop_reason": stop_reason}

    def _logprobs(self, tokens: tuple[Token, ...] | list[Token]) -> dict[str, Any] | None:
        return chat_logprobs(self._report.names, tokens) if self._report.logprobs else None


def _added(content: dict[str, Any], part: AnswerPart) -> dict[str, Any]:
    """Return the delta of a chunk with a further part of the answer."""
    content = {**content}
    if part.reasoning:
        content["reasoning"] = content["reasoning_content"] = content.get("reasoning", "") + part.reasoning
    if part.content:
        content["content"] = content.get("content", "") + part.content
    if part.calls:
        content["tool_calls"] = [*content.get("tool_calls", ()), *(call.as_json() for call in part.calls)]
    return content


@ROUTES.add(CHAT)
async def chat_completions(
    http: Request, body: ChatCompletionRequest, service: ServiceDep, sender: SenderDep
) -> Response:
    """Answer a conversation."""
    _check_chat(body)
    answer = await start_chat(service, body, sender, prepared_body(http))
    chat_format = _chat_format(service, body, answer)
    return await respond(http, body, answer.generation, chat_format, answer.target.name, service.settings)


def _check_chat(body: ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    _check_stream(body)
    refuse_unsupported(body)


def _chat_format(service: Service, body: ChatCompletionRequest, answer: ChatAnswer) -> ChatFormat:
    return ChatFormat(
        TokenReport.of(body, answer.chat.text_processor, service.settings, logprobs=bool(body.logprobs)),
        [choice.handle for choice in answer.generation.choices],
        echo=_echo(body),
        readers=answer.readers,
        is_named=answer.use is not None and answer.use.is_named,
    )


MAX_CONVERSATIONS = 128


class ChatBatchRequest(Body):
    """Body of ``POST /v1/chat/completions/batch``: several conversations, and the other fields of a chat for all."""

    messages: Annotated[list[list[dict[str, Any]]], Field(min_length=1, max_length=MAX_CONVERSATIONS)]

    def chats(self) -> list[ChatCompletionRequest]:
        """Return a chat for each conversation.

        Raises:
            ApiError: 400, one is not valid, or a field does not go with several.
        """
        fields = self.model_extra or {}
        for name in ("stream", "stream_options"):
            if fields.get(name):
                raise bad_request(f"{name}: several conversations cannot be streamed.", name)
        if fields.get("n") not in (None, 1):
            raise bad_request("n: there is one choice for each conversation.", "n")
        found = []
        for at, messages in enumerate(self.messages):
            try:
                found.append(validated(ChatCompletionRequest, fields | {"messages": messages}))
            except ApiError as error:
                raise bad_request(error.message.replace("messages", f"messages.{at}", 1), error.param) from error
        return found


@ROUTES.add(CHAT_BATCH)
async def chat_batch(http: Request, body: ChatBatchRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Answer several conversations at once, each by a choice of one answer, as vLLM does."""
    chats = body.chats()
    for chat in chats:
        _check_chat(chat)
    answers: list[ChatAnswer] = []

    def close() -> None:
        for answer in answers:
            answer.generation.close()

    async def make() -> Response:
        for at, chat in enumerate(chats):
            with of_prompt(f"messages.{at}"):
                answers.append(await start_chat(service, chat, sender, None))
        formats = [_chat_format(service, *each) for each in zip(chats, answers, strict=True)]
        deltas = await asyncio.gather(*(_all_deltas(answer.generation) for answer in answers))

        def write() -> bytes:
            each = zip(formats, deltas, strict=True)
            choices = [form.complete(0, found) | {"index": at} for at, (form, found) in enumerate(each)]
            counts = [usage_of(answer.generation) for answer in answers]
            usage = token_counts(*(sum(one[key] for one in counts) for key in ("prompt_tokens", "completion_tokens")))
            envelope = {
                "id": f"{ChatFormat.id_prefix}-{http.state.request_id}",
                "object": ChatFormat.object,
                "created": int(time.time()),
                "model": answers[0].target.name,
            }
            return msgspec.json.encode(envelope | {"choices": choices, "usage": usage})

        content = await off_the_loop(write, sum(map(len, deltas)))
        return Response(content, media_type="application/json")

    return CancelOnDisconnect(make, close)


async def _all_deltas(generation: Generation) -> list[OutputDelta]:
    found = [delta async for delta in generation.deltas()]
    generation.close()
    return found


def _echo(body: ChatCompletionRequest) -> str:
    """Return the text that opens the answer: as in vLLM, the last message's if the answer has the same role."""
    last = body.messages[-1]
    if not body.echo or (last.role != "assistant" and body.add_generation_prompt is not False):
        return ""
    return content_text(last)
