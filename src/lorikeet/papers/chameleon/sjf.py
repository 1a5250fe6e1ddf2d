"""Admits the shortest job first, with or without aging."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import AdmissionView, OrderedQueue, count_ranked


class ShortestFirst(OrderedQueue):
    """Admits requests by expected number of output tokens, minus ``gamma`` tokens for each second of waiting.

    All waits grow alike, so the order by expected tokens + gamma × arrival never changes. A request can be overtaken
    only by requests that arrive within expected tokens / gamma seconds after it. With gamma 0 this limit does not
    exist, and long requests starve while short requests keep the engine busy. Running requests are not preempted for
    shorter ones. If blocks run out, the newest request is preempted.

    Source: H. Qiu et al., "Power-aware Deep Learning Model Serving with µ-Serve", USENIX ATC 2024, whose scheduler uses
    the predicted length. Chameleon's authors ran it with aging and do not print the rate.

    Args:
        view: state of the engine.
        gamma: tokens per second, not negative. With 10 an answer of a thousand tokens is overtaken only by requests
            that arrive within 100 s after it.
    """

    def __init__(self, view: AdmissionView, *, gamma: float = 0.0) -> None:
        super().__init__(view)
        self._gamma = gamma

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return the number of requests with an equal or smaller key."""
        gamma = parameters.get("gamma", 0.0)
        return count_ranked(lambda request: request.expected_tokens + gamma * request.arrival_s, waiting, new)

    def rank(self, request: Request) -> tuple[float, float]:
        """Return the key, then the time of arrival."""
        return request.expected_tokens + self._gamma * request.arrival_s, request.arrival_s
