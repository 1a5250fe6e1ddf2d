"""Estimates the demand for every adapter in tokens per second, counted at arrival and extrapolated one period ahead.

The demand is the offered load, not the served load. Under overload, the number of completed requests stays at the
cluster's capacity and hides the demand.

Source: LoRAServe, Algorithm 1, step 1. The paper defines neither the extrapolation nor the tokens that count as demand;
both definitions are ours (docs/decisions/loraserve-placement.md).
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from lorikeet.core.ids import AdapterDigest

WINDOW = 5
"""Number of periods that the extrapolation uses."""
COLD_TOKENS_PER_S = 1.0
"""Demand of every adapter before the first period has ended. Only its being equal for all adapters matters."""
OUTPUT_ALPHA = 0.2
"""Weight of the newest answer in the mean length of an adapter's answers."""
OUTPUTS_KNOWN = 5
"""Number of answers after which an adapter's own mean is used instead of the cluster's."""
EARLY_PLACEMENTS = (1 / 8, 1 / 4, 1 / 2)
"""Fractions of the first period with requests after which adapters are placed by what has arrived so far.

No other demand is known yet, and queues from a wrong placement take many periods to drain.
"""


class AdapterDemand(NamedTuple):
    """Holds the demand for an adapter.

    Attributes:
        adapter: version of the adapter.
        rank: largest rank of the adapter.
        size_bytes: size of the weights, which a copy moves.
        tokens_per_s: expected tokens of prompts and answers per second in the next period.
    """

    adapter: AdapterDigest
    rank: int
    size_bytes: int
    tokens_per_s: float


def expected(history: Sequence[float]) -> float:
    """Return the expected next value: the mean of the last ``WINDOW`` values, moved towards their trend line.

    The more certain the line's slope, the larger the move. Returns 0 without a history.
    """
    window = history[-WINDOW:]
    mean = _mean(window)
    return mean + certainty(window) * (extrapolate(window) - mean) if mean else 0.0


def certainty(window: Sequence[float]) -> float:
    """Return the certain share of the slope: ``1 - (standard error / slope)^2``, at least 0.

    The share is 0 for fewer than three values, because any two values lie on a line. In periods with a dozen requests,
    the values differ more by chance than by a trend. Extrapolating their line would be worse than taking their mean.

    Source: the positive-part estimator of James and Stein (1961), for one slope.
    """
    points = len(window)
    slope = _slope(window)
    mean = _mean(window)
    if points < 3 or slope**2 == 0.0:
        return 0.0
    missed = sum((value - mean - slope * x) ** 2 for x, value in zip(_times(points), window, strict=True))
    return max(0.0, 1 - missed / (points - 2) / _spread(points) / slope**2)


def extrapolate(history: Sequence[float]) -> float:
    """Return the next value by least squares through the last ``WINDOW`` values, at least 0.

    The result is at most twice the largest value, which is the most that a line through two points can reach. A line
    through more points stays below.

    Raises:
        ValueError: no history.
    """
    window = history[-WINDOW:]
    if not window:
        raise ValueError("Nothing to extrapolate from")
    return max(_mean(window) + _slope(window) * (len(window) + 1) / 2, 0.0)


def _slope(window: Sequence[float]) -> float:
    """Return the slope of the line through the values, per period."""
    points = len(window)
    return sum(x * value for x, value in zip(_times(points), window, strict=True)) / _spread(points)


@cache
def _times(points: int) -> tuple[float, ...]:
    """Return the times of ``count`` values, one period apart and centred on 0."""
    return tuple(x - (points - 1) / 2 for x in range(points))


@cache
def _spread(points: int) -> float:
    return sum(x**2 for x in _times(points)) or 1.0  # A single point gets the slope 0.


class AdapterCounts(msgspec.Struct):
    """Holds the counts of one adapter.

    Attributes:
        rank, size_bytes: see :class:`AdapterDemand`.
        history: demand of the last ``WINDOW`` periods, tokens per second.
        requests, prompt_tokens: counts of this period so far.
        outputs: number of complete answers so far.
        mean_output_tokens: exponential mean of the answers' lengths.
    """

    rank: int
    size_bytes: int
    history: list[float] = []
    requests: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    mean_output_tokens: float = 0.0


class DemandState(msgspec.Struct, frozen=True):
    """Holds the state from which an estimator continues after a restart.

    Attributes:
        adapters: counts of each adapter.
        outputs, output_tokens: number of complete answers of all adapters, and of their tokens.
    """

    adapters: dict[AdapterDigest, AdapterCounts]
    outputs: int
    output_tokens: int


