"""Earliest deadline first."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue, count_ranked

DEFAULT_TTFT_S = 60.0
"""Deadline after arrival, in seconds, of a request without a limit on its TTFT."""


class EarliestDeadline(OrderedQueue):
    """Admits by the time at which the first token is due: arrival plus the limit on TTFT.

    Requests without a limit count as due after a minute. Requests with a limit go before them, but cannot starve them:
    a request is overtaken only by requests that arrive before it is due. A request that has missed its deadline stays
    in front of requests that can still meet theirs; load shedding may drop it. If blocks run out, the request with
    the latest deadline is preempted.

    Source: C. L. Liu and J. W. Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment",
    Journal of the ACM 20(1), 1973, section 7.
    """

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return how many requests are due no later."""
        return count_ranked(_due_s, waiting, new)

    def rank(self, request: Request) -> tuple[float, float]:
        """Return the deadline; of equal ones the older request first."""
        return _due_s(request), request.arrival_s

    def precedence(self, request: Request) -> tuple[float, float]:
        """Return the rank: the request that would be admitted last is preempted first."""
        return self.rank(request)


def _due_s(request: Request) -> float:
    limit_s = None if request.slo is None else request.slo.ttft_s
    return request.arrival_s + (DEFAULT_TTFT_S if limit_s is None else limit_s)
