"""dLoRA's credits, by which requests that are passed over are served before they starve.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 3 (appendix A.1). The paper gives neither the amounts that are transferred nor the values of its thresholds.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.mode import LiveRequest

AdapterType = AdapterDigest | None
"""Type of a request: its adapter, or None for the base model, which has credits like an adapter."""


class CreditParams(NamedTuple):
    """Parameters in credits; one credit is one request passed over in one iteration. The paper prints no value.

    Attributes:
        initial: credits of every type at first.
        starves_above: a type with more credits than this is starving, and runs first (T_starve).
        normal_below: a starving type with fewer credits than this is no longer starving (T_normal).
    """

    initial: int
    starves_above: int
    normal_below: int


def default_credit_params(max_batch: int, patience: int = 64) -> CreditParams:
    """Return our values. With them no type can be charged more credits than it has.

    Args:
        max_batch: most requests in a batch, and so most that an iteration can pass over.
        patience: iterations that a lone request is passed over, less one.
    """
    return CreditParams(
        2 * max_batch, starves_above=2 * max_batch + patience, normal_below=2 * max_batch + patience // 4
    )


def credit_transfers(chosen: Sequence[LiveRequest], oldest: Sequence[LiveRequest]) -> dict[AdapterType, int]:
    """Return the credits that each type gains (or pays, if negative) when ``chosen`` run instead of the oldest.

    Each request passed over earns one credit for its type. The types of the requests that run in their place pay, in
    proportion to the numbers of these, in whole credits. If all chosen requests are among the oldest, all of them pay.
    """
    running = {request.request_id for request in chosen}
    entitled = {request.request_id for request in oldest}
    gains = Counter(request.adapter for request in oldest if request.request_id not in running)
    payers = Counter(request.adapter for request in chosen if request.request_id not in entitled)
    payers = payers or Counter(request.adapter for request in chosen)
    passed_over = gains.total()
    gains.subtract(apportioned(passed_over, payers))
    return {each: gain for each, gain in gains.items() if gain}


def apportioned(total: int, weights: Mapping[AdapterType, int]) -> dict[AdapterType, int]:
    """Split ``total`` in proportion to the weights into integers; none is larger than its exact part rounded up."""
    parts: dict[AdapterType, int] = {}
    weight_before, sum_of_weights = 0, sum(weights.values())
    for each, weight in weights.items():
        weight_after = weight_before + weight
        parts[each] = total * weight_after // sum_of_weights - total * weight_before // sum_of_weights
        weight_before = weight_after
    return parts


class Credits:
    """Credit accounts of all types. What one type gains others pay, so the sum of all gains is always 0.

    Args:
        params: parameters of the credits.
    """

    def __init__(self, params: CreditParams) -> None:
        self._params = params
        self._credits = defaultdict[AdapterType, int](lambda: params.initial)
        self._starving: set[AdapterType] = set()

    def __getitem__(self, each: AdapterType) -> int:
        """Return the credits of a type."""
        return self._credits[each]

    def starving(self, types: Iterable[AdapterType]) -> Collection[AdapterType]:
        """Update which of these types are starving, and return them."""
        for each in types:
            has = self._credits[each]
            if each in self._starving and has < self._params.normal_below:
                self._starving.discard(each)
            elif has > self._params.starves_above:
                self._starving.add(each)
        return self._starving.intersection(types)

    def apply(self, gains: Mapping[AdapterType, int], iterations: int) -> None:
        """Apply the gains of identical iterations."""
        for each, gain in gains.items():
            self._credits[each] += iterations * gain

    def iterations_until_review(self, gains: Mapping[AdapterType, int], needed: Mapping[AdapterType, int]) -> float:
        """Return after how many such iterations, at least 1, a type may starve, no longer starve, or be unable to pay.

        Args:
            gains: of each iteration.
            needed: credits that a type must have for the next one.
        """
        rules, found = self._params, inf
        for each, gain in gains.items():
            has, starves = self._credits[each], each in self._starving
            if gain > 0 and not starves:
                found = min(found, (rules.starves_above - has) // gain + 1)
            elif gain < 0 and starves:
                found = min(found, (has - rules.normal_below) // -gain + 1)
            elif gain < 0 and each in needed:
                found = min(found, (has - needed[each]) // -gain + 1)
        return max(1, found)
