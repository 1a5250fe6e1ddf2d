"""Serves OpenAI's responses API, ``/v1/responses``, by chats."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from lorikeet.api.answer_blocks import (
    AnswerBlocks,
    Block,
    BlockAdded,
    BlockEvent,
    BlockKind,
    BlockOpened,
)
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.ignored_parts import ignored_header
from lorikeet.chat.logprobs import TokenNames, chat_logprobs
from lorikeet.chat.protocol import refuse_unsupported
from lorikeet.chat.responses_body import ResponsesRequest, in_these_words
from lorikeet.chat.responses_tools import CustomInput, ServedTool, whole_input
from lorikeet.core.plan import Token
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.http.errors import ApiError, bad_request, unexpected_failure
from lorikeet.http.logs import log
from lorikeet.http.model_routes import CANCEL_RESPONSE, DELETE_RESPONSE, RESPONSE_INPUT, RESPONSES, RETRIEVE_RESPONSE
from lorikeet.http.routes import Routes
from lorikeet.http.streaming import CancelOnDisconnect, EventStream, begun
from lorikeet.http.threads import off_the_loop
from lorikeet.serving.chat_answer import ChatAnswer, check_one_answer, start_chat
from lorikeet.serving.large_bodies import PreparedBody, prepare, prepared_body
from lorikeet.serving.requests import Sender
from lorikeet.serving.service import Service
from lorikeet.serving.stored_responses import BackgroundRun, StoredResponse
from lorikeet.serving.usage import usage_of

ROUTES = Routes()

_ID_BYTES = 24
_DEFAULT_ITEMS = 20
_MAX_ITEMS = 100


@ROUTES.add(RESPONSES)
async def create(http: Request, body: ResponsesRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Answer an input, alone or after a stored response."""
    refuse_unsupported(body)
    check_one_answer(body)
    stores = body.store is not False and service.responses.max_number > 0 and not sender.is_batch
    if body.background and not stores:
        raise bad_request("background needs `store` to be true, and a server that stores responses.", "background")
    prepared = prepared_body(http)
    previous = b"" if prepared else service.responses.conversation(sender.tenant, body.previous_response_id)
    with ExitStack() as holding:
        if len(previous) > SMALL_BODY_BYTES:
            prepared = await _prepare(service, body, len(previous), sender, holding)
        conversation = b""
        if stores:
            conversation = prepared.conversation if prepared else body.conversation(previous)
        try:
            answer = await start_chat(service, body.chat(b"" if prepared else previous), sender, prepared)
        except ApiError as error:
            raise in_these_words(error) from error
    names = TokenNames(answer.chat.text_processor, as_ids=bool(body.return_tokens_as_token_ids))
    writer = ResponseWriter(body, answer, names if body.wants_logprobs else None, is_stored=stores)
    headers = ignored_header(body.ignored)
    stored = StoredResponse(writer.response_id, conversation)
    if body.background:
        return _in_background(body, service, sender.tenant, writer, stored)

    def keep(content: bytes) -> None:
        if stores and writer.status in ("completed", "incomplete"):
            stored.response = content
            service.responses.put(sender.tenant, stored)

    async def make() -> Response:
        if body.stream:
            stream = EventStream(await begun(_stream(writer, keep)), answer.generation.read_until_s)
            stream.headers.update(headers)
            return stream
        async for step in answer.steps():
            writer.blocks.push(step)
        writer.finish()
        answer.generation.close()
        content = await off_the_loop(writer.encoded, writer.scores)
        keep(content)
        whole = _json(content)
        whole.headers.update(headers)
        return whole

    return CancelOnDisconnect(make, answer.generation.close)


async def _prepare(
    service: Service, body: ResponsesRequest, previous_bytes: int, sender: Sender, holding: ExitStack
) -> PreparedBody:
    """Read a body that continues a long conversation in another process, like large bodies."""
    content = body.model_dump_json(exclude_unset=True).encode()
    async with service.body_gate.hold(min(previous_bytes, service.body_gate.max_body_bytes)):
        prepared, _ = await prepare(
            service, ResponsesRequest, content, sender.tenant, sender.access, sender.split_key(body.user), holding
        )
    return prepared


