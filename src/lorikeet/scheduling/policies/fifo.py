"""First come, first served."""

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue


class Fifo(OrderedQueue):
    """By the time of arrival."""

    def rank(self, request: Request) -> float:
        """Return its arrival."""
        return request.arrival_s
