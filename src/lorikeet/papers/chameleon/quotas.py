"""Computes the token quotas of the size classes, as independent M/M/1 queues, and tracks the held tokens.

``assign_quotas`` divides the tokens among the classes by their loads. ``QuotaAccounting`` counts the tokens of each
quota that running requests hold.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorikeet.core.ids import RequestId
from lorikeet.scheduling.state import StepTimeEstimator


class SurplusShare(StrEnum):
    """Names the rules for dividing the tokens that remain after every class has its least quota."""

    PRIORITY = "priority"
    """In the ratio K : K - 1 : ...

    : 1, with the most tokens for the smallest class. The paper divides by "initial weights" (§4.2), and has resources
    "in proportion to the queues priority" (§1).
    """
    LEAST = "least"
    """In proportion to the least quotas."""


class ClassLoad(NamedTuple):
    """Describes the load of a class.

    Attributes:
        largest_tokens: S, size of the largest request.
        duration_s: D, mean time from admission to the end.
        rate_per_s: arrivals per second.
        slo_s: limit of the time from arrival to the end; infinite for no limit.
    """

    largest_tokens: float
    duration_s: float
    rate_per_s: float
    slo_s: float

    @property
    def least_tokens(self) -> float:
        """Quota with which an M/M/1 queue meets the limit: S · D · (1 / SLO + rate) (spec, section 6.1)."""
        return self.largest_tokens * self.duration_s * (1 / self.slo_s + self.rate_per_s)


class Quotas(NamedTuple):
    """Holds the tokens of each class, which add up to the total.

    ``feasible`` is true if every class has at least its least quota.
    """

    tokens: tuple[int, ...]
    feasible: bool


def assign_quotas(
    loads: Sequence[ClassLoad],
    total_tokens: int,
    *,
    floor: bool,
    share: SurplusShare,
) -> Quotas:
    """Divide ``total_tokens`` among classes, which are in order of size.

    If the tokens do not suffice for all least quotas, they are divided in proportion to the least quotas.

    Args:
        loads: load of each class, smallest requests first.
        total_tokens: tokens to divide.
        floor: whether each class gets at least the size of its largest request, which otherwise could never be admitted
            from the class's quota. If tokens do not suffice, the floor holds if the largest requests of all classes fit
            together.
        share: rule for dividing the surplus.
    """
    floors = [load.largest_tokens if floor else 0.0 for load in loads]
    least = [max(load.least_tokens, floor) for load, floor in zip(loads, floors, strict=True)]
    needed = sum(least)
    if needed <= total_tokens:
        weights = least if share is SurplusShare.LEAST else [float(len(loads) - place) for place in range(len(loads))]
        return Quotas(_whole(_added(least, weights, total_tokens - needed), total_tokens), feasible=True)
    if sum(floors) > total_tokens:
        floors = [0.0] * len(loads)
    above = [most - floor for most, floor in zip(least, floors, strict=True)]
    return Quotas(_whole(_added(floors, above, total_tokens - sum(floors)), total_tokens), feasible=False)


def _added(start: Sequence[float], weights: Sequence[float], rest: float) -> list[float]:
    total = sum(weights)
    shares = [weight / total if total else 1 / len(start) for weight in weights]
    return [value + rest * share for value, share in zip(start, shares, strict=True)]


def _whole(values: Sequence[float], total: int) -> tuple[int, ...]:
    """Round to integers with the sum ``total``. The largest remainders are rounded up."""
    whole = [int(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda place: whole[place] - values[place])
    for place in by_remainder[: total - sum(whole)]:
        whole[place] += 1
    return tuple(whole)


SLO_FACTOR = 5.0
"""Limit of the time from arrival to the end, as a multiple of the time that the class's mean request takes alone."""


def class_load(
    arrived: NDArray[np.float64],
    ran_s: NDArray[np.float64],
    over_s: float,
    step_times: StepTimeEstimator,
    largest_percentile: float,
) -> ClassLoad:
    """Return the load of a class.

    If no request of the class has ended yet, the duration is the expected time of its mean request alone.

    Args:
        arrived: ``[requests, 3]``, tokens of input, expected output and adapter of each request that arrived.
        ran_s: seconds that each finished request ran.
        over_s: seconds during which arrivals were counted.
        step_times: estimates how long steps take.
        largest_percentile: percentile of the requests' sizes that counts as the largest.
    """
    if not len(arrived):  # possible, because classes are found from binned samples and a boundary may lie inside a bin
        return ClassLoad(0.0, 0.0, 0.0, float("inf"))
    mean = arrived.mean(axis=0)
    alone_s = step_times.alone_s(float(mean[0]), float(mean[1]))
    largest = np.percentile(arrived.sum(axis=1), largest_percentile)
    duration_s = float(ran_s.mean()) if len(ran_s) else alone_s
    slo_s = SLO_FACTOR * alone_s if alone_s else float("inf")
    return ClassLoad(float(largest), duration_s, len(arrived) / over_s, slo_s)


class QuotaAccounting:
    """Counts the tokens of each quota that running requests hold.

    For every class, available = quota - held, which may be negative. Available and held tokens of all classes add up to
    the total.

    Args:
        total_tokens: sum of all quotas. Initially one class has all tokens.
    """

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.quotas: tuple[int, ...] = (total_tokens,)
        self.held = [0]
        self._holdings: dict[RequestId, dict[int, int]] = {}

    def available(self, number: int) -> int:
        """Return the number of tokens that a class may still lend."""
        return self.quotas[number] - self.held[number]

    def hold(self, request_id: RequestId, number: int, tokens: int) -> None:
        """Add ``tokens`` of a class's quota to the tokens that a request holds."""
        parts = self._holdings.setdefault(request_id, {})
        parts[number] = parts.get(number, 0) + tokens
        self.held[number] += tokens

    def give_back(self, request_id: RequestId) -> None:
        """Return all tokens that a request holds to the classes that lent them."""
        for number, tokens in self._holdings.pop(request_id).items():
            self.held[number] -= tokens

    def held_by(self, request_id: RequestId) -> int:
        """Return the number of tokens that a request holds."""
        return sum(self._holdings[request_id].values())

    def holders(self) -> dict[RequestId, int]:
        """Return the number of tokens that each request holds."""
        return {request_id: self.held_by(request_id) for request_id in self._holdings}

    def divide(self, quotas: Sequence[int], classes: Mapping[RequestId, int]) -> None:
        """Replace the classes. The tokens that a request holds then count for its new class.

        Args:
            quotas: tokens of each new class.
            classes: the new class of each request that holds tokens.

        Raises:
            ValueError: the quotas do not add up to the total.
        """
        if sum(quotas) != self.total_tokens:
            raise ValueError(f"quotas {quotas} do not add up to {self.total_tokens}")
        self.quotas = tuple(quotas)
        self.held = [0] * len(quotas)
        for request_id, parts in self._holdings.items():
            tokens = sum(parts.values())
            self._holdings[request_id] = {classes[request_id]: tokens}
            self.held[classes[request_id]] += tokens
