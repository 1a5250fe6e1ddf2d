"""Defines the values that observers get when a request ends."""

from dataclasses import dataclass
from typing import Protocol

from lorikeet.core.events import RequestTimings
from lorikeet.core.request import Request
from lorikeet.http.trace_context import NO_TRACE, TraceHeaders


@dataclass(frozen=True)
class EndedRequest:
    """A sequence that has ended. Times are in seconds, on the monotonic clock.

    Attributes:
        request: the submitted request.
        timings: times of its events, such as admission.
        completion_tokens: number of tokens generated.
        reason: the finish reason; ``abort`` if the client disconnected, ``error`` if the request failed.
        ended_s: time of the end.
        error: the error message for the client if the request failed; otherwise empty.
        text: the answer's text; None unless the request log includes texts.
        trace_headers: the trace headers of the HTTP request.
        trace_id: id of the request's trace; empty without a trace.
        fingerprint: the beginnings of the digests of the weights that made its answer.
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
    fingerprint: str = ""

    @property
    def adapter(self) -> str | None:
        """Name of the request's adapter; None for the base model."""
        return None if self.request.adapter is None else self.request.adapter.name

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to end."""
        return self.ended_s - self.timings.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to first token; None without a first token."""
        return None if self.timings.first_token_s is None else self.timings.first_token_s - self.timings.arrival_s


class EndObserver(Protocol):
    """Observes the end of one request, or of all requests."""

    def on_ended(self, ended: EndedRequest) -> None:
        """Record a request that has ended."""
        ...
