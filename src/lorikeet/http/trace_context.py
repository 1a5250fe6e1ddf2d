"""The trace that the present HTTP request belongs to, as its headers say."""

from contextvars import ContextVar
from typing import NamedTuple


class TraceHeaders(NamedTuple):
    """W3C's ``traceparent`` and ``tracestate``; empty where there are none."""

    parent: str = ""
    state: str = ""


NO_TRACE = TraceHeaders()
trace_headers: ContextVar[TraceHeaders] = ContextVar("trace_headers", default=NO_TRACE)
"""Set for each HTTP request; tasks that it starts inherit it."""
