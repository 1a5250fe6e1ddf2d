"""Shortest job first, with or without aging."""

from collections.abc import Sequence
from typing import Any

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import AdmissionView, OrderedQueue, count_ranked


class ShortestFirst(OrderedQueue):
    """Admits by expected number of output tokens, minus ``gamma`` tokens for each second of waiting.

    All waits grow alike, so the order never changes: it is that of expected tokens + gamma × arrival. A request can
    only be overtaken by those that arrive within expected tokens / gamma seconds after it. With gamma 0 there is no
    such limit, and long requests starve while short ones keep the engine busy. No running request is preempted for a
    shorter one; if blocks run out, the newest is preempted.

    Source: H. Qiu et al., "Power-aware Deep Learning Model Serving with µ-Serve", USENIX ATC 2024, whose scheduler goes
    by the predicted length; Chameleon's authors ran it with aging and do not print the rate.

    Args:
        view: of the engine.
        gamma: tokens per second, not negative. With 10 an answer of a thousand tokens is overtaken only by requests
            that arrive within 100 s after it.
    """

    def __init__(self, view: AdmissionView, *, gamma: float = 0.0) -> None:
        super().__init__(view)
        self._gamma = gamma

    @classmethod
    def count_ahead(cls, waiting: Sequence[Request], new: Request, **parameters: Any) -> int:
        """Return how many requests have no larger key."""
        gamma = parameters.get("gamma", 0.0)
        return count_ranked(lambda request: request.expected_tokens + gamma * request.arrival_s, waiting, new)

    def rank(self, request: Request) -> tuple[float, float]:
        """Return the key; of equal ones the older request first."""
        return request.expected_tokens + self._gamma * request.arrival_s, request.arrival_s
