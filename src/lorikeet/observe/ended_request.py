"""The end of a request, as its observers get it."""

from dataclasses import dataclass
from typing import Protocol

from lorikeet.core.events import RequestTimings
from lorikeet.core.request import Request
from lorikeet.http.trace_context import NO_TRACE, TraceHeaders


@dataclass(frozen=True)
class EndedRequest:
    """One sequence that has ended. Times are in seconds, on the monotonic clock.

    Attributes:
        request: as submitted.
        timings: when it was queued, admitted and so on.
        completion_tokens: number of tokens generated.
        reason: the finish reason; ``abort`` if the client disconnected, ``error`` if the request failed.
        ended_s: time of its end.
        error: the message that the client got if it failed; else empty.
        text: the answer; None unless the request log has texts.
        trace_headers: the HTTP request's.
        trace_id: id of its trace; empty if it has none.
    """

    request: Request
    timings: RequestTimings
    completion_tokens: int
    reason: str
    ended_s: float
    error: str = ""
    text: str | None = None
    trace_headers: TraceHeaders = NO_TRACE
    trace_id: str = ""

    @property
    def adapter(self) -> str | None:
        """Name of its adapter; None for the base model."""
        return None if self.request.adapter is None else self.request.adapter.name

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def e2e_s(self) -> float:
        """Arrival to end, in seconds."""
        return self.ended_s - self.timings.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, in seconds; None if there was none."""
        return None if self.timings.first_token_s is None else self.timings.first_token_s - self.timings.arrival_s


class EndObserver(Protocol):
    """Observes the ends of requests, of all of them or of one."""

    def on_ended(self, ended: EndedRequest) -> None:
        """Record a request that has ended."""
        ...
