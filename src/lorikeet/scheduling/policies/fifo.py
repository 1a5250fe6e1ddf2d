"""Admits first come, first served."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import OrderedQueue, count_ranked


class Fifo(OrderedQueue):
    """Admits requests by time of arrival."""

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return the number of requests that arrived at the same time or earlier."""
        return count_ranked(lambda request: request.arrival_s, waiting, new)

    def rank(self, request: Request) -> float:
        """Return the time of arrival."""
        return request.arrival_s
