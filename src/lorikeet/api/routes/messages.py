"""Serves Anthropic's messages API by chats: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from lorikeet.api.answer_blocks import AnswerBlocks, Block, BlockAdded, BlockEvent, BlockKind, BlockOpened
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.ignored_parts import ignored_header
from lorikeet.chat.json_text import read_arguments
from lorikeet.chat.messages_body import CountTokensRequest, MessagesRequest
from lorikeet.chat.protocol import TokenizeRequest, refuse_unsupported
from lorikeet.http.anthropic_errors import anthropic_error
from lorikeet.http.errors import ApiError
from lorikeet.http.model_routes import COUNT_TOKENS, MESSAGES
from lorikeet.http.routes import Routes
from lorikeet.http.streaming import CancelOnDisconnect, EventStream, begun
from lorikeet.serving.chat_answer import ChatAnswer, check_one_answer, start_chat
from lorikeet.serving.large_bodies import prepared_body
from lorikeet.serving.usage import usage_of

ROUTES = Routes()

_DELTA = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.THOUGHTS: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


@ROUTES.add(MESSAGES)
async def messages(http: Request, body: MessagesRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Answer a conversation."""
    refuse_unsupported(body)
    check_one_answer(body)
    answer = await start_chat(service, body.chat(), sender, prepared_body(http))
    writer = MessageWriter(answer, f"msg_{sender.request_id}")
    headers = ignored_header(body.ignored)

    async def make() -> Response:
        if body.stream:
            stream = EventStream(await begun(_events(writer)), answer.generation.read_until_s)
            stream.headers.update(headers)
            return stream
        async for step in answer.steps():
            writer.blocks.push(step)
        answer.generation.close()
        return Response(msgspec.json.encode(writer.message()), headers=headers, media_type="application/json")

    return CancelOnDisconnect(make, answer.generation.close)


@ROUTES.add(COUNT_TOKENS)
async def count_tokens(
    http: Request, response: Response, body: CountTokensRequest, service: ServiceDep, sender: SenderDep
) -> Any:
    """Return the number of tokens of a prompt."""
    refuse_unsupported(body)
    if prepared := prepared_body(http):
        if prepared.images:
            response.headers.update(ignored_header(body.ignored))
            return {"input_tokens": len(prepared.prompts[0])}
        return Response(prepared.answer, headers=ignored_header(body.ignored), media_type="application/json")
    response.headers.update(ignored_header(body.ignored))
    target = await service.resolve(body, sender, generates=False)
    chat = await service.chats.settings_of(target.chat)
    asked = body.tokenize_body()
    assert asked.messages is not None
    prompt = await service.encode_messages(TokenizeRequest, asked, asked.messages, chat)
    return {"input_tokens": len(prompt.token_ids)}


class MessageWriter:
    """Writes one answer as Anthropic's message.

    Args:
        answer: the running answer.
        message_id: id to report.

    Attributes:
        answer: the running answer.
        blocks: the answer's blocks so far.
    """

    def __init__(self, answer: ChatAnswer, message_id: str) -> None:
        self.blocks = AnswerBlocks()
        self.answer = answer
        self._id = message_id

    def message(self) -> dict[str, Any]:
        """Return the whole message."""
        content = [_whole(block) for block in self.blocks.blocks]
        return self.opening() | {"content": content, **self.end(), "usage": self.usage()}

    def opening(self) -> dict[str, Any]:
        """Return the empty message that opens a stream."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.target.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "system_fingerprint": self.answer.generation.provenance().fingerprint,
            "usage": self.usage() | {"output_tokens": 0},
        }

    def end(self) -> dict[str, Any]:
        """Return the fields for the end of the answer: ``stop_reason`` and ``stop_sequence``."""
        reason = self.blocks.finish_reason
        stop = self.blocks.stop_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if self.blocks.has_calls else "end_turn", "stop_sequence": None}

    def usage(self) -> dict[str, Any]:
        """Return the token counts; prompt tokens found in KV are counted separately."""
        usage = usage_of(self.answer.generation)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return _opened(block) | {"input": read_arguments(block.text)}
    return _opened(block) | {_DELTA[block.kind][1]: block.text}


def _opened(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.THOUGHTS:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


async def _events(writer: MessageWriter) -> AsyncIterator[bytes]:
    has_begun = False
    try:
        async for step in writer.answer.steps():
            changes = writer.blocks.push(step)
            if not has_begun:
                has_begun = True
                yield _event("message_start", message=writer.opening())
            if changes:
                yield b"".join(map(_block_event, changes))
    except ApiError as error:
        if not has_begun:
            raise
        yield _event("error", error=anthropic_error(error.status, error.message))
        return
    usage = writer.usage()
    yield _event("message_delta", delta=writer.end(), usage=usage) + _event("message_stop")


def _block_event(change: BlockEvent) -> bytes:
    index = change.block.index
    if isinstance(change, BlockOpened):
        return _event("content_block_start", index=index, content_block=_opened(change.block))
    if isinstance(change, BlockAdded):
        kind, key = _DELTA[change.block.kind]
        return _event("content_block_delta", index=index, delta={"type": kind, key: change.text})
    return _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
