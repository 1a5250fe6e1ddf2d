"""``POST /v1/completions`` and ``POST /v1/chat/completions``.

Both submit a body to the service and write the generation's deltas as one JSON object or as a stream of chunks. They
differ only in how prompts are encoded and how choices are written.
"""

import codecs
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from lorikeet.api.chat_output import AnswerPart, AnswerReader, tool_use, whole_calls
from lorikeet.api.conversation import content_text
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
from lorikeet.api.structured_output import grammar_spec
from lorikeet.api.text_processor import TextProcessor
from lorikeet.api.threads import off_the_loop
from lorikeet.core.plan import Token

_DONE = b"data: [DONE]\n\n"


class AnswerFormat(Protocol):
    """How one route writes its answers.

    Attributes:
        id_prefix: start of the answer's ``id``.
        object: value of ``object`` in a complete answer.
        chunk_object: value of ``object`` in a chunk.
        needs_every_token: send a chunk also for tokens that add no text.
    """

    id_prefix: str
    object: str
    chunk_object: str
    needs_every_token: bool

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the chunk that opens a stream; None for no such chunk."""
        ...

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        ...

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether the choice of a chunk adds anything to the answer."""
        ...

    def complete(self, index: int, text: str, tokens: list[Token], last: OutputDelta) -> dict[str, Any]:
        """Return a complete choice; ``last`` says how it ended."""
        ...


async def respond(
    http: Request, body: GenerationBody, generation: Generation, answer: AnswerFormat, model: str
) -> Response:
    """Return the answer of ``generation``, which is closed in the end.

    Errors before the first token become an HTTP status; later ones an event in the stream.

    Args:
        http: the request, its body read.
        body: says whether and how to stream.
        generation: running.
        answer: the route's format.
        model: name to report.
    """
    envelope = {
        "id": f"{answer.id_prefix}-{http.state.request_id}",
        "object": answer.chunk_object if body.stream else answer.object,
        "created": int(time.time()),
        "model": model,
    }

    async def make() -> Response:
        if not body.stream:
            whole = await _collect(generation, answer, envelope)
            generation.close()  # now, so that a slow client does not hold the request's place
            return Response(whole, media_type="application/json")
        events = _events(generation, answer, body, envelope)
        return EventStream(_chain(await anext(events), events), generation.read_until_s)

    return CancelOnDisconnect(make, generation.close)


async def _collect(generation: Generation, answer: AnswerFormat, envelope: dict[str, Any]) -> bytes:
    texts: dict[int, list[str]] = {choice.index: [] for choice in generation.choices}
    tokens: dict[int, list[Token]] = {choice.index: [] for choice in generation.choices}
    last: dict[int, OutputDelta] = {}
    async for delta in generation.deltas():
        texts[delta.index].append(delta.text)
        tokens[delta.index].extend(delta.tokens)
        last[delta.index] = delta

    def write() -> bytes:
        choices = [answer.complete(index, "".join(texts[index]), tokens[index], last[index]) for index in texts]
        return msgspec.json.encode(envelope | {"choices": choices, "usage": _usage(generation)})

    listed = tokens.values() if answer.needs_every_token else ()
    return await off_the_loop(write, sum(1 + len(token.top) for each in listed for token in each))


async def _events(
    generation: Generation, answer: AnswerFormat, body: GenerationBody, envelope: dict[str, Any]
) -> AsyncIterator[bytes]:
    opened: set[int] = set()

    def chunk(choice: dict[str, Any], completion_tokens: int) -> bytes:
        value = envelope | {"choices": [choice]}
        if body.wants_continuous_usage:
            prompt_tokens = len(generation.choices[choice["index"]].handle.request.prompt_token_ids)
            value["usage"] = _counts(prompt_tokens, completion_tokens)
        return _event(value)

    try:
        async for delta in generation.deltas():
            event = b""
            if delta.index not in opened:
                opened.add(delta.index)
                opening = answer.first(delta.index)
                event = b"" if opening is None else chunk(opening, 0)
            choice = answer.chunk(delta)
            is_wanted = answer.needs_every_token or body.wants_continuous_usage
            if is_wanted or delta.finish_reason or answer.adds(choice):
                event += chunk(choice, delta.completion_tokens)
            if event:
                yield event
    except ApiError as error:
        if not opened:
            raise
        yield _event(error.body()) + _DONE
        return
    if body.wants_usage:
        yield _event(envelope | {"choices": [], "usage": _usage(generation)})
    yield _DONE


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(generation: Generation) -> dict[str, Any]:
    """Return the usage. Each prompt counts once for all its choices, with the fewest cached tokens of any of them."""
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


