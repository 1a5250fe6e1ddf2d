"""Large bodies: how many may be held at once, and the processes that read them.

Bodies up to ``SMALL_BODY_BYTES`` take the ordinary way and pass none of this.
"""

import asyncio
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from lorikeet.api.errors import ApiError, unexpected_failure
from lorikeet.api.logs import log
from lorikeet.api.prompt_process import BODY, LENGTH, PATHS, BodyRead, BodyRefused, PromptSetup
from lorikeet.api.sampling import ModelLimits
from lorikeet.api.text_processor import TextProcessor

SMALL_BODY_BYTES = 64 * 1024
"""A larger body would hold up the event loop, and every stream, for more than some hundredths of a second."""

_LARGEST_HELD = 4
"""As many bodies of the largest size may be held at once; smaller ones add up."""
_WAIT_S = 30.0
_READ_S = 60.0
_START_S = 60.0
_CORES_PER_PROCESS, _MAX_PROCESSES = 4, 4

_PREPARED = "prepared_body"
_FROM_PROCESS = msgspec.msgpack.Decoder(BodyRead | BodyRefused)


class BodyGate:
    """Bounds the bytes of all large bodies that are held. Those that must wait are let in in the order they came.

    Args:
        max_body_bytes: of one body.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        self._max_bytes = _LARGEST_HELD * max_body_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold so many bytes within the context.

        Raises:
            ApiError: 429; there was no room for too long.
        """
        await self.enter(size)
        try:
            yield
        finally:
            self.leave(size)

    async def enter(self, size: int) -> None:
        """Hold so many bytes until :meth:`leave`; raises as :meth:`hold`."""
        if self._waiting or self.held_bytes + size > self._max_bytes:
            await self._wait(size)
        else:
            self.held_bytes += size

    async def _wait(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            else:
                self._waiting.remove((size, turn))
                self.leave(0)  # those behind it may have room
            if isinstance(error, TimeoutError):
                raise ApiError(
                    429, "Too many large bodies are being read; try again later.", headers={"Retry-After": "1"}
                ) from None
            raise

    def leave(self, size: int) -> None:
        """Hold so many bytes less."""
        self.held_bytes -= size
        while self._waiting and self.held_bytes + self._waiting[0][0] <= self._max_bytes:
            waiting, turn = self._waiting.popleft()
            if not turn.done():
                self.held_bytes += waiting
                turn.set_result(None)


class PromptProcesses:
    """Processes that read large bodies, started when they are needed and replaced when they end.

    Args:
        text_processor: of the model.
        limits: of the model.
        max_queued: most sequences of a request.
    """

    def __init__(self, text_processor: TextProcessor, limits: ModelLimits, max_queued: int) -> None:
        self._text_processor, self._limits, self._max_queued = text_processor, limits, max_queued
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._free = asyncio.Semaphore(max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // _CORES_PER_PROCESS)))
        self._setup = b""

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._all]

    async def read(self, path: str, body: bytes) -> BodyRead:
        """Return what a body says.

        Raises:
            ApiError: it is not valid, or takes too much memory or time.
        """
        async with self._free:
            process = await self._process()
            answer: BodyRead | BodyRefused | None = None
            try:
                async with asyncio.timeout(_READ_S):
                    assert process.stdin is not None
                    process.stdin.writelines((BODY.pack(tuple(PATHS).index(path), len(body)), body))
                    await process.stdin.drain()
                    answer = _FROM_PROCESS.decode(await _message(process))
            except (EOFError, OSError, TimeoutError) as error:
                log.warning("a body was not read", path=path, bytes=len(body), reason=repr(error))
                raise ApiError(413, "Reading the body takes too much memory or time.") from error
            finally:
                if answer is None:
                    self._end(process)
                else:
                    self._idle.append(process)
        if isinstance(answer, BodyRefused):
            raise ApiError(answer.status, answer.message, param=answer.param, type=answer.kind)
        return answer

    async def close(self) -> None:
        """End the processes."""
        for process in tuple(self._all):
            self._end(process)
            await process.wait()

    async def _process(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._end(process)
        return await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        began_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lorikeet.api.prompt_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Threads and their arenas would count as memory.
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # a Ctrl-C at the terminal is for the API process
        )
        self._all.add(process)
        try:
            if not self._setup:
                self._setup = msgspec.msgpack.encode(self._make_setup())
            async with asyncio.timeout(_START_S):
                assert process.stdin is not None
                process.stdin.writelines((LENGTH.pack(len(self._setup)), self._setup))
                await _message(process)
        except (EOFError, OSError, TimeoutError) as error:
            self._end(process)
            log.error("the process that reads large bodies cannot be started", error=repr(error))
            raise unexpected_failure() from error
        except BaseException:
            self._end(process)
            raise
        log.info("process for large bodies started", pid=process.pid, seconds=round(time.monotonic() - began_s, 1))
        return process

    def _make_setup(self) -> PromptSetup:
        texts, template = self._text_processor, self._text_processor.template
        if texts.origin is not None:
            return PromptSetup(self._limits, self._max_queued, str(texts.origin[0]), texts.origin[1])
        return PromptSetup(
            self._limits,
            self._max_queued,
            tokenizer=texts.tokenizer.to_str(),
            template="" if template is None else template.source,
            special_tokens={} if template is None else template.special_tokens,
        )

    def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with suppress(ProcessLookupError):
            process.kill()


async def _message(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(length)


class PreparedBody(NamedTuple):
    """What was read of a large body apart from its small fields.

    Attributes:
        prompts: token ids.
        texts: texts that answers open with, for ``echo``.
        answer: of a route of the tokenizer, the whole answer.
        arrival_s: monotonic time at which it had been received.
    """

    prompts: list[list[int]]
    texts: tuple[str, ...]
    answer: bytes
    arrival_s: float


def prepared_body(request: Request) -> PreparedBody | None:
    """Return what was read of a large body in another process; None for a small one."""
    prepared: PreparedBody | None = request.scope["state"].get(_PREPARED)
    return prepared


def check_content_type(request: Request) -> None:
    """Check that a body says to be JSON.

    Raises:
        ApiError: 415, it does not.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Only 'application/json' is allowed as Content-Type, not {kind!r}.")


class _SmallRequest(Request):
    """The request with a small body in the place of the large one."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._small = body

    async def body(self) -> bytes:
        """Return the small body."""
        return self._small


class PromptRoute(APIRoute):
    """A route whose large bodies are read in another process. The route asks :func:`prepared_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def handle_any(request: Request) -> Response:
            announced = request.headers.get("content-length", "")
            if announced.isdigit() and int(announced) <= SMALL_BODY_BYTES:
                return await handle(request)
            service = request.app.state.service
            check_content_type(request)
            gate: BodyGate = service.body_gate
            async with gate.hold(int(announced) if announced.isdigit() else gate.max_body_bytes):
                # Not by request.body(), which would keep it until the answer has been sent.
                body = b"".join([chunk async for chunk in request.stream()])
                if len(body) > SMALL_BODY_BYTES:
                    arrival_s = time.monotonic()
                    service.gate.enter(1).release()  # else nothing need be read
                    read = await service.prompt_processes.read(self.path, body)
                    prompts = [array("i", prompt).tolist() for prompt in read.prompts]
                    request.scope["state"][_PREPARED] = PreparedBody(prompts, read.texts, read.answer, arrival_s)
                    body = read.fields
            return await handle(_SmallRequest(request, body))

        return handle_any
