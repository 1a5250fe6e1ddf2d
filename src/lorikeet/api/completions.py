"""``POST /v1/completions`` and ``POST /v1/chat/completions``.

Both hand a body to the service and write what the generation brings as one JSON object or as a stream of chunks. They
differ only in how prompts are encoded and how choices are written.
"""

import codecs
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from lorikeet.api.errors import ApiError, bad_request, not_supported
from lorikeet.api.generation import Generation, OutputDelta
from lorikeet.api.large_bodies import PromptRoute, prepared_body
from lorikeet.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    prompts_of,
    refuse_unsupported,
)
from lorikeet.api.service import GenerationSpec, JsonBody, SenderDep, ServiceDep
from lorikeet.api.streaming import CancelOnDisconnect, EventStream
from lorikeet.api.text_processor import TextProcessor, content_text
from lorikeet.api.threads import off_the_loop
from lorikeet.core.plan import Token

_DONE = b"data: [DONE]\n\n"


class AnswerFormat(Protocol):
    """How one route writes its answers.

    Attributes:
        id_prefix: start of the answer's id.
        object: its kind when complete.
        chunk_object: its kind in a stream.
        needs_every_token: a chunk must be sent even if its tokens made no text visible.
    """

    id_prefix: str
    object: str
    chunk_object: str
    needs_every_token: bool

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a stream, if there is one."""
        ...

    def chunk(self, piece: OutputDelta) -> dict[str, Any]:
        """Return the choice of a stream's chunk."""
        ...

    def complete(self, index: int, text: str, tokens: list[Token], last: OutputDelta) -> dict[str, Any]:
        """Return a whole choice; ``last`` says how it ended."""
        ...


async def respond(
    http: Request, body: GenerationBody, generation: Generation, answer: AnswerFormat, model: str
) -> Response:
    """Answer with what ``generation`` brings, and close it in the end.

    Errors before the first token become an HTTP status; later ones an event in the stream.

    Args:
        http: the request, its body read.
        body: says whether and how to stream.
        generation: under way.
        answer: the route's format.
        model: name to report.
    """
    head = {
        "id": f"{answer.id_prefix}-{http.state.request_id}",
        "object": answer.chunk_object if body.stream else answer.object,
        "created": int(time.time()),
        "model": model,
    }

    async def make() -> Response:
        if not body.stream:
            whole = await _collect(generation, answer, head)
            generation.close()  # before a client that reads slowly has read it
            return Response(whole, media_type="application/json")
        events = _events(generation, answer, body, head)
        return EventStream(_chain(await anext(events), events), generation.sent_until_s)

    return CancelOnDisconnect(make, generation.close)


async def _collect(generation: Generation, answer: AnswerFormat, head: dict[str, Any]) -> bytes:
    texts: dict[int, list[str]] = {choice.index: [] for choice in generation.choices}
    tokens: dict[int, list[Token]] = {choice.index: [] for choice in generation.choices}
    last: dict[int, OutputDelta] = {}
    async for piece in generation.pieces():
        texts[piece.index].append(piece.text)
        tokens[piece.index].extend(piece.tokens)
        last[piece.index] = piece

    def write() -> bytes:
        choices = [answer.complete(index, "".join(texts[index]), tokens[index], last[index]) for index in texts]
        return msgspec.json.encode(head | {"choices": choices, "usage": _usage(generation)})

    listed = tokens.values() if answer.needs_every_token else ()
    return await off_the_loop(write, sum(1 + len(token.top) for each in listed for token in each))


