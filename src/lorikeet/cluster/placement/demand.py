"""How many tokens per second are asked of every adapter: counted at arrival, looked at one period ahead.

Offered load, not served load: under overload completions stay at what the cluster can do and hide what is asked of it.

Source: LoRAServe, Algorithm 1, step 1. The paper defines neither the extrapolation nor what a token of demand is; both
are ours (docs/decisions/loraserve-placement.md).
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from lorikeet.core.ids import AdapterDigest

WINDOW = 5
"""So many periods the extrapolation looks back."""
COLD_TOKENS_PER_S = 1.0
"""Demand of every adapter before the first period has ended; any number, as long as it is the same."""
OUTPUT_ALPHA = 0.2
"""Weight of the newest answer in the mean length of an adapter's answers."""
OUTPUTS_KNOWN = 5
"""After so many answers an adapter has a mean of its own; before, it has the cluster's."""
LOOKS = (1 / 8, 1 / 4, 1 / 2)
"""When in the first period in which somebody asks placements are made by what has come so far, as parts of it: nothing
else is known of demand yet, and what queues by a wrong placement takes many periods to go."""


class AdapterDemand(NamedTuple):
    """What a placement needs to know of an adapter.

    Attributes:
        adapter: its version.
        rank: its largest.
        size_bytes: of its weights, what a copy moves.
        tokens_per_s: expected in the next period, prompts and answers.
    """

    adapter: AdapterDigest
    rank: int
    size_bytes: int
    tokens_per_s: float


def expected(history: Sequence[float]) -> float:
    """Return the next value: the mean of the last ``WINDOW``, moved towards their line as far as it is certain.

    0 without a history.
    """
    window = history[-WINDOW:]
    mean = _mean(window)
    return mean + certainty(window) * (extrapolate(window) - mean) if mean else 0.0


def certainty(window: Sequence[float]) -> float:
    """Return how much of the slope of a line through the values is more than chance: ``1 - (its error / slope)^2``.

    0 for none, and where there are fewer than three values: any two are on a line. The values of periods with a dozen
    requests differ by chance more than by a trend, and the line through them then leads further off than their mean.

    Source: the positive-part estimator of James and Stein (1961), for one slope.
    """
    points = len(window)
    slope, mean = _slope(window), _mean(window)
    if points < 3 or slope**2 == 0.0:
        return 0.0
    missed = sum((value - mean - slope * x) ** 2 for x, value in zip(_times(points), window, strict=True))
    return max(0.0, 1 - missed / (points - 2) / _spread(points) / slope**2)


