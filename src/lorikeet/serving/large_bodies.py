"""Reads bodies larger than ``SMALL_BODY_BYTES`` in separate processes."""

import os
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from typing import Any, NamedTuple, get_type_hints

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.prompt_process import (
    KINDS,
    MODEL,
    BodyNeeds,
    BodyRead,
    BodyRefused,
    PromptSetup,
    WhichModel,
)
from lorikeet.chat.protocol import Body, GenerationBody
from lorikeet.chat.tokens_body import TokensRequest
from lorikeet.core.images import PromptImage
from lorikeet.core.request import PromptEmbeds
from lorikeet.http.body_gate import SMALL_BODY_BYTES, BodyGate, check_content_type
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.helper_processes import HelperProcesses
from lorikeet.http.logs import log
from lorikeet.http.sessions import SESSION_HEADER, session_of
from lorikeet.serving.leases import Lease
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.tenants.keys import Access

_READ_S = 60.0
_CORES_PER_PROCESS = 4
_MAX_PROCESSES = 4

_PREPARED = "prepared_body"
_FROM_PROCESS: msgspec.msgpack.Decoder[WhichModel | BodyRead | BodyRefused] = msgspec.msgpack.Decoder(
    WhichModel | BodyRead | BodyRefused
)

Resolve = Callable[[WhichModel], Awaitable[BodyNeeds]]
"""Returns what must be known to read a body, given some of its fields."""


class PromptProcesses:
    """Reads, in other processes, large bodies and conversations with adapters that have their own chat template.

    Args:
        chat: chat settings of the base model.
        max_queued: largest number of sequences of a request.
    """

    def __init__(self, chat: ChatSettings, max_queued: int) -> None:
        self._chat = chat
        self._max_queued = max_queued
        most = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // _CORES_PER_PROCESS))
        self._processes = HelperProcesses("lorikeet.chat.prompt_process", self._setup, most)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return self._processes.pids

    async def read(self, kind: type[Body], body: bytes, resolve: Resolve, *, is_large: bool = True) -> BodyRead:
        """Read the prompts of a body.

        Args:
            kind: the body's kind, one of ``KINDS``.
            body: the body's bytes.
            resolve: returns the model's data that reading the body needs.
            is_large: whether the body is large. In errors, a body that is not large blames the chat template.

        Raises:
            ApiError: the body is not valid, or takes too much memory or time. Errors of ``resolve`` pass through.
        """

        async def name_model(answer: bytes) -> bytes | None:
            which = _FROM_PROCESS.decode(answer)
            if not isinstance(which, WhichModel):
                return None
            return MODEL + msgspec.msgpack.encode(await resolve(which))

        number = bytes([KINDS.index(kind)])
        try:
            answer = _FROM_PROCESS.decode(await self._processes.ask(number, body, timeout_s=_READ_S, go_on=name_model))
        except (EOFError, OSError, TimeoutError) as error:
            log.warning("a body was not read", kind=kind.__name__, bytes=len(body), reason=repr(error))
            if not is_large:
                raise bad_request("The chat template takes too much memory or time.") from error
            raise ApiError(413, "Reading the body takes too much memory or time.") from error
        if isinstance(answer, BodyRefused):
            raise ApiError(answer.status, answer.message, param=answer.param, type=answer.kind)
        assert isinstance(answer, BodyRead)
        return answer

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    def _setup(self) -> bytes:
        chat = self._chat
        texts = self._chat.text_processor
        template = self._chat.text_processor.template
        if texts.origin is not None:
            folder, file = texts.origin
            setup = PromptSetup(chat.limits, self._max_queued, str(folder), file, tool_parser=chat.tool_parser)
        else:
            setup = PromptSetup(
                chat.limits,
                self._max_queued,
                tool_parser=chat.tool_parser,
                tokenizer=texts.tokenizer.to_str(),
                template="" if template is None else template.source,
                special_tokens={} if template is None else template.special_tokens,
            )
        return msgspec.msgpack.encode(setup)


class PreparedBody(NamedTuple):
    """The prompts and other large fields of a body, which another process has read.

    Attributes:
        prompts: token ids of the prompts.
        texts: texts that open the answers, for ``echo``.
        answer: the whole answer of a tokenizer route.
        arrival_s: monotonic time at which the body was complete.
        target: the model whose tokenizer read it.
        lease: the lease of that model's version.
        conversation: the conversation of the responses API, as a JSON array of items; empty if it will not be stored.
        embeds: embeddings of the prompts, instead of their tokens.
        images: images of the only prompt.
    """

    prompts: list[list[int]]
    texts: tuple[str, ...]
    answer: bytes
    arrival_s: float
    target: ResolvedModel
    lease: Lease
    conversation: bytes = b""
    embeds: tuple[PromptEmbeds, ...] = ()
    images: tuple[PromptImage, ...] = ()


