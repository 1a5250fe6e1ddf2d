"""The streams of all requests in flight: the tokens that each has received, whichever engine computes it.

When an engine dies or a request moves to another engine, the request resumes after the tokens that have arrived here.
Sampling is a function of (seed, position) and tokens carry their index, so a stream has no gap and no repeat.
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
"""A request that was in flight at this many deaths of an engine ends with an error, since it may be their cause."""


class RequestOutput(NamedTuple):
    """The tokens of one request from one turn of the engine loop, and its end if it has finished."""

    tokens: tuple[Token, ...]
    finished: Finished | None


class RequestHandle:
    """One request in an engine, as seen from the API process.

    Iterate over it to get its outputs; the last one has ``finished``.

    Args:
        request: as submitted.
        abort: called by :meth:`abort` with this handle and ``is_complete``.

    Attributes:
        request: as submitted.
        timings: filled as events arrive.
        token_ids: received so far, those of earlier attempts included.
        deaths: how many engines died while they ran it.
        attempt: number of the newest attempt; one less than the request's own before it is first sent. Outputs of
            other attempts are stale.
        is_queued: whether that attempt has reached its engine.
        replica: the replica that runs it, None while none does.
        sent_s: when it was sent to that replica of a cluster, on this process's clock.
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
            is_complete: whether its answer is complete, as after a stop string; else it was cut short.
        """
        self._abort(self, is_complete)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yield outputs until the request has finished.

        Raises:
            EngineError: the engine has ended and will not be restarted.
        """
        while True:
            output = await self._outputs.get()
            if isinstance(output, EngineError):
                raise output
            yield output
            if output.finished is not None:
                return

    def put(self, output: RequestOutput | EngineError) -> None:
        """Queue an output for the iterator."""
        self._outputs.put_nowait(output)

    def next_attempt(self) -> Request:
        """Begin the next attempt: return the request with all tokens that have arrived, to be sent to an engine."""
        self.attempt += 1
        self.is_queued = False
        return msgspec.structs.replace(self.request, attempt=self.attempt, output_token_ids=list(self.token_ids))


class Streams:
    """All requests in flight."""

    def __init__(self) -> None:
        self._handles: dict[RequestId, RequestHandle] = {}

    def __iter__(self) -> Iterator[RequestHandle]:
        """Yield the requests in flight, oldest arrival first."""
        return iter(sorted(self._handles.values(), key=lambda handle: handle.request.arrival_s))

    def __getitem__(self, request_id: RequestId) -> RequestHandle:
        """Return the handle of a request.

        Raises:
            KeyError: it is not in flight.
        """
        return self._handles[request_id]

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether a request is in flight."""
        return request_id in self._handles

    def any_at(self, replica: ReplicaId) -> bool:
        """Whether any request is at a replica."""
        return any(handle.replica == replica for handle in self._handles.values())

    def open(self, request: Request, abort: Callable[[RequestHandle, bool], None]) -> RequestHandle:
        """Begin a stream.

        Args:
            request: to be sent by the caller (:meth:`RequestHandle.next_attempt`).
            abort: called when the client wants no more tokens (:meth:`RequestHandle.abort`).

        Raises:
            ValueError: the id is in use.
        """
        if request.request_id in self._handles:
            raise ValueError(f"request id {request.request_id!r} is in use")
        handle = self._handles[request.request_id] = RequestHandle(request, abort)
        return handle

    def without_stale(self, replica: ReplicaId, outputs: StepOutputs) -> StepOutputs:
        """Return a replica's outputs without those of requests that have since ended or moved, or of old attempts.

        A request may have moved away and back: the end of its earlier attempt there is not its end. Which attempt a
        replica is at follows from its ``Queued`` events, so every output of a replica must pass here once, in order.
        """
        events = tuple([event for event in outputs.events if self._is_current(replica, event)])
        tokens = tuple([token for token in outputs.tokens if self._is_token_current(replica, token)])
        return msgspec.structs.replace(outputs, tokens=tokens, events=events)

    def apply(self, outputs: StepOutputs) -> list[tuple[RequestHandle, Finished]]:
        """Pass current outputs (:meth:`without_stale`) to their streams; return the requests that ended."""
        received: dict[RequestId, tuple[Token, ...]] = {}
        for sampled in outputs.tokens:
            handle = self._handles[sampled.request_id]
            assert sampled.index == len(handle.token_ids), f"token {sampled.index} of {sampled.request_id} came early"
            handle.token_ids += [token.token_id for token in sampled.tokens]
            received[sampled.request_id] = sampled.tokens
        ended: dict[RequestId, Finished] = {}
        for event in outputs.events:
            self._handles[event.request_id].timings.apply(event)
            if isinstance(event, Finished):
                ended[event.request_id] = event
        handles = {request_id: self._handles[request_id] for request_id in received | ended}
        for request_id, handle in handles.items():
            output = RequestOutput(received.get(request_id, ()), ended.get(request_id))
            if output.finished is None:
                handle.put(output)
            else:
                self.end(handle, output)
        return [(handles[request_id], finished) for request_id, finished in ended.items()]

    def _is_current(self, replica: ReplicaId, event: RequestEvent) -> bool:
        """Return whether an event is of the newest attempt, whose events begin with ``Queued``."""
        handle = self._handles.get(event.request_id)
        if handle is None or handle.replica != replica:
            return False
        if isinstance(event, Queued):
            handle.is_queued = event.attempt == handle.attempt
        return handle.is_queued

    def _is_token_current(self, replica: ReplicaId, sampled: TokenOutput) -> bool:
        handle = self._handles.get(sampled.request_id)
        return handle is not None and handle.replica == replica and handle.attempt == sampled.attempt

    def count_death(self, handle: RequestHandle, code: int | None) -> bool:
        """Count the death of the engine that ran a request.

        Returns:
            Whether the request goes on. After ``DEATHS_PER_REQUEST`` deaths it ends with an error.
        """
        handle.deaths += 1
        handle.replica = None
        if handle.deaths < DEATHS_PER_REQUEST:
            return True
        reason = f"the engine died {handle.deaths} times while it ran, last with code {code}"
        self.finish(handle, FinishReason.ERROR, reason)
        return False

    def finish(self, handle: RequestHandle, reason: FinishReason, error: str | None = None) -> None:
        """End a stream for a reason on this side, such as an abort or too many deaths."""
        self.end(handle, RequestOutput((), Finished(handle.request.request_id, time.monotonic(), reason, error=error)))

    def end(self, handle: RequestHandle, output: RequestOutput) -> None:
        """End a stream with its last output."""
        del self._handles[handle.request.request_id]
        handle.put(output)

    def fail(self, failure: EngineError) -> None:
        """End all streams with an exception: no engine will be restarted."""
        for handle in self._handles.values():
            handle.put(failure)
        self._handles.clear()