async def _events(
    generation: Generation, answer: AnswerFormat, body: GenerationBody, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    begun: set[int] = set()

    def chunk(choice: dict[str, Any], completion_tokens: int) -> bytes:
        value = head | {"choices": [choice]}
        if body.wants_continuous_usage:
            prompt_tokens = len(generation.choices[choice["index"]].handle.request.prompt_token_ids)
            value["usage"] = _counts(prompt_tokens, completion_tokens)
        return _event(value)

    try:
        async for piece in generation.pieces():
            event = b""
            if piece.index not in begun:
                begun.add(piece.index)
                opening = answer.first(piece.index)
                event = b"" if opening is None else chunk(opening, 0)
            if piece.text or piece.finish_reason or answer.needs_every_token or body.wants_continuous_usage:
                event += chunk(answer.chunk(piece), piece.completion_tokens)
            if event:
                yield event
    except ApiError as error:
        if not begun:
            raise
        yield _event(error.body()) + _DONE
        return
    if body.wants_usage:
        yield _event(head | {"choices": [], "usage": _usage(generation)})
    yield _DONE


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(generation: Generation) -> dict[str, Any]:
    """Count every prompt once, however many choices it has; what one computed, the next ones found."""
    prompts: dict[int, tuple[int, int]] = {}
    for choice in generation.choices:
        token_ids, cached_tokens = choice.handle.request.prompt_token_ids, choice.handle.timings.cached_tokens
        known = prompts.get(id(token_ids), (0, cached_tokens))
        prompts[id(token_ids)] = len(token_ids), min(known[1], cached_tokens)
    prompt_tokens, cached_tokens = map(sum, zip(*prompts.values(), strict=True))
    usage = _counts(prompt_tokens, sum(choice.completion_tokens for choice in generation.choices))
    return usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


_LOWEST = -9999.0
"""JSON knows no infinity; this is what vLLM sends in its place."""


def chat_logprobs(texts: TextProcessor, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion."""
    content = []
    for token in tokens:
        entry = _entry(texts, token.token_id, token.logprob)
        content.append(entry | {"top_logprobs": [_entry(texts, *pair) for pair in token.top]})
    return {"content": content}


class TextOffsets:
    """Where in an answer's text its tokens begin; the parts of a character begin where it does.

    Args:
        texts: the model's.
        skip_special_tokens: whether the text lacks them.
    """

    def __init__(self, texts: TextProcessor, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token_id: int) -> int:
        """Return the offset of the next token."""
        begin = self._offset
        if not (self._skip_special_tokens and self._texts.is_special(token_id)):
            self._offset += len(self._decoder.decode(bytes(self._texts.token(token_id).utf8)))
        return begin


def completion_logprobs(texts: TextProcessor, tokens: Sequence[Token], offsets: TextOffsets) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a completion; ``offsets`` counts from the answer's first token on."""
    strings = [texts.token(token.token_id).text for token in tokens]
    return {
        "tokens": strings,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(texts, token, string) for token, string in zip(tokens, strings, strict=True)],
        "text_offset": [offsets.add(token.token_id) for token in tokens],
    }


def _top(texts: TextProcessor, token: Token, string: str) -> dict[str, float]:
    """The chosen token is among them even if it is not one of the likeliest, as in vLLM.

    Tokens of the same text, such as a letter and its byte, are told apart by vLLM's other name for a token.
    """
    top = {string: _finite(token.logprob)}
    for token_id, logprob in token.top:
        if token_id != token.token_id:
            text = texts.token(token_id).text
            top[f"token_id:{token_id}" if text in top else text] = _finite(logprob)
    return top


def _entry(texts: TextProcessor, token_id: int, logprob: float | None) -> dict[str, Any]:
    token = texts.token(token_id)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": token.utf8}


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None else max(logprob, _LOWEST)


router = APIRouter(dependencies=[JsonBody], route_class=PromptRoute)

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """See :class:`lorikeet.api.completions.AnswerFormat`.

    Args:
        texts: the model's.
        logprobs: whether to report them.
        echoes: text that opens the choices of each prompt; empty for none.
        choices: how many each prompt has.
        skip_special_tokens: whether texts lack them.
    """

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, texts: TextProcessor, *, logprobs: bool, echoes: list[str], choices: int, skip_special_tokens: bool
    ) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._echoes = echoes
        self._choices = choices
        self._offsets: dict[int, TextOffsets] = {}
        self.needs_every_token = logprobs

    def first(self, index: int) -> dict[str, Any] | None:
        """The prompt, if it is to be echoed."""
        return _choice(index, self._echo(index), None, None, None) if self._echoes else None

    def chunk(self, piece: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk."""
        logprobs = self._logprobs(piece.index, piece.tokens)
        return _choice(piece.index, piece.text, logprobs, piece.finish_reason, piece.stop_reason)

    def complete(self, index: int, text: str, tokens: list[Token], last: OutputDelta) -> dict[str, Any]:
        """Return a whole choice."""
        text = self._echo(index) + text
        return _choice(index, text, self._logprobs(index, tokens), last.finish_reason, last.stop_reason)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _logprobs(self, index: int, tokens: tuple[Token, ...] | list[Token]) -> dict[str, Any] | None:
        if not self.needs_every_token:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(self._texts, skip_special_tokens=self._skip_special_tokens)
        return completion_logprobs(self._texts, tokens, offsets)


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


@router.post("/v1/completions")
async def completions(http: Request, body: CompletionRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Continue one or several prompts."""
    refuse_unsupported(body)
    if body.echo and body.logprobs is not None:
        raise not_supported("echo together with logprobs is not supported yet.", "echo")
    target = service.models.resolve(body.model, body.lora_path)
    prepared = prepared_body(http)
    prompts = prepared.prompts if prepared else prompts_of(body)

    async def encode() -> list[list[int]]:
        special = body.add_special_tokens is not False
        return await service.texts.encode(prompts, add_special_tokens=special, limits=service.limits)

    job = GenerationSpec(
        prompts=len(prompts),
        encode=encode,
        prompt_param="prompt",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        arrival_s=prepared.arrival_s if prepared else None,
    )
    generation = await service.start(body, target, job, sender)
    try:
        echoes = list(prepared.texts) if prepared else await service.texts.decode_all(prompts) if body.echo else []
    except BaseException:
        generation.close()
        raise
    answer = CompletionFormat(
        service.texts,
        logprobs=body.logprobs is not None,
        echoes=echoes,
        choices=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return await respond(http, body, generation, answer, target.name)


class ChatFormat:
    """See :class:`lorikeet.api.completions.AnswerFormat`.

    Args:
        texts: the model's.
        logprobs: whether to report them.
        echo: text that opens every choice.
    """

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, texts: TextProcessor, *, logprobs: bool, echo: str = "") -> None:
        self._texts = texts
        self._echo = echo
        self.needs_every_token = logprobs

    def first(self, index: int) -> dict[str, Any]:
        """The role comes in a chunk of its own, with the echo."""
        delta = {"role": "assistant", "content": self._echo}
        return self._choice(index, "delta", delta, None, None) | {"logprobs": None}

    def chunk(self, piece: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk."""
        delta = {"content": piece.text} if piece.text else {}
        choice = self._choice(piece.index, "delta", delta, piece.finish_reason, piece.stop_reason)
        return choice | {"logprobs": self._logprobs(piece.tokens)}

    def complete(self, index: int, text: str, tokens: list[Token], last: OutputDelta) -> dict[str, Any]:
        """Return a whole choice."""
        message = {"role": "assistant", "content": self._echo + text}
        choice = self._choice(index, "message", message, last.finish_reason, last.stop_reason)
        return choice | {"logprobs": self._logprobs(tokens)}

    def _choice(
        self,
        index: int,
        key: str,
        content: dict[str, str],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, key: content, "finish_reason": finish_reason}
        return choice if finish_reason is None else choice | {"stop_reason": stop_reason}

    def _logprobs(self, tokens: tuple[Token, ...] | list[Token]) -> dict[str, Any] | None:
        return chat_logprobs(self._texts, tokens) if self.needs_every_token else None


@router.post("/v1/chat/completions")
async def chat_completions(
    http: Request, body: ChatCompletionRequest, service: ServiceDep, sender: SenderDep
) -> Response:
    """Answer a conversation."""
    refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    target = service.models.resolve(body.model, body.lora_path)
    prepared = prepared_body(http)

    async def encode() -> list[list[int]]:
        if prepared:
            return prepared.prompts
        token_ids = await service.texts.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=body.chat_template_kwargs or {},
            continue_final_message=bool(body.continue_final_message),
            limits=service.limits,
        )
        return [token_ids]

    job = GenerationSpec(
        prompts=1,
        encode=encode,
        prompt_param="messages",
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        arrival_s=prepared.arrival_s if prepared else None,
    )
    generation = await service.start(body, target, job, sender)
    answer = ChatFormat(service.texts, logprobs=bool(body.logprobs), echo=_echo(body))
    return await respond(http, body, generation, answer, target.name)


def _echo(body: ChatCompletionRequest) -> str:
    """Return the text that opens the answer: as in vLLM, the last message's if the answer has the same role."""
    last = body.messages[-1]
    if not body.echo or (last.role != "assistant" and body.add_generation_prompt is not False):
        return ""
    return content_text(last)
