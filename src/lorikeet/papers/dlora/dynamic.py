"""Implements dLoRA's dynamic batching, which decides when an adapter is merged and unmerged.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 1.
"""

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.mode import LiveRequest


class Decision(NamedTuple):
    """Holds the decision for one iteration.

    Attributes:
        merged: adapter that is merged for it, None for none.
        batch: the requests that run.
        candidate: adapter whose requests were compared with the oldest of all requests; None if no adapter could be
            merged.
    """

    merged: AdapterDigest | None
    batch: Sequence[LiveRequest]
    candidate: AdapterDigest | None


def decide(
    live: Sequence[LiveRequest],
    merged: AdapterDigest | None,
    legal: Container[AdapterDigest | None],
    max_batch: int,
    alpha: float,
    beta: float,
) -> Decision:
    """Choose between the oldest requests of any adapter, unmerged, and the oldest requests of one adapter, merged.

    The choice depends on a ratio: the number of the adapter's live requests, divided by the size of a batch of the
    oldest requests. Between two merged adapters, an unmerged iteration always runs.

    Args:
        live: all requests in order of arrival, at least one.
        merged: adapter that is merged now; None for none.
        legal: adapters that may be merged.
        max_batch: most requests in a batch.
        alpha: ratio above which an adapter is merged.
        beta: ratio below which a merged adapter is unmerged.
    """
    oldest = live[:max_batch]
    counts = Counter(request.adapter for request in live)
    if merged is not None:
        if merged in legal and counts[merged] / len(oldest) >= beta:
            return Decision(merged, requests_of(merged, live)[:max_batch], merged)
        return Decision(None, oldest, _most_loaded(counts, legal))
    candidate = _most_loaded(counts, legal)
    if candidate is not None and counts[candidate] / len(oldest) > alpha:
        return Decision(candidate, requests_of(candidate, live)[:max_batch], candidate)
    return Decision(None, oldest, candidate)


def requests_of(adapter: AdapterDigest | None, live: Sequence[LiveRequest]) -> list[LiveRequest]:
    """Return the requests of one adapter, in their order."""
    return [request for request in live if request.adapter == adapter]


def _most_loaded(counts: Counter[AdapterDigest | None], legal: Container[AdapterDigest | None]) -> AdapterDigest | None:
    """Return the legal adapter with the most requests.

    Among equals, the adapter with the oldest request is returned.
    """
    mergeable = [adapter for adapter in counts if adapter is not None and adapter in legal]
    return max(mergeable, key=counts.__getitem__, default=None)