def extrapolate(history: Sequence[float]) -> float:
    """Return the next value: least squares through the last ``WINDOW``, at least 0.

    It is at most twice their largest, which is where a line through two points may lead; one through more stays below.

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
    """Return the times of so many values, one period apart, from their middle."""
    return tuple(x - (points - 1) / 2 for x in range(points))


@cache
def _spread(points: int) -> float:
    return sum(x**2 for x in _times(points)) or 1.0  # one point: a level line


class AdapterCounts(msgspec.Struct):
    """What is remembered of one adapter.

    Attributes:
        rank, size_bytes: as in :class:`AdapterDemand`.
        history: demand of the last ``WINDOW`` periods, tokens per second.
        requests, prompt_tokens: of this period so far.
        outputs: complete answers so far.
        mean_output_tokens: exponential mean of their lengths.
    """

    rank: int
    size_bytes: int
    history: list[float] = []
    requests: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    mean_output_tokens: float = 0.0


class DemandState(msgspec.Struct, frozen=True):
    """All that an estimator remembers, to go on from after a restart.

    Attributes:
        adapters: counts of each.
        outputs, output_tokens: complete answers of all adapters, and their tokens.
    """

    adapters: dict[AdapterDigest, AdapterCounts]
    outputs: int
    output_tokens: int


class DemandEstimator:
    """Counts arrivals per adapter and period, and says what the next period will ask.

    An answer's length is not known when its request arrives: it is taken to be the adapter's mean (an exponential one,
    the newest weighs ``OUTPUT_ALPHA``), or that of the whole cluster until ``OUTPUTS_KNOWN`` answers are complete.

    A rank's adapters lie together, so a placement goes by what the rank asks for, which has more requests to learn a
    trend from than any one adapter: an adapter is expected to have the same part of that as in the last ``WINDOW``
    periods.

    Args:
        now: start of the first period, seconds.
    """

    def __init__(self, now: float) -> None:
        self._started_s = now
        self._adapters: dict[AdapterDigest, AdapterCounts] = {}
        self._outputs = 0
        self._output_tokens = 0
        self._has_begun = False  # somebody has asked for something

    def know(self, adapter: AdapterDigest, rank: int, size_bytes: int) -> None:
        """Count from now on for an adapter, which may be known already."""
        self._adapters.setdefault(adapter, AdapterCounts(rank, size_bytes))

    def drop(self, adapter: AdapterDigest) -> None:
        """Forget an adapter.

        Raises:
            KeyError: it is not known.
        """
        del self._adapters[adapter]

    def __contains__(self, adapter: AdapterDigest) -> bool:
        """Whether an adapter is known."""
        return adapter in self._adapters

    def arrived(self, adapter: AdapterDigest, prompt_tokens: int) -> None:
        """Count a request that has come, wherever it is sent."""
        known = self._adapters[adapter]
        known.requests += 1
        known.prompt_tokens += prompt_tokens

    def finished(self, adapter: AdapterDigest, output_tokens: int) -> None:
        """Learn the length of a complete answer; the adapter may have been dropped since its request came."""
        self._outputs += 1
        self._output_tokens += output_tokens
        if (known := self._adapters.get(adapter)) is not None:
            weight = OUTPUT_ALPHA if known.outputs else 1.0
            known.mean_output_tokens += weight * (output_tokens - known.mean_output_tokens)
            known.outputs += 1

    def close(self, now: float) -> None:
        """End the period and begin the next.

        Raises:
            ValueError: no time has passed since the last one.
        """
        length_s = now - self._started_s
        if length_s <= 0:
            raise ValueError(f"A period of {length_s} s")
        self._started_s = now
        is_asked = self._is_asked
        for known in self._adapters.values():
            before = known.history if self._has_begun else []  # the time before anybody came tells nothing of trends
            known.history = [*before, self._tokens(known) / length_s][-WINDOW:]
            known.requests = known.prompt_tokens = 0
        self._has_begun |= is_asked

    def demands(self, now: float) -> tuple[AdapterDemand, ...]:
        """Return what the next period asks of every known adapter, in the order in which they became known.

        Before a period with requests has ended it is what has come so far, and before any period all are alike. Later
        an adapter without a history has no demand yet.

        Args:
            now: seconds; counts only before such a period has ended.
        """
        return tuple(
            AdapterDemand(adapter, known.rank, known.size_bytes, tokens_per_s)
            for (adapter, known), tokens_per_s in zip(self._adapters.items(), self._tokens_per_s(now), strict=True)
        )

    def _tokens_per_s(self, now: float) -> list[float]:
        """Return what the next period asks of each adapter."""
        adapters = self._adapters.values()
        if not self._has_begun and self._is_asked and now > self._started_s:
            return [self._tokens(known) / (now - self._started_s) for known in adapters]
        if not any(known.history for known in adapters):
            return [COLD_TOKENS_PER_S for _ in adapters]
        of_rank = defaultdict[int, list[list[float]]](list)
        for known in adapters:
            of_rank[known.rank].append(known.history)
        scales = {rank: _scale(histories) for rank, histories in of_rank.items()}
        return [scales[known.rank] * _mean(known.history) for known in adapters]

    @property
    def _is_asked(self) -> bool:
        """Somebody has asked for something in this period."""
        return any(known.requests for known in self._adapters.values())

    def _tokens(self, known: AdapterCounts) -> float:
        """Return the tokens that an adapter was asked for in this period so far."""
        mean = known.mean_output_tokens
        if known.outputs < OUTPUTS_KNOWN:
            mean = self._output_tokens / self._outputs if self._outputs else 0.0
        return known.prompt_tokens + known.requests * mean

    def state(self) -> DemandState:
        """Return all that is remembered, a copy."""
        state = DemandState(self._adapters, self._outputs, self._output_tokens)
        return msgspec.convert(msgspec.to_builtins(state), DemandState)

    def resume(self, state: DemandState, now: float) -> None:
        """Go on from what an earlier estimator remembered, with a new period; what came in the last one is forgotten.

        Args:
            state: of the earlier one.
            now: start of the period that begins.
        """
        self._started_s = now
        self._adapters = dict(state.adapters)
        for known in self._adapters.values():
            known.requests = known.prompt_tokens = 0
        self._outputs, self._output_tokens = state.outputs, state.output_tokens
        self._has_begun = any(any(known.history) for known in self._adapters.values())


def _scale(histories: Sequence[list[float]]) -> float:
    """Return what is expected of a rank, over the sum of its adapters' means.

    Args:
        histories: of the adapters. All end with the same period; those that are shorter began later, and are taken to
            have had their mean before, so that an adapter that comes is no trend of its rank.
    """
    length = max(map(len, histories))
    whole = [[_mean(each)] * (length - len(each)) + each for each in histories]
    of_rank = [sum(values) for values in zip(*whole, strict=True)]
    means = sum(map(_mean, histories))
    return expected(of_rank) / means if means else 0.0


def _mean(history: Sequence[float]) -> float:
    return sum(history) / len(history) if history else 0.0
