"""Admits requests by priority class."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue, count_ranked


class PriorityFirst(OrderedQueue):
    """Admits requests by priority, the lowest value first, then by arrival, like vLLM's ``priority`` policy.

    If blocks run out, the request with the highest value is preempted. Less urgent requests wait as long as more urgent
    ones arrive.
    """

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return the number of requests with an equal or lower priority value."""
        return count_ranked(lambda request: request.priority, waiting, new)

    def rank(self, request: Request) -> tuple[int, float]:
        """Return priority and arrival."""
        return request.priority, request.arrival_s

    def precedence(self, request: Request) -> tuple[int, float]:
        """Return the rank: the request that would be admitted last is preempted first."""
        return self.rank(request)
