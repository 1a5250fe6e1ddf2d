"""The clients' streams: what each request under way has got so far, whoever computes it.

An engine may die and a request may move to another: it goes on from the tokens that have arrived here. Sampling is a
function of (seed, position) and tokens carry their index, so a stream goes on without a gap or a repeat.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import msgspec

from lorikeet.client.supervisor import EngineError
from lorikeet.core.events import Finished, FinishReason, Queued, RequestEvent, RequestTimings
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import StepOutputs, TokenOutput
from lorikeet.core.plan import Token
from lorikeet.core.request import Request

DEATHS_PER_REQUEST = 3
"""A request that was in flight at so many deaths of an engine is ended with an error: it may be their cause."""


class RequestOutput(NamedTuple):
    """What one turn of the loop brought for one request."""

    tokens: tuple[Token, ...]
    finished: Finished | None


class RequestHandle:
    """One request in an engine, as seen from the API process.

    Iterate over it to get its outputs; the last one has ``finished``.

    Attributes:
        request: as submitted.
        timings: filled as events arrive.
        token_ids: received so far, earlier attempts of the request included.
        deaths: of engines that ran it.
        attempt: the newest, one less than the request's own before it is first sent; what is told of others is of the
            past.
        is_queued: that attempt has reached its engine.
        replica: where it is. None: nowhere.
        sent_s: when it was handed to that replica of a cluster, on this process's clock.
    """

    def __init__(self, request: Request, abort: Callable[["RequestHandle", bool], None]) -> None:
        self.request = request
        self.timings = RequestTimings(request.arrival_s)
        self.token_ids = list(request.output_token_ids)
        self.deaths = 0
        self.attempt = request.attempt - 1
        self.is_queued = False
        self.replica: ReplicaId | None = None
        self.sent_s = 0.0
        self._abort = abort
        self._outputs: asyncio.Queue[RequestOutput | EngineError] = asyncio.Queue()

    def abort(self, *, is_complete: bool = False) -> None:
        """End the request; its blocks are free at the engine's next step. A second call does nothing.

        Args:
            is_complete: its answer is: a stop string has come.
        """
        self._abort(self, is_complete)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
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

    def put(self, output: RequestOutput | EngineError) -> None:
        """Hand an output to whoever iterates."""
        self._outputs.put_nowait(output)

    def next_attempt(self) -> Request:
        """Return the request as it goes on after what has arrived, to be handed to an engine."""
        self.attempt += 1
        self.is_queued = False
        return msgspec.structs.replace(self.request, attempt=self.attempt, output_token_ids=list(self.token_ids))


class Streams:
    """All requests that are under way."""

    def __init__(self) -> None:
        self._handles: dict[RequestId, RequestHandle] = {}

    def __iter__(self) -> Iterator[RequestHandle]:
        """Yield the requests under way, those that arrived first first."""
        return iter(sorted(self._handles.values(), key=lambda handle: handle.request.arrival_s))

    def __getitem__(self, request_id: RequestId) -> RequestHandle:
        """Return one.

        Raises:
            KeyError: it is not under way.
        """
        return self._handles[request_id]

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether a request is under way."""
        return request_id in self._handles

    def any_at(self, replica: ReplicaId) -> bool:
        """Whether any is at a replica."""
        return any(handle.replica == replica for handle in self._handles.values())

    def open(self, request: Request, abort: Callable[[RequestHandle, bool], None]) -> RequestHandle:
        """Begin a stream; ``abort`` is called with it, and whether its answer is complete, when no more is wanted.

        Raises:
            ValueError: the id is in use.
        """
        if request.request_id in self._handles:
            raise ValueError(f"request id {request.request_id!r} is in use")
        handle = self._handles[request.request_id] = RequestHandle(request, abort)
        return handle

    def current(self, replica: ReplicaId, outputs: StepOutputs) -> StepOutputs:
        """Return what a replica told without what is of the past: of requests that have ended or moved since.

        A request may have come back there meanwhile: the end of its earlier attempt there is not its end. It is noted
        whose newest attempt has been queued, so this must see all that a replica tells once, in its order.
        """
        events = tuple([event for event in outputs.events if self._is_current(replica, event)])
        tokens = tuple([token for token in outputs.tokens if self._is_token_current(replica, token)])
        return msgspec.structs.replace(outputs, tokens=tokens, events=events)

    def take(self, outputs: StepOutputs) -> list[tuple[RequestHandle, Finished]]:
        """Hand on what is current; return the requests that ended."""
        fresh: dict[RequestId, tuple[Token, ...]] = {}
        for sampled in outputs.tokens:
            handle = self._handles[sampled.request_id]
            assert sampled.index == len(handle.token_ids), f"token {sampled.index} of {sampled.request_id} came early"
            handle.token_ids += [token.token_id for token in sampled.tokens]
            fresh[sampled.request_id] = sampled.tokens
        ended: dict[RequestId, Finished] = {}
        for event in outputs.events:
            self._handles[event.request_id].timings.apply(event)
            if isinstance(event, Finished):
                ended[event.request_id] = event
        handles = {request_id: self._handles[request_id] for request_id in fresh | ended}
        for request_id, handle in handles.items():
            output = RequestOutput(fresh.get(request_id, ()), ended.get(request_id))
            if output.finished is None:
                handle.put(output)
            else:
                self.end(handle, output)
        return [(handles[request_id], finished) for request_id, finished in ended.items()]

    def _is_current(self, replica: ReplicaId, event: RequestEvent) -> bool:
        """Tell whether an event is of the newest attempt, whose events ``Queued`` begins."""
        handle = self._handles.get(event.request_id)
        if handle is None or handle.replica != replica:
            return False
        if isinstance(event, Queued):
            handle.is_queued = event.attempt == handle.attempt
        return handle.is_queued

    def _is_token_current(self, replica: ReplicaId, sampled: TokenOutput) -> bool:
        handle = self._handles.get(sampled.request_id)
        return handle is not None and handle.replica == replica and handle.attempt == sampled.attempt

    def died(self, handle: RequestHandle, code: int | None) -> bool:
        """Account for the death of the engine that ran a request; return whether the request goes on."""
        handle.deaths += 1
        handle.replica = None
        if handle.deaths < DEATHS_PER_REQUEST:
            return True
        reason = f"the engine died {handle.deaths} times while it ran, last with code {code}"
        self.finish(handle, FinishReason.ERROR, reason)
        return False

    def finish(self, handle: RequestHandle, reason: FinishReason, error: str | None = None) -> None:
        """End a stream from here."""
        self.end(handle, RequestOutput((), Finished(handle.request.request_id, time.monotonic(), reason, error=error)))

    def end(self, handle: RequestHandle, output: RequestOutput) -> None:
        """End a stream with its last output."""
        del self._handles[handle.request.request_id]
        handle.put(output)

    def fail(self, failure: EngineError) -> None:
        """End all streams: there will be no engine."""
        for handle in self._handles.values():
            handle.put(failure)
        self._handles.clear()
