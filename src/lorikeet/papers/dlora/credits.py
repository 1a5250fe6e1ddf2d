"""Implements dLoRA's credits, which serve requests that are passed over before they starve.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 3 (appendix A.1). The paper gives neither the amounts that are transferred nor the values of its thresholds.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.mode import LiveRequest

AdapterType = AdapterDigest | None
"""Type of a request: its adapter, or None for the base model. The base model has credits like an adapter."""


PATIENCE = 1024
"""Default of ``Credits``.

The limit of the paper's experiments, ten iterations per token of an answer, allows a mean answer (338 tokens) to wait
for about 3,000 iterations. A third is for starvation, the rest for queues.
"""


def credit_transfers(chosen: Sequence[LiveRequest], oldest: Sequence[LiveRequest]) -> dict[AdapterType, int]:
    """Return the credits that each type gains (negative if it pays) when ``chosen`` run instead of the oldest requests.

    Each request that is passed over earns one credit for its type. The types of the requests that run instead pay whole
    credits, in proportion to their numbers of such requests. If all chosen requests are among the oldest, all of them
    pay.
    """
    running = {request.request_id for request in chosen}
    entitled = {request.request_id for request in oldest}
    gains = Counter(request.adapter for request in oldest if request.request_id not in running)
    payers = Counter(request.adapter for request in chosen if request.request_id not in entitled)
    payers = payers or Counter(request.adapter for request in chosen)
    passed_over = gains.total()
    gains.subtract(apportioned(passed_over, payers))
    return {each: gain for each, gain in gains.items() if gain}


def merging_cost(each: AdapterType, among_oldest: Counter[AdapterType]) -> int:
    """Return the credits that a merged iteration costs a type: one for each of the oldest requests of other types.

    Args:
        each: the type.
        among_oldest: number of the oldest requests by type.
    """
    return among_oldest.total() - among_oldest[each]


def apportioned(total: int, weights: Mapping[AdapterType, int]) -> dict[AdapterType, int]:
    """Split ``total`` in proportion to the weights into integers. No part exceeds its exact value rounded up."""
    parts: dict[AdapterType, int] = {}
    weight_before, sum_of_weights = 0, sum(weights.values())
    for each, weight in weights.items():
        weight_after = weight_before + weight
        parts[each] = total * weight_after // sum_of_weights - total * weight_before // sum_of_weights
        weight_before = weight_after
    return parts


class Credits:
    """Holds the credit accounts of all types.

    Gains of one type are paid by other types, so the sum of all gains is always 0.

    Every type begins with ``patience`` credits for each known type. So a type can pay until all others are starving.
    With fewer credits, a type's payments could stay with types that never starve, and the type could not be merged
    again.

    Args:
        known_types: returns the number of types.
        patience: gain above which a type is starving, and runs first (T_starve is the initial credits plus the
            patience). So one request may be passed over in this many iterations. If infinite, no type ever starves.
        max_batch: largest number of requests in a batch. A starving type stops starving when its gain is below the
            largest cost of one iteration (T_normal is the initial credits plus ``max_batch``, or plus half the patience
            if that is less).
    """

    def __init__(self, known_types: Callable[[], int], patience: float, max_batch: int) -> None:
        self._known_types = known_types
        self._patience, self._normal_below = patience, min(max_batch, patience / 2)
        self._gained = Counter[AdapterType]()
        self._starving: set[AdapterType] = set()

    def __getitem__(self, each: AdapterType) -> float:
        """Return the credits of a type."""
        return self._gained[each] + self._patience * max(1, self._known_types())

    def starving(self, types: Iterable[AdapterType]) -> Collection[AdapterType]:
        """Update which of these types are starving, and return them."""
        for each in types:
            if each in self._starving and self._gained[each] < self._normal_below:
                self._starving.discard(each)
            elif self._gained[each] > self._patience:
                self._starving.add(each)
        return self._starving.intersection(types)

    def apply(self, gains: Mapping[AdapterType, int], iterations: int) -> None:
        """Apply the gains of identical iterations."""
        for each, gain in gains.items():
            self._gained[each] += iterations * gain

    def iterations_until_review(self, gains: Mapping[AdapterType, int], needed: Mapping[AdapterType, int]) -> float:
        """Return the number of iterations, at least 1, after which a type's state may change.

        A type may start or stop starving, or become unable to pay.

        Args:
            gains: credits that each type gains per iteration.
            needed: credits that a type must have for the next iteration.
        """
        found = inf
        if self._patience == inf:
            return found
        for each, gain in gains.items():
            gained, starves = self._gained[each], each in self._starving
            if gain > 0 and not starves:
                found = min(found, (self._patience - gained) // gain + 1)
            elif gain < 0 and starves:
                found = min(found, (gained - self._normal_below) // -gain + 1)
            elif gain < 0 and each in needed:
                found = min(found, (self[each] - needed[each]) // -gain + 1)
        return max(1, found)
