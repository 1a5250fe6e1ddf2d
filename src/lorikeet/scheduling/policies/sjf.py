"""Shortest job first, with or without aging."""

from lorikeet.core.request import Request
from lorikeet.scheduling.admission import AdmissionView, OrderedQueue

AGING_TOKENS_PER_S = 10.0
"""With it an answer of a thousand tokens is overtaken only by requests that come within 100 s after it."""


class ShortestFirst(OrderedQueue):
    """By the number of tokens expected of the answer, less ``gamma`` tokens for each second of waiting.

    All waits grow alike, so who goes first never changes: the order is that of expected tokens + gamma × arrival. A
    request can only be overtaken by those that come within expected tokens / gamma seconds after it; with gamma 0 there
    is no such end, and a long one starves for as long as short ones keep the engine busy. Nobody is interrupted for a
    shorter one; if blocks run out, the newest gives way.

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
        """Return the key; of equal ones the older first."""
        return request.expected_tokens + self._gamma * request.arrival_s, request.arrival_s
