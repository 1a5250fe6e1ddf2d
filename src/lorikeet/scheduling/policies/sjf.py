"""Shortest job first, with or without aging."""

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import AdmissionView, OrderedQueue

AGING_TOKENS_PER_S = 10.0
"""With this rate an answer of a thousand tokens is overtaken only by requests that arrive within 100 s after it."""


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
        gamma: tokens per second, not negative.
    """

    def __init__(self, view: AdmissionView, gamma: float = 0.0) -> None:
        super().__init__(view)
        self._gamma = gamma

    def rank(self, request: Request) -> tuple[float, float]:
        """Return the key; of equal ones the older request first."""
        return request.expected_tokens + self._gamma * request.arrival_s, request.arrival_s
