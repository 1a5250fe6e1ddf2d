"""Weighs the delays of requests by what the operator wants: short latencies, met limits, or many tokens."""

from collections.abc import Iterable

from lorikeet.core.objective import Objective
from lorikeet.core.request import Slo
from lorikeet.costs.replica_estimates import ANSWER_SHARE
from lorikeet.scheduling.state import Sequence

_COMMON_LIMITS = Slo(ttft_s=2.0, tpot_s=0.2)
"""Limits of requests that state none, for ``Objective.GOODPUT``."""
THROUGHPUT_PRICE = 1000.0
"""Least seconds that a lost second counts for ``Objective.THROUGHPUT``, so that no wait of single requests outweighs
it."""


class DelayWeights:
    """Weighs by how much a delay of each request counts.

    A request counts by the objective, before and after its first token. Once it has missed a limit it does not count,
    since no decision can meet the limit any more. This holds for the time to its first token while it waits, and for
    the mean time per token since its admission while it is answered.

    Args:
        objective: the operator's objective.

    Attributes:
        of_waiting, of_answering: weights of a request before and after its first token.
        least: least total weight of requests without limits.
    """

    def __init__(self, objective: Objective) -> None:
        self._limits = _COMMON_LIMITS if objective is Objective.GOODPUT else None
        self.of_waiting = 1.0
        self.of_answering = 1.0 if objective in (Objective.LATENCY, Objective.THROUGHPUT) else ANSWER_SHARE
        self.least = THROUGHPUT_PRICE if objective is Objective.THROUGHPUT else 0.0

    def are_equal(self, slo: Slo | None) -> bool:
        """Return whether a request with these limits counts like all others in its phase."""
        return slo is None and self._limits is None

    def sum(self, sequences: Iterable[Sequence], now: float) -> float:
        """Return the sum of the weights of requests."""
        return sum(self._weight(each, now) for each in sequences)

    def _weight(self, sequence: Sequence, now: float) -> float:
        limits = sequence.request.slo or self._limits
        if sequence.is_decoding:
            limit_s = None if limits is None else limits.tpot_s
            used_s = (now - sequence.admitted_s) / max(1, sequence.output_tokens)
            weight = self.of_answering
        else:
            limit_s = None if limits is None else limits.ttft_s
            used_s = now - sequence.request.arrival_s
            weight = self.of_waiting
        return 0.0 if limit_s and used_s > limit_s else weight
