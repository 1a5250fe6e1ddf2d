"""Priority classes."""

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue


class PriorityFirst(OrderedQueue):
    """By the request's priority, the lowest value first, and inside one by arrival, as vLLM's ``priority`` has it.

    If blocks run out the least urgent gives way. Less urgent requests wait for as long as more urgent ones come.
    """

    def rank(self, request: Request) -> tuple[int, float]:
        """Return its priority and arrival."""
        return request.priority, request.arrival_s

    def precedence(self, request: Request) -> tuple[int, float]:
        """Return the same: who would be admitted first keeps its room longest."""
        return self.rank(request)