class DemandEstimator:
    """Counts arrivals per adapter and period, and predicts the demand of the next period.

    The length of an answer is unknown when its request arrives. The estimator assumes the adapter's exponential mean,
    in which the newest answer weighs ``OUTPUT_ALPHA``, or the cluster's mean until ``OUTPUTS_KNOWN`` answers are
    complete.

    Adapters of one rank are placed together, so a placement depends on the demand of the rank. A rank's trend is also
    learned from more requests than a single adapter's. An adapter is expected to keep its share of the rank's demand
    over the last ``WINDOW`` periods.

    Args:
        now: start of the first period, seconds.
        by_adapter: whether the demand of each adapter is extrapolated instead, as LoRAServe does (section IV-A).
    """

    def __init__(self, now: float, by_adapter: bool = False) -> None:
        self._started_s = now
        self._by_adapter = by_adapter
        self._adapters: dict[AdapterDigest, AdapterCounts] = {}
        self._outputs = 0
        self._output_tokens = 0
        self._has_begun = False  # whether a period with requests has ended

    def register(self, adapter: AdapterDigest, rank: int, size_bytes: int) -> None:
        """Start counting an adapter. A known adapter changes nothing."""
        self._adapters.setdefault(adapter, AdapterCounts(rank, size_bytes))

    def drop(self, adapter: AdapterDigest) -> None:
        """Forget an adapter.

        Raises:
            KeyError: unknown adapter.
        """
        del self._adapters[adapter]

    def __contains__(self, adapter: AdapterDigest) -> bool:
        """Return whether an adapter is known."""
        return adapter in self._adapters

    def arrived(self, adapter: AdapterDigest, prompt_tokens: int) -> None:
        """Count a request that has arrived."""
        known = self._adapters[adapter]
        known.requests += 1
        known.prompt_tokens += prompt_tokens

    def finished(self, adapter: AdapterDigest, output_tokens: int) -> None:
        """Count a complete answer. The adapter may have been dropped since the request arrived."""
        self._outputs += 1
        self._output_tokens += output_tokens
        if (known := self._adapters.get(adapter)) is not None:
            weight = OUTPUT_ALPHA if known.outputs else 1.0
            known.mean_output_tokens += weight * (output_tokens - known.mean_output_tokens)
            known.outputs += 1

    def close(self, now: float) -> None:
        """End the current period and begin the next.

        Raises:
            ValueError: no time has passed since the last call.
        """
        length_s = now - self._started_s
        if length_s <= 0:
            raise ValueError(f"A period must have a positive length, not {length_s} s")
        self._started_s = now
        has_arrivals = self._has_arrivals
        for known in self._adapters.values():
            before = known.history if self._has_begun else []  # Periods before the first request have no trend.
            known.history = [*before, self._tokens(known) / length_s][-WINDOW:]
            known.requests = known.prompt_tokens = 0
        self._has_begun |= has_arrivals

    def demands(self, now: float) -> tuple[AdapterDemand, ...]:
        """Return the expected demand of every known adapter in the next period, in the order of their registration.

        Until the first period with requests has ended, the demand is what has arrived so far. Before any request, all
        adapters have the same demand. After that period, an adapter without a history has no demand yet.

        Args:
            now: current time, seconds; used only until the first period with requests has ended.
        """
        return tuple(
            AdapterDemand(adapter, known.rank, known.size_bytes, tokens_per_s)
            for (adapter, known), tokens_per_s in zip(self._adapters.items(), self._tokens_per_s(now), strict=True)
        )

    def adapters(self) -> tuple[AdapterDemand, ...]:
        """Return every known adapter without its demand, in the order of their registration."""
        return tuple(
            AdapterDemand(adapter, known.rank, known.size_bytes, 0.0) for adapter, known in self._adapters.items()
        )

    def _tokens_per_s(self, now: float) -> list[float]:
        """Return the expected demand of each adapter."""
        adapters = self._adapters.values()
        if not self._has_begun and self._has_arrivals and now > self._started_s:
            return [self._tokens(known) / (now - self._started_s) for known in adapters]
        if not any(known.history for known in adapters):
            return [COLD_TOKENS_PER_S for _ in adapters]
        if self._by_adapter:
            return [extrapolate(known.history) if known.history else 0.0 for known in adapters]
        of_rank = defaultdict[int, list[list[float]]](list)
        for known in adapters:
            of_rank[known.rank].append(known.history)
        scales = {rank: _scale(histories) for rank, histories in of_rank.items()}
        return [scales[known.rank] * _mean(known.history) for known in adapters]

    @property
    def _has_arrivals(self) -> bool:
        """Return whether a request has arrived in this period."""
        return any(known.requests for known in self._adapters.values())

    def _tokens(self, known: AdapterCounts) -> float:
        """Return an adapter's number of demanded tokens in this period so far."""
        mean = known.mean_output_tokens
        if known.outputs < OUTPUTS_KNOWN:
            mean = self._output_tokens / self._outputs if self._outputs else 0.0
        return known.prompt_tokens + known.requests * mean

    def state(self) -> DemandState:
        """Return a copy of the state."""
        state = DemandState(self._adapters, self._outputs, self._output_tokens)
        return msgspec.convert(msgspec.to_builtins(state), DemandState)

    def resume(self, state: DemandState, now: float) -> None:
        """Begin a new period from the state of an earlier estimator.

        Arrivals of the earlier estimator's last period are discarded.

        Args:
            state: state of the earlier estimator.
            now: start of the new period.
        """
        self._started_s = now
        self._adapters = dict(state.adapters)
        for known in self._adapters.values():
            known.requests = known.prompt_tokens = 0
        self._outputs = state.outputs
        self._output_tokens = state.output_tokens
        self._has_begun = any(any(known.history) for known in self._adapters.values())


def _scale(histories: Sequence[list[float]]) -> float:
    """Return the expected demand of a rank, divided by the sum of its adapters' means.

    Args:
        histories: demand of each adapter by period. All end with the same period. A shorter history began later, and is
            extended by its mean, so that a new adapter does not look like a trend of its rank.
    """
    length = max(map(len, histories))
    whole = [[_mean(each)] * (length - len(each)) + each for each in histories]
    of_rank = [sum(values) for values in zip(*whole, strict=True)]
    means = sum(map(_mean, histories))
    return expected(of_rank) / means if means else 0.0


def _mean(history: Sequence[float]) -> float:
    return sum(history) / len(history) if history else 0.0
