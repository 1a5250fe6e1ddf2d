"""Who was passed over is owed: dLoRA's credits, which keep dynamic batching from starving anybody.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 3 (appendix A.1). It prints neither amounts nor values.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.mode import Live

Type = AdapterDigest | None
"""Of a request: its adapter, None for the base model, which has credit like any other."""


class CreditParams(NamedTuple):
    """In credits; one is a request that was passed over in one iteration.

    Attributes:
        initial: what a type begins with.
        starves_above: with more than this a type starves, and goes first.
        normal_below: with less than this it no longer does.
        turn_ends_below: with less than this the turn of a type that is merged for it is over; None: as soon as it no
            longer starves.
        price: what a request of a type with a surplus pays for an iteration in which nobody is passed over, because
            somebody starves.
    """

    initial: int
    starves_above: int
    normal_below: int
    turn_ends_below: int | None = None
    price: int = 2

    def satisfied_below(self, *, is_on_turn: bool) -> int:
        """Return with less than what a type starves no longer, and its turn is over."""
        return self.normal_below if self.turn_ends_below is None or not is_on_turn else self.turn_ends_below


def usual_params(max_batch: int, *, has_turns: bool) -> CreditParams:
    """Return ours. No pass for the starving can then cost a type more than it has: that is at most ``max_batch``.

    Args:
        max_batch: most requests in a batch.
        has_turns: those who starve may be merged, so that a turn costs others little and may come sooner.
    """
    if not has_turns:
        return CreditParams(2 * max_batch, starves_above=2 * max_batch + 64, normal_below=2 * max_batch + 16)
    initial = 4 * max_batch
    return CreditParams(
        initial,
        starves_above=initial + 16,
        normal_below=initial + 2,
        turn_ends_below=initial - min(48, 2 * max_batch),
    )


def transfers(chosen: Sequence[Live], oldest: Sequence[Live]) -> dict[Type, int]:
    """Return what each type gains, or pays, if ``chosen`` run where the oldest should.

    Each request passed over earns its type one credit. Those who run in its place pay, in proportion to how many they
    are, rounded to whole credits; if all who run are among the oldest anyway, all of these pay.
    """
    running = {request.request_id for request in chosen}
    entitled = {request.request_id for request in oldest}
    gains = Counter(request.adapter for request in oldest if request.request_id not in running)
    payers = Counter(request.adapter for request in chosen if request.request_id not in entitled)
    payers = payers or Counter(request.adapter for request in chosen)
    passed_over = gains.total()
    gains.subtract(_apportion(passed_over, payers))
    return {each: gain for each, gain in gains.items() if gain}


def _apportion(total: int, weights: Mapping[Type, int]) -> dict[Type, int]:
    """Split ``total`` in proportion, into whole parts; none is larger than its exact part rounded up."""
    parts: dict[Type, int] = {}
    weight_before, sum_of_weights = 0, sum(weights.values())
    for each, weight in weights.items():
        weight_after = weight_before + weight
        parts[each] = total * weight_after // sum_of_weights - total * weight_before // sum_of_weights
        weight_before = weight_after
    return parts


class Credits:
    """Accounts of the types that have live requests.

    All begin with the same. What one gains others pay, so the mean never changes. With its last request a type leaves,
    and is owed nothing any longer, and owes nothing: the rest goes to those who owe, or is taken from those who are
    owed, in proportion.

    Args:
        params: values.
    """

    def __init__(self, params: CreditParams) -> None:
        self._params = params
        self._credits: dict[Type, int] = {}
        self._starving: set[Type] = set()

    def __getitem__(self, each: Type) -> int:
        """Return a type's credit."""
        return self._credits.get(each, self._params.initial)

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._credits)

    def total(self) -> int:
        """Return the sum over all accounts: that of as many initial credits."""
        return sum(self._credits.values())

    def meet(self, types: Collection[Type]) -> None:
        """Open accounts for live types that have none, and close those of types that are gone."""
        for gone in [each for each in self._credits if each not in types]:
            self._starving.discard(gone)
            self._settle(self._credits.pop(gone) - self._params.initial)
        for each in types:
            self._credits.setdefault(each, self._params.initial)

    def _settle(self, surplus: int) -> None:
        """Hand what somebody had above the initial credit to those who owe, or what it owed to those who are owed.

        Together they owe, or are owed, at least as much, since the mean is the initial credit.
        """
        sign = 1 if surplus > 0 else -1
        others = {each: sign * (self._params.initial - has) for each, has in self._credits.items()}
        for each, part in _apportion(abs(surplus), {each: owed for each, owed in others.items() if owed > 0}).items():
            self._credits[each] += sign * part

    def repayments(self, batch: Sequence[Live]) -> dict[Type, int]:
        """Return what an iteration moves in which all of ``batch`` run and nobody is passed over.

        Those who are owed are served now, and pay for it; those who owe get it, in proportion to their requests.
        """
        requests, initial = Counter(request.adapter for request in batch), self._params.initial
        debtors = {each: count for each, count in requests.items() if self[each] < initial}
        if not debtors:
            return {}
        owed = {each: self[each] - initial for each in requests if self[each] > initial}
        paid = {each: min(surplus, self._params.price * requests[each]) for each, surplus in owed.items()}
        return {each: -part for each, part in paid.items()} | _apportion(sum(paid.values()), debtors)

    def starving(self, on_turn: AdapterDigest | None = None) -> Collection[Type]:
        """Mark who starves by now and who no longer does, and return those who do.

        Args:
            on_turn: the adapter that is merged because it starved. Its turn goes on while it has requests and credit: a
                switch back for every few iterations would cost more than they.
        """
        for each, has in self._credits.items():
            is_on_turn = on_turn is not None and each == on_turn
            if each in self._starving and has < self._params.satisfied_below(is_on_turn=is_on_turn):
                self._starving.discard(each)
            elif has > self._params.starves_above:
                self._starving.add(each)
        return self._starving

    def turn_steps(self, passed_over: int) -> int:
        """Return how long a turn lasts, at least 1, for which so many requests are passed over."""
        rules = self._params
        return max(1, (rules.starves_above - rules.satisfied_below(is_on_turn=True)) // max(1, passed_over))

    def apply(self, gains: Mapping[Type, int], steps: int) -> None:
        """Book the transfers of identical iterations."""
        for each, gain in gains.items():
            self._credits[each] += steps * gain

    def steps_until_review(self, gains: Mapping[Type, int]) -> float:
        """Return after how many such iterations something may change: who starves, who owes, or who can pay.

        Merged turns of the starving are not asked for: each of their iterations is decided anew.
        """
        rules, steps = self._params, float("inf")
        for each, gain in gains.items():
            has, starves = self._credits[each], each in self._starving
            if gain > 0 and has < rules.initial:  # then nobody owes it anything any longer
                steps = min(steps, (rules.initial - has) // gain)
            elif gain > 0 and not starves:
                steps = min(steps, (rules.starves_above - has) // gain + 1)
            elif gain < 0 and has > rules.initial:  # it is owed no more then, and starves no longer before
                steps = min(steps, (has - rules.initial) // -gain)
                steps = min(steps, (has - rules.normal_below) // -gain + 1) if starves else steps
            elif gain < 0 and starves:
                steps = min(steps, (has - rules.normal_below) // -gain + 1)
            elif gain < 0:  # it is merged, and must have as much as an iteration costs before each
                steps = min(steps, has // -gain)
        return max(1, steps)
