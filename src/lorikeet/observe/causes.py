"""What requests wait for in the queue, as metrics and statistics name it."""

from lorikeet.core.events import RequestTimings
from lorikeet.memory.blocks import WAITS_FOR

ORDER = "order"
"""Cause of a wait behind other requests: a step has its tokens, or the order says so."""
CAUSES = {reason.name.lower(): text for reason, text in WAITS_FOR.items()} | {ORDER: "their turn behind others"}
"""Every cause, as ``EngineStats.queued`` names it, in words."""
WAITS = CAUSES | {"adapter": "the transfer of its adapter to the device", "kv": "the transfer of its KV"}
"""These, and what requests with blocks wait for, in words."""
_OF_TEXT = {text: cause for cause, text in CAUSES.items()}


def cause_of(timings: RequestTimings) -> str:
    """Return why a request was in the queue."""
    return _OF_TEXT.get(timings.waited_for, ORDER)
