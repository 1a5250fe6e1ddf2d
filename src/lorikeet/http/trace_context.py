"""Keeps the trace of the present HTTP request, by its headers."""

from contextvars import ContextVar
from typing import NamedTuple


class TraceHeaders(NamedTuple):
    """Headers ``traceparent`` and ``tracestate`` of W3C; empty for a request without them."""

    parent: str = ""
    state: str = ""


NO_TRACE = TraceHeaders()
trace_headers: ContextVar[TraceHeaders] = ContextVar("trace_headers", default=NO_TRACE)
"""Trace headers of the present HTTP request; tasks that it starts inherit them."""
