"""Earliest deadline first."""

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue

DEFAULT_TTFT_S = 60.0
"""When a request is due that has no limit on its TTFT, after its arrival."""


class EarliestDeadline(OrderedQueue):
    """By the time at which the first token is due: arrival + the limit on TTFT.

    Requests without a limit count as due after a minute, so those that have one go before them, but not for ever: a
    request is overtaken only by such as come before it is due. One that has missed its deadline stays in front of those
    that can still meet theirs; to drop it is for whoever sheds load. If blocks run out, the last that is due gives way.

    Source: C. L. Liu and J. W. Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment",
    Journal of the ACM 20(1), 1973, section 7.
    """

    def rank(self, request: Request) -> tuple[float, float]:
        """Return when it is due; of equal ones the older first."""
        limit_s = None if request.slo is None else request.slo.ttft_s
        return request.arrival_s + (DEFAULT_TTFT_S if limit_s is None else limit_s), request.arrival_s

    def precedence(self, request: Request) -> tuple[float, float]:
        """Return the same: who would be admitted first keeps its room longest."""
        return self.rank(request)