def prepared_body(request: Request) -> PreparedBody | None:
    """Return the large fields of a body that another process has read; None for a small body."""
    prepared: PreparedBody | None = request.scope["state"].get(_PREPARED)
    return prepared


class _SmallRequest(Request):
    """A request whose large body is replaced by the small fields."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._small = body

    async def body(self) -> bytes:
        """Return the small body."""
        return self._small


class _NotLoaded(Exception):
    """The model of a body must be loaded first."""

    def __init__(self, model: str | None, lora_path: str | None) -> None:
        super().__init__(model, lora_path)
        self.model = model
        self.lora_path = lora_path


class PromptRoute(APIRoute):
    """A route that reads large bodies in another process, by the type of the handler's parameter ``body``.

    The handler gets the result from :func:`prepared_body`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        handle = super().get_route_handler()
        kind: type[Body] = get_type_hints(self.endpoint)["body"]

        async def handle_any(request: Request, holding: ExitStack) -> Response:
            announced = request.headers.get("content-length", "")
            if announced.isdigit() and int(announced) <= SMALL_BODY_BYTES:
                return await handle(request)
            service = request.app.state.service
            check_content_type(request)
            gate: BodyGate = service.body_gate
            async with gate.hold(int(announced) if announced.isdigit() else gate.max_body_bytes):
                # request.body() would keep the body until the answer has been sent.
                body = b"".join([chunk async for chunk in request.stream()])
                if len(body) > SMALL_BODY_BYTES:
                    is_batch = request.scope["state"].get("is_batch", False)
                    # A request that the gate would refuse is refused before its body is read.
                    service.gate_of(is_batch=is_batch).enter(1).release()
                    state = request.scope["state"]
                    session = session_of(request.headers.get(SESSION_HEADER), state["tenant"]) or state["request_id"]
                    access = state["access"]
                    pauses = service.resolver.pauses
                    name = ""
                    whole = body
                    generates = issubclass(kind, GenerationBody | TokensRequest)
                    while True:
                        if generates:
                            await pauses.wait(name, access.actor)
                        prepared, body = await prepare(service, kind, whole, state["tenant"], access, session, holding)
                        name = prepared.target.name
                        if not (generates and pauses.holds(name, access.actor)):
                            break
                        prepared.lease.close()  # The request gets the version that the adapter has after the pause.
                    request.scope["state"][_PREPARED] = prepared
            return await handle(_SmallRequest(request, body))

        async def handle_held(request: Request) -> Response:
            with ExitStack() as holding:
                return await handle_any(request, holding)

        return handle_held


async def prepare(
    service: Any, kind: type[Body], body: bytes, tenant: str, access: Access, session: str, holding: ExitStack
) -> tuple[PreparedBody, bytes]:
    """Read a body in another process. Return its prompts and its small fields.

    Args:
        service: the server's service.
        kind: the body's kind, one of ``KINDS``.
        body: the body's bytes.
        tenant: the sender's tenant.
        access: the sender's rights.
        session: the session, else the request, which chooses the version of a split.
        holding: closes the lease of the model's version if the request is never submitted.

    Raises:
        ApiError: see ``PromptProcesses.read`` and ``ModelResolver.lease``.
    """
    arrival_s = time.monotonic()
    models: list[tuple[ResolvedModel, Lease]] = []

    async def resolve(which: WhichModel) -> BodyNeeds:
        split = service.resolver.splits.get(which.lora_path or which.model)
        is_auto = service.resolver.is_auto(which.model, which.lora_path)
        may_load = split is None and not is_auto and service.resolver.loader.is_enabled
        if may_load and service.models.missing(which.model, which.lora_path):
            raise _NotLoaded(which.model, which.lora_path)
        target, lease = await service.resolver.lease(
            which.model,
            which.lora_path,
            access=access,
            generates=False,
            key=which.user or session,
            prompt=lambda: which.prompt,
        )
        holding.enter_context(lease)
        models.append((target, lease))
        return BodyNeeds(target.chat, service.responses.conversation(tenant, which.previous_response_id))

    try:
        read = await service.prompt_processes.read(kind, body, resolve)
    except _NotLoaded as missing:  # A load may take minutes, so it runs without holding a process.
        await service.resolver.resolve(missing.model, missing.lora_path, access=access, generates=False)
        read = await service.prompt_processes.read(kind, body, resolve)
    target, lease = models[-1]
    prompts = unpacked(read)
    images: tuple[PromptImage, ...] = ()
    if read.images:
        texts = (await service.chats.settings_of(target.chat)).text_processor
        prompt = await service.images.encode(texts, read.text, read.images)
        prompts, images = [prompt.token_ids], prompt.images
    prepared = PreparedBody(
        prompts, read.texts, read.answer, arrival_s, target, lease, read.conversation, read.embeds, images
    )
    return prepared, read.fields


def unpacked(read: BodyRead) -> list[list[int]]:
    """Return the token ids of the prompts of a body."""
    return [array("i", prompt).tolist() for prompt in read.prompts]