@ROUTES.add(RETRIEVE_RESPONSE)
async def retrieve(
    response_id: str,
    service: ServiceDep,
    sender: SenderDep,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """Return a stored response; or, for a background response, its stream from an event on."""
    stored = service.responses.get(sender.tenant, response_id)
    if not stream:
        return _json(stored.as_json())
    run = stored.run
    if run is None or not run.keeps_events:
        raise bad_request("Only a background response that was created as a stream can be streamed again.", "stream")
    return _followed(run, starting_after + 1)


@ROUTES.add(DELETE_RESPONSE)
async def delete(response_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Delete a stored response, and cancel it if it is still running."""
    stored = service.responses.get(sender.tenant, response_id)
    if stored.run is not None:
        await stored.run.cancel()
    service.responses.delete(sender.tenant, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@ROUTES.add(CANCEL_RESPONSE)
async def cancel(response_id: str, service: ServiceDep, sender: SenderDep) -> Response:
    """Stop a background response; an ended response does not change."""
    stored = service.responses.get(sender.tenant, response_id)
    if stored.run is None:
        raise bad_request(
            "Cannot cancel a synchronous response: only those made with `background` can be.", "response_id"
        )
    await stored.run.cancel()
    return _json(stored.as_json())


@ROUTES.add(RESPONSE_INPUT)
async def input_items(
    response_id: str,
    service: ServiceDep,
    sender: SenderDep,
    limit: Annotated[int, Query(ge=1, le=_MAX_ITEMS)] = _DEFAULT_ITEMS,
    order: Literal["asc", "desc"] = "desc",
    after: str = "",
) -> Response:
    """Return the input of a response, earlier turns included."""
    conversation = service.responses.get(sender.tenant, response_id).conversation

    def write() -> bytes:
        items = [_listed(item, at, response_id) for at, item in enumerate(msgspec.json.decode(conversation))]
        if order == "desc":
            items.reverse()
        begin = next((at + 1 for at, item in enumerate(items) if item["id"] == after), None) if after else 0
        if begin is None:
            raise bad_request(f"after: the item {after[:100]!r} does not exist.", "after")
        page = items[begin : begin + limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        has_more = len(items) > begin + limit
        return msgspec.json.encode({"object": "list", "data": page, **ends, "has_more": has_more})

    return _json(await off_the_loop(write, len(conversation)))


class ResponseWriter:
    """Writes one answer as OpenAI's response, and the events of its stream.

    Args:
        body: the request's body.
        answer: the running answer.
        names: names the tokens of log probabilities; None without log probabilities.
        is_stored: whether the response is stored.

    Attributes:
        response_id: the response's id.
        answer: the running answer.
        blocks: the answer's blocks so far.
        status: the answer's status.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        answer: ChatAnswer,
        names: TokenNames | None,
        *,
        is_stored: bool,
    ) -> None:
        # The id is random, not the client's request id, since everybody who knows it may read the response.
        self._key = secrets.token_hex(_ID_BYTES)
        self.response_id = f"resp_{self._key}"
        self.answer = answer
        self.blocks = AnswerBlocks()
        self.status = "queued" if body.background else "in_progress"
        self._body = body
        self._tools = body.served
        self._inputs: dict[int, CustomInput] = {}
        """Readers of the inputs of custom tools, by the index of the call."""
        self._names = names
        self._is_stored = is_stored
        self._created_s = int(time.time())
        self._completed_s: int | None = None
        self._error: ApiError | None = None
        self._events = 0

    @property
    def scores(self) -> int:
        """Number of log probabilities of the response."""
        if self._names is None:
            return 0
        return sum(1 + len(token.top) for block in self.blocks.blocks for token in block.tokens)

    def encoded(self) -> bytes:
        """Return the response as JSON."""
        return msgspec.json.encode(self.response())

    def response(self) -> dict[str, Any]:
        """Return the present state of the response."""
        body = self._body
        sampling = self.answer.generation.choices[0].handle.request.sampling
        form = None if body.text is None else body.text.model_dump(exclude_unset=True)
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._completed_s,
            "status": self.status,
            "background": bool(body.background),
            "error": None if self._error is None else {"code": "server_error", "message": self._error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.answer.target.name,
            "output": [self._item(block) for block in self.blocks.blocks],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": self._is_stored,
            "system_fingerprint": self.answer.generation.provenance().fingerprint,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | (form or {}),
            "tool_choice": body.tool_choice or "auto",
            "tools": [_repeated(tool.model_dump(exclude_unset=True)) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if self.status in ("completed", "incomplete") else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open the stream."""
        events = [self._event("response.created", response=self.response())]
        self.status = "in_progress"
        return [*events, self._event("response.in_progress", response=self.response())]

    def events(self, changes: list[BlockEvent]) -> list[dict[str, Any]]:
        """Return the events of the changes that a step made."""
        return [event for change in changes for event in self._block_events(change)]

    def finish(self) -> None:
        """Mark the response as ended, by the reason that ended its answer."""
        self.status = "incomplete" if self.blocks.finish_reason == "length" else "completed"
        self._completed_s = int(time.time())

    def fail(self, error: ApiError) -> None:
        """Mark the response as failed."""
        self.status = "failed"
        self._error = error

    def end(self) -> dict[str, Any]:
        """Return the event that ends the stream."""
        return self._event(f"response.{self.status}", response=self.response())

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._events
        self._events += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _block_events(self, change: BlockEvent) -> list[dict[str, Any]]:
        block = change.block
        if isinstance(change, BlockOpened):  # The same step may already have filled and closed it.
            block = dataclasses.replace(block, text="", tokens=[], is_complete=False)
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if self._is_custom(block):
            return self._custom_events(change)
        if block.kind is BlockKind.CALL:
            name = "response.function_call_arguments"
            part = None
        else:
            place["content_index"] = 0
            name = "response.output_text" if block.kind is BlockKind.TEXT else "response.reasoning_text"
            part = self._part(block)
        is_text = block.kind is BlockKind.TEXT
        if isinstance(change, BlockAdded):
            scores = {"logprobs": self._logprobs(change.tokens)} if is_text else {}
            return [self._event(f"{name}.delta", **place, delta=change.text, **scores)]
        if isinstance(change, BlockOpened):
            item = self._item(block) | ({} if part is None else {"content": []})
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            return events + ([] if part is None else [self._event("response.content_part.added", **place, part=part)])
        if part is None:
            events = [self._event(f"{name}.done", **place, name=self._tool_name(block), arguments=block.text)]
        else:
            scores = {"logprobs": self._logprobs(block.tokens)} if is_text else {}
            events = [
                self._event(f"{name}.done", **place, text=block.text, **scores),
                self._event("response.content_part.done", **place, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=self._item(block))]

    def _custom_events(self, change: BlockEvent) -> list[dict[str, Any]]:
        """Return the events of a call of a custom tool, whose input arrives within the arguments of a function."""
        block = change.block
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        name = "response.custom_tool_call_input"
        if isinstance(change, BlockOpened):
            self._inputs[block.index] = CustomInput()
            begun = dataclasses.replace(block, text="", is_complete=False)
            return [self._event("response.output_item.added", output_index=block.index, item=self._item(begun))]
        reader = self._inputs[block.index]
        more = reader.push(change.text) if isinstance(change, BlockAdded) else reader.finish()
        events = [self._event(f"{name}.delta", **place, delta=more)] if more else []
        if isinstance(change, BlockAdded):
            return events
        item = self._item(block)
        return [
            *events,
            self._event(f"{name}.done", **place, input=item["input"]),
            self._event("response.output_item.done", output_index=block.index, item=item),
        ]

    def _tool(self, block: Block) -> ServedTool | None:
        return self._tools.get(block.name) if block.kind is BlockKind.CALL else None

    def _is_custom(self, block: Block) -> bool:
        tool = self._tool(block)
        return tool is not None and tool.is_custom

    def _tool_name(self, block: Block) -> str:
        """Return the name of a called tool, without its namespace."""
        tool = self._tool(block)
        return block.name if tool is None else tool.name

    def _item(self, block: Block) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": self._status(block)}
        match block.kind:
            case BlockKind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": [self._part(block)]}
            case BlockKind.THOUGHTS:
                told = {"summary": [], "content": [self._part(block)], "encrypted_content": None}
                return item | {"type": "reasoning", **told}
            case BlockKind.CALL:
                tool = self._tool(block)
                call = {"call_id": block.call_id, "name": self._tool_name(block)}
                if tool is not None and tool.namespace is not None:
                    call["namespace"] = tool.namespace
                if self._is_custom(block):
                    return item | {"type": "custom_tool_call", **call, "input": whole_input(block.text)}
                return item | {"type": "function_call", **call, "arguments": block.text}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind is BlockKind.THOUGHTS:
            return {"type": "reasoning_text", "text": block.text}
        scores = self._logprobs(block.tokens)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": scores}

    def _status(self, block: Block) -> str:
        if not block.is_complete:
            return "in_progress" if self.status in ("queued", "in_progress") else "incomplete"
        is_cut = self.blocks.finish_reason == "length" and block is self.blocks.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _item_id(self, block: Block) -> str:
        prefix = {BlockKind.TEXT: "msg", BlockKind.THOUGHTS: "rs", BlockKind.CALL: "fc"}[block.kind]
        prefix = "ctc" if self._is_custom(block) else prefix
        return f"{prefix}_{self._key}{block.index:04x}"

    def _logprobs(self, tokens: list[Token] | tuple[Token, ...]) -> list[Any]:
        if self._names is None or not tokens:
            return []
        content: list[Any] = chat_logprobs(self._names, tokens)["content"]
        return content

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self.answer.generation)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.blocks.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _repeated(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form that a response repeats."""
    if tool["type"] != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


async def _stream(writer: ResponseWriter, keep: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    """Yield the events of an answer.

    Args:
        writer: the answer's writer.
        keep: receives the whole response before the last event.

    Raises:
        ApiError: the answer failed before its first event.
    """
    has_begun = False
    try:
        async for step in writer.answer.steps():
            opening = [] if has_begun else writer.opening()
            has_begun = True
            changes = writer.blocks.push(step)
            write = partial(_written, opening, writer, changes)
            if written := await off_the_loop(write, 0 if step.finish_reason is None else writer.scores):
                yield written
        writer.finish()
    except ApiError as error:
        if not has_begun:
            raise
        writer.fail(error)
    keep(await off_the_loop(writer.encoded, writer.scores))
    yield await off_the_loop(lambda: _sse(writer.end()), writer.scores)


def _written(opening: list[dict[str, Any]], writer: "ResponseWriter", changes: list[BlockEvent]) -> bytes:
    return b"".join(map(_sse, [*opening, *writer.events(changes)]))


def _sse(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _in_background(
    body: ResponsesRequest, service: Service, tenant: str, writer: ResponseWriter, stored: StoredResponse
) -> Response:
    """Store a running response; return it, or its stream."""
    run = stored.run = BackgroundRun(keeps_events=bool(body.stream))
    stored.snapshot = writer.encoded
    service.responses.put(tenant, stored)
    first = writer.encoded()

    async def make() -> None:
        try:
            for event in writer.opening():
                run.add(_sse(event))
            async for step in writer.answer.steps():
                changes = writer.blocks.push(step)
                if run.keeps_events:
                    for event in writer.events(changes):
                        run.add(_sse(event))
            writer.finish()
        except asyncio.CancelledError:
            writer.status = "cancelled"
        except ApiError as error:
            writer.fail(error)
        except Exception as error:
            log.error("a background response failed", response=writer.response_id, exc_info=error)
            writer.fail(unexpected_failure())
        finally:
            writer.answer.generation.close()
            stored.response = writer.encoded()
            stored.snapshot = None
            run.add(_sse(writer.end()))
            run.end()
            service.responses.put(tenant, stored)

    run.task = asyncio.create_task(make())
    return _followed(run, 0) if body.stream else _json(first)


def _followed(run: BackgroundRun, begin: int) -> Response:
    """Return the stream of a background response, which continues when the client leaves."""

    async def make() -> Response:
        return EventStream(run.follow(begin))

    return CancelOnDisconnect(make, lambda: None)


def _listed(item: dict[str, Any], at: int, response_id: str) -> dict[str, Any]:
    """Return an item of a conversation in its listed form: with an id, and its content in parts."""
    key = response_id.removeprefix("resp_")
    listed = {"id": f"item_{key}{at:04x}", "status": "completed", **item}
    if item.get("type") == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        listed["content"] = [{"type": kind, "text": item["content"], **extra}]
    return listed


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
