"""How many tokens each size class may hold: Chameleon's quotas from independent M/M/1 queues."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Share(StrEnum):
    """How what is left after every class has its least quota is divided."""

    LEAST = "least"
    """In proportion to the least quotas."""
    PRIORITY = "priority"
    """K : K - 1 : ... : 1, the most for the smallest class (the paper's introduction)."""


class Overload(StrEnum):
    """How tokens are divided where the least quotas of all classes do not fit beside each other."""

    PROPORTIONAL = "proportional"
    """In proportion to them: every class waits alike."""
    SMALLEST_FIRST = "smallest-first"
    """The classes of the smallest requests get theirs, and the others at least their largest request: the express
    lane stays one."""


class ClassLoad(NamedTuple):
    """What comes to a class.

    Attributes:
        largest_tokens: S, the largest request.
        duration_s: D, from admission to the end.
        rate_per_s: arrivals.
        slo_s: limit of the time from arrival to the end; infinite for none.
    """

    largest_tokens: float
    duration_s: float
    rate_per_s: float
    slo_s: float

    @property
    def least_tokens(self) -> float:
        """Quota with which an M/M/1 queue meets the limit: S · D · (1 / SLO + rate) (section 6.1 of the spec)."""
        return self.largest_tokens * self.duration_s * (1 / self.slo_s + self.rate_per_s)


class Quotas(NamedTuple):
    """Tokens of each class; they add up to the total. ``feasible``: every class has at least its least quota."""

    tokens: tuple[int, ...]
    feasible: bool


def assign_quotas(
    loads: Sequence[ClassLoad],
    total_tokens: int,
    *,
    floor: bool = True,
    share: Share = Share.LEAST,
    overload: Overload = Overload.PROPORTIONAL,
) -> Quotas:
    """Divide ``total_tokens`` among classes, smallest requests first.

    With ``floor`` no class has less than its largest request, which could otherwise never be admitted from the
    class's own quota; in an overload too, as long as the largest requests of all classes fit beside each other.
    """
    floors = [load.largest_tokens if floor else 0.0 for load in loads]
    least = [max(load.least_tokens, floor) for load, floor in zip(loads, floors, strict=True)]
    needed = sum(least)
    if needed <= total_tokens:
        weights = least if share is Share.LEAST else [float(len(loads) - place) for place in range(len(loads))]
        return Quotas(_whole(_added(least, weights, total_tokens - needed), total_tokens), feasible=True)
    if sum(floors) > total_tokens:
        floors = [0.0] * len(loads)
    above = [most - floor for most, floor in zip(least, floors, strict=True)]
    if overload is Overload.SMALLEST_FIRST:
        rest = total_tokens - sum(floors)
        for number, wanted in enumerate(above):
            above[number] = min(wanted, rest)
            rest -= above[number]
    return Quotas(_whole(_added(floors, above, total_tokens - sum(floors)), total_tokens), feasible=False)


def _added(start: Sequence[float], weights: Sequence[float], rest: float) -> list[float]:
    total = sum(weights)
    shares = [weight / total if total else 1 / len(start) for weight in weights]
    return [value + rest * share for value, share in zip(start, shares, strict=True)]


def _whole(values: Sequence[float], total: int) -> tuple[int, ...]:
    """Round so that the sum is ``total``: the largest remainders are rounded up."""
    whole = [int(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda place: whole[place] - values[place])
    for place in by_remainder[: total - sum(whole)]:
        whole[place] += 1
    return tuple(whole)
