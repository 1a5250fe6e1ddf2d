"""What a request waited for, what was decided for it and what that saved, as JSON of the request log and of a route."""

from typing import Any

from lorikeet.core.events import Decided, RequestTimings


def waits(timings: RequestTimings) -> dict[str, Any]:
    """Return what a request waited for, and what each mechanism saved it, as JSON; seconds from its arrival."""
    return {
        "cached_tokens": timings.cached_tokens,
        "queue_s": _since(timings, timings.admitted_s),
        "waited_for": timings.waited_for,
        "adapter_wait_s": round(timings.adapter_wait_s, 6),
        "kv_wait_s": round(timings.kv_wait_s, 6),
        "ttft_s": _since(timings, timings.first_token_s),
        "preemptions": timings.preemptions,
        "saved_s": {mechanism: round(saved_s, 6) for mechanism, saved_s in timings.saved_s.items()},
    }


def decision(decided: Decided, arrival_s: float) -> dict[str, Any]:
    """Return a decision as JSON."""
    return {
        "after_s": round(decided.at_s - arrival_s, 6),
        "mechanism": decided.mechanism,
        "saved_s": round(decided.saved_s, 6),
        "why": decided.why,
    }


def _since(timings: RequestTimings, when_s: float | None) -> float | None:
    return None if when_s is None else round(when_s - timings.arrival_s, 6)