_MIN_LOGPROB = -9999.0
"""JSON has no infinity; vLLM sends this value instead."""


def chat_logprobs(text_processor: TextProcessor, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion."""
    content = []
    for token in tokens:
        entry = _entry(text_processor, token.token_id, token.logprob)
        content.append(entry | {"top_logprobs": [_entry(text_processor, *pair) for pair in token.top]})
    return {"content": content}


class TextOffsets:
    """Where in an answer's text its tokens begin; the parts of a character begin where it does.

    Args:
        text_processor: of the model.
        skip_special_tokens: whether the text lacks them.
    """

    def __init__(self, text_processor: TextProcessor, *, skip_special_tokens: bool) -> None:
        self._text_processor = text_processor
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token_id: int) -> int:
        """Return the offset of the next token."""
        begin = self._offset
        if not (self._skip_special_tokens and self._text_processor.is_special(token_id)):
            self._offset += len(self._decoder.decode(bytes(self._text_processor.token(token_id).utf8)))
        return begin


def completion_logprobs(text_processor: TextProcessor, tokens: Sequence[Token], offsets: TextOffsets) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a completion; ``offsets`` counts from the answer's first token on."""
    strings = [text_processor.token(token.token_id).text for token in tokens]
    return {
        "tokens": strings,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(text_processor, token, string) for token, string in zip(tokens, strings, strict=True)],
        "text_offset": [offsets.add(token.token_id) for token in tokens],
    }


def _top(text_processor: TextProcessor, token: Token, string: str) -> dict[str, float]:
    """The chosen token is among them even if it is not one of the likeliest, as in vLLM.

    Tokens of the same text, such as a letter and its byte, are told apart by vLLM's other name for a token.
    """
    top = {string: _finite(token.logprob)}
    for token_id, logprob in token.top:
        if token_id != token.token_id:
            text = text_processor.token(token_id).text
            top[f"token_id:{token_id}" if text in top else text] = _finite(logprob)
    return top


def _entry(text_processor: TextProcessor, token_id: int, logprob: float | None) -> dict[str, Any]:
    token = text_processor.token(token_id)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": token.utf8}


def _finite(logprob: float | None) -> float:
    return _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)


