"""Answers conversations: ``POST /v1/chat/completions``, and vLLM's batches of conversations."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from lorikeet.api.answer_writer import TokenReport, check_stream, respond, tokens_of, versions_of
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.chat_output import AnswerPart, AnswerReader, whole_calls
from lorikeet.chat.conversation import content_text
from lorikeet.chat.logprobs import chat_logprobs
from lorikeet.chat.protocol import Body, ChatCompletionRequest, refuse_unsupported, validated
from lorikeet.chat.sampling import of_prompt
from lorikeet.client.client import RequestHandle
from lorikeet.core.plan import Token
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.model_routes import CHAT, CHAT_BATCH
from lorikeet.http.routes import Routes
from lorikeet.http.streaming import CancelOnDisconnect
from lorikeet.http.threads import off_the_loop
from lorikeet.serving.chat_answer import ChatAnswer, start_chat
from lorikeet.serving.generation import Generation, OutputDelta
from lorikeet.serving.large_bodies import prepared_body
from lorikeet.serving.service import Service
from lorikeet.serving.usage import token_counts, usage_of

ROUTES = Routes()


class ChatFormat:
    """Writes the choices of ``/v1/chat/completions``.

    Args:
        report: the fields that describe tokens.
        handles: the requests of all choices.
        echo: text that opens every choice.
        readers: the reader of each choice, by its index; none if the texts are the content unchanged.
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
        """Return the fields that describe the prompt; a stream has only token ids, if the body requests them."""
        fields = self._report.of_prompt(self._handles[index])
        return fields if self._is_complete else {key: value for key, value in fields.items() if value is not None}

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice of the first chunk, which has only the role and the echo."""
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
        """Return the number of tokens of thoughts, if thoughts are separated."""
        counts = [each.reasoning_tokens for each in self._readers if each.reasoning_tokens is not None]
        return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}

    def complete(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return a complete choice."""
        last = deltas[-1]
        parts = [part for delta in deltas for part in self._parts(delta)]
        content = self._echo + "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts := "".join(part.reasoning for part in parts):
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if calls := [call for part in parts for call in part.calls]:
            message |= {"content": content or None, "tool_calls": whole_calls(calls)}
        choice = self._choice(index, "message", message, last.finish_reason, last.stop_reason)
        self._is_complete = True
        tokens = tokens_of(deltas)
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
            finish_reason = "tool_calls"  # OpenAI reports it only if the request does not name the function.
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
    check_stream(body)
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
    """Body of ``POST /v1/chat/completions/batch``: several conversations that share the other fields of a chat."""

    messages: Annotated[list[list[dict[str, Any]]], Field(min_length=1, max_length=MAX_CONVERSATIONS)]

    def chats(self) -> list[ChatCompletionRequest]:
        """Return a chat for each conversation.

        Raises:
            ApiError: 400, a conversation is not valid, or a field does not work with several.
        """
        fields = self.model_extra or {}
        for name in ("stream", "stream_options"):
            if fields.get(name):
                raise bad_request(f"{name}: several conversations cannot be streamed.", name)
        if fields.get("n") not in (None, 1):
            raise bad_request("n: must be 1; each conversation gets one choice.", "n")
        found = []
        for at, messages in enumerate(self.messages):
            try:
                found.append(validated(ChatCompletionRequest, fields | {"messages": messages}))
            except ApiError as error:
                raise bad_request(error.message.replace("messages", f"messages.{at}", 1), error.param) from error
        return found


@ROUTES.add(CHAT_BATCH)
async def chat_batch(http: Request, body: ChatBatchRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Answer several conversations in one answer, with a choice for each, as vLLM does."""
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
            for choice, chat, answer in zip(choices, chats, answers, strict=True):
                choice["system_fingerprint"] = answer.generation.provenance().fingerprint
                choice.update(versions_of(answer.generation, chat, 0))
            counts = [usage_of(answer.generation) for answer in answers]
            usage = token_counts(*(sum(one[key] for one in counts) for key in ("prompt_tokens", "completion_tokens")))
            envelope = {
                "id": f"{ChatFormat.id_prefix}-{http.state.request_id}",
                "object": ChatFormat.object,
                "created": int(time.time()),
                "model": answers[0].target.name,
                "system_fingerprint": answers[0].generation.provenance().fingerprint,
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
    """Return the text that opens the answer: the last message's if its role is the answer's, as in vLLM."""
    last = body.messages[-1]
    if not body.echo or (last.role != "assistant" and body.add_generation_prompt is not False):
        return ""
    return content_text(last)
