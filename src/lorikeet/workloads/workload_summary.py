"""Summarises a workload."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lorikeet.workloads.workload import WorkloadRequest


class LengthSummary(NamedTuple):
    """Holds the sum, mean, percentiles and maximum of lengths, in tokens."""

    total: int
    mean: float
    p50: float
    p99: float
    most: int

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "LengthSummary":
        """Return the figures of at least one length."""
        p50, p99 = np.percentile(tokens, [50, 99]).tolist()
        return cls(sum(tokens), sum(tokens) / len(tokens), p50, p99, max(tokens))


class WorkloadSummary(NamedTuple):
    """Holds the figures of a workload.

    Attributes:
        requests: number of requests.
        conversations: number of conversations that the requests name.
        span_s: time from the first arrival to the last.
        rate: requests per second over the span; None if all arrive at the same time.
        variation: standard deviation / mean of the gaps; None with fewer than two gaps, or if all are 0.
        input_tokens, output_tokens: lengths.
        known_share: share of the prefix blocks that an earlier request of the same adapter contained.
        shares: share of the requests by adapter, largest first; None is the base model.
    """

    requests: int
    conversations: int
    span_s: float
    rate: float | None
    variation: float | None
    input_tokens: LengthSummary
    output_tokens: LengthSummary
    known_share: float | None
    shares: list[tuple[str | None, float]]


def summarise_workload(requests: Sequence[WorkloadRequest]) -> WorkloadSummary:
    """Return the figures of at least one request, in the order of arrival."""
    times_s = np.array([request.arrival_s for request in requests])
    span_s = float(times_s[-1] - times_s[0])
    gaps_s = np.diff(times_s)
    counts = Counter(request.adapter for request in requests)
    return WorkloadSummary(
        requests=len(requests),
        conversations=len({request.conversation for request in requests} - {None}),
        span_s=span_s,
        rate=(len(requests) - 1) / span_s if span_s > 0 else None,
        variation=float(gaps_s.std() / gaps_s.mean()) if len(gaps_s) > 1 and span_s > 0 else None,
        input_tokens=LengthSummary.of([request.input_tokens for request in requests]),
        output_tokens=LengthSummary.of([request.output_tokens for request in requests]),
        known_share=_known_share(requests),
        shares=[(adapter, count / len(requests)) for adapter, count in counts.most_common()],
    )


def _known_share(requests: Sequence[WorkloadRequest]) -> float | None:
    """Return the share of prefix blocks seen before under the same adapter, counting only leading known blocks."""
    known: set[tuple[str | None, int]] = set()
    blocks = hits = 0
    for request in requests:
        keys = [(request.adapter, block) for block in request.prefix_blocks]
        blocks += len(keys)
        hits += next((place for place, key in enumerate(keys) if key not in known), len(keys))
        known.update(keys)
    return hits / blocks if blocks else None