router = APIRouter(dependencies=[JsonBody], route_class=PromptRoute)

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """Writes the choices of ``/v1/completions``.

    Args:
        text_processor: of the model.
        logprobs: report log probabilities.
        echoes: text of each prompt, to open its choices; empty for no echo.
        choices: number of choices of each prompt.
        skip_special_tokens: the texts lack them.
    """

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        text_processor: TextProcessor,
        *,
        logprobs: bool,
        echoes: list[str],
        choices: int,
        skip_special_tokens: bool,
    ) -> None:
        self._text_processor = text_processor
        self._skip_special_tokens = skip_special_tokens
        self._echoes = echoes
        self._choices = choices
        self._offsets: dict[int, TextOffsets] = {}
        self.needs_every_token = logprobs

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice with the prompt's text, if it is echoed."""
        return _choice(index, self._echo(index), None, None, None) if self._echoes else None

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        logprobs = self._logprobs(delta.index, delta.tokens)
        return _choice(delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether a chunk adds text."""
        return bool(choice["text"])

    def complete(self, index: int, text: str, tokens: list[Token], last: OutputDelta) -> dict[str, Any]:
        """Return a complete choice; ``last`` says how it ended."""
        text = self._echo(index) + text
        return _choice(index, text, self._logprobs(index, tokens), last.finish_reason, last.stop_reason)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def _logprobs(self, index: int, tokens: tuple[Token, ...] | list[Token]) -> dict[str, Any] | None:
        if not self.needs_every_token:
            return None
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(
                self._text_processor, skip_special_tokens=self._skip_special_tokens
            )
        return completion_logprobs(self._text_processor, tokens, offsets)


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
    prepared = prepared_body(http)
    target = prepared.target if prepared else await service.resolve(body.model, body.lora_path)
    chat = await service.chat_of(target)
    prompts = prepared.prompts if prepared else prompts_of(body)

    async def encode() -> list[list[int]]:
        special = body.add_special_tokens is not False
        return await chat.text_processor.encode(prompts, add_special_tokens=special, limits=chat.limits)

    spec = GenerationSpec(
        prompts=len(prompts),
        encode=encode,
        prompt_param="prompt",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        arrival_s=prepared.arrival_s if prepared else None,
        grammar=grammar_spec(body),
    )
    generation = await service.start(body, target, spec, sender)
    try:
        echoes = (
            list(prepared.texts) if prepared else await chat.text_processor.decode_all(prompts) if body.echo else []
        )
    except BaseException:
        generation.close()
        raise
    answer = CompletionFormat(
        chat.text_processor,
        logprobs=body.logprobs is not None,
        echoes=echoes,
        choices=body.n or 1,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return await respond(http, body, generation, answer, target.name)


class ChatFormat:
    """Writes the choices of ``/v1/chat/completions``.

    Args:
        text_processor: of the model.
        logprobs: report log probabilities.
        echo: text that opens every choice.
        readers: what reads each choice, by its index; none if their texts are the content as they are.
        is_named: whether the request names the function to call.
    """

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        text_processor: TextProcessor,
        *,
        logprobs: bool,
        echo: str = "",
        readers: Sequence[AnswerReader] = (),
        is_named: bool = False,
    ) -> None:
        self._text_processor = text_processor
        self._echo = echo
        self._readers = readers
        self._is_named = is_named
        self.needs_every_token = logprobs

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice with the role and the echo, which is sent in a chunk of its own."""
        delta = {"role": "assistant", "content": self._echo}
        return self._choice(index, "delta", delta, None, None) | {"logprobs": None}

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """Return the choice of one chunk of a stream."""
        content: dict[str, Any] = {}
        for part in self._parts(delta.index, delta.text, is_last=delta.finish_reason is not None):
            content = _added(content, part)
        choice = self._choice(delta.index, "delta", content, delta.finish_reason, delta.stop_reason)
        return choice | {"logprobs": self._logprobs(delta.tokens)}

    def adds(self, choice: dict[str, Any]) -> bool:
        """Return whether a chunk adds content, thoughts or calls."""
        return bool(choice["delta"])

    def complete(self, index: int, text: str, tokens: list[Token], last: OutputDelta) -> dict[str, Any]:
        """Return a complete choice; ``last`` says how it ended."""
        parts = self._parts(index, text, is_last=True)
        content = self._echo + "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts := "".join(part.reasoning for part in parts):
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if calls := [call for part in parts for call in part.calls]:
            message |= {"content": content or None, "tool_calls": whole_calls(calls)}
        choice = self._choice(index, "message", message, last.finish_reason, last.stop_reason)
        return choice | {"logprobs": self._logprobs(tokens)}

    def _parts(self, index: int, text: str, *, is_last: bool) -> list[AnswerPart]:
        if not self._readers:
            return [AnswerPart(text)]
        reader = self._readers[index]
        return [reader.push(text), *([reader.finish()] if is_last else [])]

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
        return chat_logprobs(self._text_processor, tokens) if self.needs_every_token else None


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


@router.post("/v1/chat/completions")
async def chat_completions(
    http: Request, body: ChatCompletionRequest, service: ServiceDep, sender: SenderDep
) -> Response:
    """Answer a conversation."""
    refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    prepared = prepared_body(http)
    target = prepared.target if prepared else await service.resolve(body.model, body.lora_path)
    chat, use = await service.chat_of(target), tool_use(body)
    chat.check_tools(use)

    async def encode() -> list[list[int]]:
        if prepared:
            return prepared.prompts
        return [await service.encode_chat(body, chat)]

    spec = GenerationSpec(
        prompts=1,
        encode=encode,
        prompt_param="messages",
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        arrival_s=prepared.arrival_s if prepared else None,
        kept_tokens=chat.kept_tokens(use),
        grammar=chat.grammar(use, grammar_spec(body)),
    )
    generation = await service.start(body, target, spec, sender)
    readers = [
        chat.reader(use, choice.handle.request.prompt_token_ids, include_reasoning=body.include_reasoning is not False)
        for choice in generation.choices
    ]
    answer = ChatFormat(
        chat.text_processor,
        logprobs=bool(body.logprobs),
        echo=_echo(body),
        readers=[reader for reader in readers if reader is not None],
        is_named=use is not None and use.is_named,
    )
    return await respond(http, body, generation, answer, target.name)


def _echo(body: ChatCompletionRequest) -> str:
    """Return the text that opens the answer: as in vLLM, the last message's if the answer has the same role."""
    last = body.messages[-1]
    if not body.echo or (last.role != "assistant" and body.add_generation_prompt is not False):
        return ""
    return content_text(last)
