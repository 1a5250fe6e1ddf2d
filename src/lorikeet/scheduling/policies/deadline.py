"""Admits the request with the earliest deadline first."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue, count_ranked

DEFAULT_TTFT_S = 60.0
"""Deadline of a request without a limit on TTFT, in seconds after its arrival."""


class EarliestDeadline(OrderedQueue):
    """Admits requests by the deadline of the first token: arrival plus the limit on TTFT.

    A request without a limit has its deadline one minute after arrival. Requests with a limit usually overtake it, but
    cannot starve it, because only requests that arrive before its deadline can overtake it. A request that has missed
    its deadline stays before requests that can still meet theirs. Load shedding may reject it. If blocks run out, the
    request with the latest deadline is preempted.

    Source: C. L. Liu and J. W. Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment",
    Journal of the ACM 20(1), 1973, section 7.
    """

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return the number of requests with an equal or earlier deadline."""
        return count_ranked(_due_s, waiting, new)

    def rank(self, request: Request) -> tuple[float, float]:
        """Return the deadline, then the time of arrival."""
        return _due_s(request), request.arrival_s

    def precedence(self, request: Request) -> tuple[float, float]:
        """Return the rank, so that the request that would be admitted last is preempted first."""
        return self.rank(request)


def _due_s(request: Request) -> float:
    limit_s = None if request.slo is None else request.slo.ttft_s
    return request.arrival_s + (DEFAULT_TTFT_S if limit_s is None else limit_s)
