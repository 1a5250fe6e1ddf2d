"""The API process's side of the channel: it starts the engine, watches it, and owns the clients' streams.

When the engine process dies, another is started and every unfinished request is resumed from the tokens
that have arrived here. Sampling is a function of (seed, position) and tokens carry their index, so a
stream goes on without a gap or a repeat. No torch is imported here.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterEvicted, Finished, FinishReason
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import (
    Abort,
    DropAdapter,
    EngineStats,
    Fatal,
    FromEngine,
    Hello,
    KnowAdapters,
    Progress,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)
from lorikeet.core.plan import Token
from lorikeet.core.request import Request
from lorikeet.core.timings import RequestTimings
from lorikeet.engine.connection import Connection

DEATHS_PER_REQUEST = 3
"""A request that was in flight at so many deaths of the engine is ended with an error: it may be their cause."""

FAILED_STARTS = 3
"""After so many starts in a row that came to nothing the engine is given up."""

KNOWN_AT_ONCE = 500
"""Most adapters in one message, so that none of them is large."""


class EngineError(RuntimeError):
    """The engine cannot be started, or is gone for good."""


class Output(NamedTuple):
    """What one turn of the loop brought for one request."""

    tokens: tuple[Token, ...]
    finished: Finished | None


class RequestHandle:
    """One request in the engine, as seen from the API process.

    Iterate over it to get its outputs; the last one has ``finished``.

    Attributes:
        request: as submitted.
        timings: filled as events arrive.
        token_ids: received so far, earlier attempts of the request included.
    """

    def __init__(self, request: Request, abort: Callable[["RequestHandle"], None]) -> None:
        self.request = request
        self.timings = RequestTimings(request.arrival_s)
        self.token_ids = list(request.output_token_ids)
        self.deaths = 0
        self.attempt = request.attempt
        self._abort = abort
        self._outputs: asyncio.Queue[Output | EngineError] = asyncio.Queue()

    def abort(self) -> None:
        """End the request; its blocks are free at the engine's next step. A second call does nothing."""
        self._abort(self)

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs until the request has finished.

        Raises:
            EngineError: the engine is gone for good.
        """
        while True:
            output = await self._outputs.get()
            if isinstance(output, EngineError):
                raise output
            yield output
            if output.finished is not None:
                return

    def put(self, output: Output | EngineError) -> None:
        """Hand an output to whoever iterates."""
        self._outputs.put_nowait(output)

    def resumed(self) -> Request:
        """Return the request as it goes on after what has arrived, as an attempt of its own."""
        self.attempt += 1
        return msgspec.structs.replace(self.request, attempt=self.attempt, output_token_ids=list(self.token_ids))


class EngineClient:
    """Starts, feeds and watches one engine process.

    Attributes:
        hello: sizes of the running engine; set by :meth:`start`.
        stats: the newest gauges, None before the first.
        alive: whether an engine is ready right now.
        restarts: how often it had to be started again.
    """

    hello: Hello

    def __init__(self, settings: Settings) -> None:
        self._settings = msgspec.json.encode(settings)
        self.stats: EngineStats | None = None
        self.alive = False
        self.restarts = 0
        self._failure: EngineError | None = None
        self._closing = False
        self._starts = 0
        self._handles: dict[RequestId, RequestHandle] = {}
        self._known: dict[AdapterDigest, AdapterRef] = {}
        self._drops: dict[AdapterDigest, list[asyncio.Future[int]]] = {}
        self._callbacks: list[Callable[[AdapterEvent], None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="lorikeet-")
        self._link: Connection | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self, on_progress: Callable[[Progress], None]) -> Hello:
        """Start the engine and wait until it is ready.

        Raises:
            EngineError: it cannot be started; the message is for the user.
        """
        link, messages = await self._launch(on_progress)
        self._supervisor = asyncio.create_task(self._supervise(link, messages))
        return self.hello

    def submit(self, request: Request) -> RequestHandle:
        """Hand a request over. While the engine is being restarted it waits for the new one.

        Raises:
            EngineError: the engine is gone for good.
            ValueError: the id is in use.
        """
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._handles:
            raise ValueError(f"request id {request.request_id!r} is in use")
        handle = self._handles[request.request_id] = RequestHandle(request, self._abort)
        self._send(Submit(request))
        return handle

    def know_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Tell the engine, and those after it, of versions that requests may come for, until they are dropped."""
        new = {ref.digest: ref for ref in refs}
        self._known |= new
        self._tell_known(new.values())

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Free an adapter version once no request uses it; return the bytes freed on all tiers, its KV's included.

        Raises:
            EngineError: the engine is gone for good.
        """
        if self._failure is not None:
            raise self._failure
        self._known.pop(digest, None)
        freed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drops.setdefault(digest, []).append(freed)
        self._send(DropAdapter(digest))
        return await freed

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every adapter that is loaded or evicted."""
        self._callbacks.append(callback)

    @property
    def process_id(self) -> int | None:
        """Process id of the running engine."""
        return None if self._link is None else self._link.process.pid

    async def close(self) -> None:
        """Stop the engine; unfinished requests end with an error."""
        self._closing = True
        if self._link is not None and self._link.process.returncode is None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._link.process.wait(), timeout=5.0)
            except TimeoutError:
                self._link.process.kill()
        elif self._supervisor is not None:
            self._supervisor.cancel()  # between two engines: the next one is not wanted any more
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})
        self._give_up(EngineError("the server is shutting down"))
        self._context.destroy(linger=0)
        self._folder.cleanup()

    # --- one engine after the other ------------------------------------------------------------------

    async def _launch(self, on_progress: Callable[[Progress], None]) -> tuple[Connection, AsyncIterator[FromEngine]]:
        """Start a process and wait for its hello."""
        self._starts += 1
        address = f"ipc://{self._folder.name}/engine-{self._starts}"
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        process = None
        try:
            socket.bind(address)
            # A session of its own: a Ctrl-C at the terminal is for the API process, which drains.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lorikeet.engine.process", address),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdin is not None
            link = Connection(process, socket)
            messages = link.messages()
            process.stdin.write(self._settings + b"\n")
            async for message in messages:
                if isinstance(message, Progress):
                    on_progress(message)
                elif isinstance(message, Fatal):
                    raise EngineError(message.message)
                elif isinstance(message, Hello):
                    self.hello, self._link, self.alive = message, link, True
                    return link, messages
            raise EngineError(f"the engine process ended with code {process.returncode} before it was ready")
        except BaseException as error:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            socket.close()
            if isinstance(error, (OSError, zmq.ZMQError)):
                raise EngineError(f"the engine process at {address} cannot be started: {error}") from error
            raise

    async def _supervise(self, link: Connection, messages: AsyncIterator[FromEngine]) -> None:
        """Watch one engine after the other; a failure in here must not leave the streams waiting for ever."""
        try:
            await self._watch(link, messages)
        except Exception as error:
            self._give_up(EngineError(f"the engine's messages cannot be followed: {error!r}"))
            raise

    async def _watch(self, link: Connection, messages: AsyncIterator[FromEngine]) -> None:
        """Pass messages on; when the engine dies, start another and resume what was in flight."""
        while True:
            async for message in messages:
                if isinstance(message, StepOutputs):
                    self._dispatch(message)
            self.alive, self._link, self.stats = False, None, None
            link.socket.close()
            if self._closing:
                return
            self._after_death(link.process.returncode)
            relaunched = await self._relaunch()
            if relaunched is None:
                return
            link, messages = relaunched
            self._tell_known(self._known.values())
            for handle in sorted(self._handles.values(), key=lambda handle: handle.request.arrival_s):
                self._send(Submit(handle.resumed()))
            for digest in self._drops:  # after the requests, which may still run under them
                self._send(DropAdapter(digest))

    def _after_death(self, code: int | None) -> None:
        """Account for a death: requests that saw too many of them end."""
        for handle in list(self._handles.values()):
            handle.deaths += 1
            if handle.deaths >= DEATHS_PER_REQUEST:
                reason = f"the engine died {handle.deaths} times while it ran, last with code {code}"
                finished = Finished(handle.request.request_id, time.monotonic(), FinishReason.ERROR, error=reason)
                self._end(handle, Output((), finished))

    async def _relaunch(self) -> tuple[Connection, AsyncIterator[FromEngine]] | None:
        for failed in range(FAILED_STARTS):
            try:
                relaunched = await self._launch(lambda progress: None)
            except EngineError as error:
                failure = error
                await asyncio.sleep(2.0**failed)
            else:
                self.restarts += 1
                return relaunched
            if self._closing:
                return None
        self._give_up(failure)
        return None

    def _give_up(self, failure: EngineError) -> None:
        self._failure, self.alive = failure, False
        for handle in self._handles.values():
            handle.put(failure)
        self._handles.clear()
        for waiting in self._drops.values():
            for freed in waiting:
                if not freed.done():
                    freed.set_exception(failure)
        self._drops.clear()

    # --- messages ------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        """Queue a message to the engine, if there is one; requests reach the next one by being resumed."""
        if self._link is not None:
            self._link.socket.send(self._encoder.encode(message))

    def _tell_known(self, refs: Iterable[AdapterRef]) -> None:
        left = iter(refs)
        while piece := tuple(islice(left, KNOWN_AT_ONCE)):
            self._send(KnowAdapters(piece))

    def _dispatch(self, outputs: StepOutputs) -> None:
        if outputs.stats is not None:
            self.stats = outputs.stats
        fresh: dict[RequestId, list[Token]] = {}
        for sampled in outputs.tokens:
            handle = self._handles.get(sampled.request_id)
            if handle is None or sampled.index < len(handle.token_ids):
                continue  # aborted here, or already received from an earlier attempt
            assert sampled.index == len(handle.token_ids), f"token {sampled.index} of {sampled.request_id} came early"
            handle.attempt = max(handle.attempt, sampled.attempt)
            handle.token_ids.append(sampled.token.token_id)
            fresh.setdefault(sampled.request_id, []).append(sampled.token)
        ended: dict[RequestId, Finished] = {}
        for event in outputs.events:
            handle = self._handles.get(event.request_id)
            if handle is not None:
                handle.timings.apply(event)
                if isinstance(event, Finished):
                    ended[event.request_id] = event
        for request_id in fresh | ended:
            handle = self._handles[request_id]
            output = Output(tuple(fresh.get(request_id, ())), ended.get(request_id))
            if output.finished is None:
                handle.put(output)
            else:
                self._end(handle, output)
        for adapter_event in outputs.adapter_events:
            if isinstance(adapter_event, AdapterEvicted) and adapter_event.dropped:
                self._finish_drops(adapter_event.digest, adapter_event.freed_bytes)
            for callback in self._callbacks:
                callback(adapter_event)

    def _finish_drops(self, digest: AdapterDigest, freed_bytes: int) -> None:
        for freed in self._drops.pop(digest, ()):
            if not freed.done():
                freed.set_result(freed_bytes)
        if digest in self._known:  # made known again while the drop was under way
            self._send(KnowAdapters((self._known[digest],)))

    def _end(self, handle: RequestHandle, output: Output) -> None:
        del self._handles[handle.request.request_id]
        handle.put(output)

    def _abort(self, handle: RequestHandle) -> None:
        request_id = handle.request.request_id
        if self._handles.get(request_id) is handle:
            self._send(Abort(request_id))
            self._end(handle, Output((), Finished(request_id, time.monotonic(), FinishReason.ABORT)))
