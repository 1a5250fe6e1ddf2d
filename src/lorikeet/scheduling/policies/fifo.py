"""First come, first served."""

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue


class Fifo(OrderedQueue):
    """Admits by time of arrival."""

    def rank(self, request: Request) -> float:
        """Return the time of arrival."""
        return request.arrival_s
