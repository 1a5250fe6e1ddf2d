"""Describes the waits of requests: causes of time in the queue, parts of TTFT, and decisions; also as JSON."""

from typing import Any

from lorikeet.core.events import Decided, RequestTimings
from lorikeet.memory.blocks import WAITS_FOR

ORDER = "order"
"""Cause of a wait behind other requests: they fill the steps, or the queue's order puts them first."""
CAUSES = {reason.name.lower(): text for reason, text in WAITS_FOR.items()} | {ORDER: "their turn behind others"}
"""Every cause of time in the queue, by its name in ``EngineStats.queued``, in words."""
WAITS = CAUSES | {"adapter": "the transfer of its adapter to the device", "kv": "the transfer of its KV"}
"""The causes, and what admitted requests wait for, in words."""
_CAUSE_OF_TEXT = {text: cause for cause, text in CAUSES.items()}

PARTS = ("queue", "adapter", "kv", "prefill")
"""Parts of TTFT, in the order in which they follow each other."""


def cause_of(timings: RequestTimings) -> str:
    """Return the cause of a request's time in the queue."""
    return _CAUSE_OF_TEXT.get(timings.waited_for, ORDER)


def parts_of(timings: RequestTimings, now_s: float) -> tuple[float, float, float, float]:
    """Return the parts of TTFT in seconds. Without a first token, they last until ``now_s``."""
    first_s = timings.first_token_s if timings.first_token_s is not None else now_s
    if timings.admitted_s is None:
        return max(0.0, first_s - timings.arrival_s), 0.0, 0.0, 0.0
    queue_s = timings.admitted_s - timings.arrival_s
    since_s = max(0.0, first_s - timings.admitted_s)
    if timings.first_token_s is None and timings.waits_for_adapter and not timings.adapter_wait_s:
        return queue_s, since_s, 0.0, 0.0  # The transfer has not ended.
    waits_s = timings.adapter_wait_s, timings.kv_wait_s
    return queue_s, *waits_s, max(0.0, since_s - sum(waits_s))


def waits_json(timings: RequestTimings) -> dict[str, Any]:
    """Return a request's waits, and the seconds that mechanisms saved, as JSON. Times count from arrival."""
    return {
        **({"chosen": timings.chosen} if timings.chosen else {}),
        "cached_tokens": timings.cached_tokens,
        "queue_s": _since_arrival_s(timings, timings.admitted_s),
        "waited_for": timings.waited_for,
        "adapter_wait_s": round(timings.adapter_wait_s, 6),
        "kv_wait_s": round(timings.kv_wait_s, 6),
        "ttft_s": _since_arrival_s(timings, timings.first_token_s),
        "preemptions": timings.preemptions,
        "saved_s": {mechanism: round(saved_s, 6) for mechanism, saved_s in timings.saved_s.items()},
    }


def decision_json(decided: Decided, arrival_s: float) -> dict[str, Any]:
    """Return a decision as JSON. The decision's time counts from the request's arrival."""
    return {
        "after_s": round(decided.at_s - arrival_s, 6),
        "mechanism": decided.mechanism,
        "saved_s": round(decided.saved_s, 6),
        "why": decided.why,
    }


def _since_arrival_s(timings: RequestTimings, when_s: float | None) -> float | None:
    return None if when_s is None else round(when_s - timings.arrival_s, 6)
