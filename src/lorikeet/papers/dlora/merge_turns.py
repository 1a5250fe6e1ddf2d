"""Extends dLoRA's batching by merged turns, for lower latency below saturation.

``MergeTurns`` decides by Algorithm 1 like ``dlora.DLora``. The two modes differ in four points. Starving adapters are
merged in turn where that is faster for all, and otherwise run unmerged beside the oldest others, instead of alone.
Credits are settled when the last request of an adapter ends. Thresholds begin at the break-even ratio, and times are
learned from the steps themselves. An adapter without requests is replaced by the next adapter without an unmerged
iteration in between. See docs/decisions/batching-mode.md for the gains.

Source of the extended algorithms: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM
Serving", OSDI 2024, Algorithms 1 to 3.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from math import inf
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.papers.dlora.credits import AdapterType, apportioned, credit_transfers, merging_cost
from lorikeet.papers.dlora.dynamic import Decision, decide, requests_of
from lorikeet.papers.dlora.iteration_times import note_run
from lorikeet.papers.dlora.mode_times import (
    BREAK_EVEN,
    BreakEvenThresholds,
    ModeBatch,
    ModeIteration,
    ModeTimes,
)
from lorikeet.papers.dlora.thresholds import ThresholdParams
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchingMode, BatchingSetup, BatchWork, LiveRequest, allow


class CreditParams(NamedTuple):
    """Parameters in credits. One credit is one request that is passed over in one iteration.

    Attributes:
        initial: credits of a new type.
        starves_above: number of credits above which a type is starving, and runs first.
        normal_below: number of credits below which a starving type stops starving.
        turn_ends_below: number of credits below which the merged turn of a starving type ends; None to end the turn as
            soon as the type stops starving.
        price: credits that a request of a type with a surplus pays for an iteration that serves a starving type and
            passes over no request.
    """

    initial: int
    starves_above: int
    normal_below: int
    turn_ends_below: int | None = None
    price: int = 2

    def satisfied_below(self, *, is_on_turn: bool) -> int:
        """Return the number of credits below which a type is no longer starving, or its turn ends."""
        return self.normal_below if self.turn_ends_below is None or not is_on_turn else self.turn_ends_below


def default_credit_params(max_batch: int) -> CreditParams:
    """Return our defaults.

    With these values, no type can be charged more credits than it has: at most ``max_batch`` at a time.

    Args:
        max_batch: largest number of requests in a batch.
    """
    initial = 4 * max_batch
    return CreditParams(
        initial,
        starves_above=initial + 16,
        normal_below=initial + 2,
        turn_ends_below=initial - min(48, 2 * max_batch),
    )


class TurnCredits:
    """Holds the credit accounts of the types that have live requests.

    All accounts start with the same number of credits. Every gain of one type is paid by other types, so the mean never
    changes. When the last request of a type ends, its account is closed. Its surplus is given to the types below the
    initial credits, or its deficit is taken from the types above, in proportion.

    Args:
        params: parameters of the credits.
    """

    def __init__(self, params: CreditParams) -> None:
        self._params = params
        self._credits: dict[AdapterType, int] = {}
        self._starving: set[AdapterType] = set()

    def __getitem__(self, each: AdapterType) -> int:
        """Return the credits of a type."""
        return self._credits.get(each, self._params.initial)

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._credits)

    def total(self) -> int:
        """Return the sum of all accounts, which is their number times the initial credits."""
        return sum(self._credits.values())

    def update_types(self, types: Collection[AdapterType]) -> None:
        """Open accounts for new types, and close those of types without live requests."""
        for gone in [each for each in self._credits if each not in types]:
            self._starving.discard(gone)
            self._close_account(self._credits.pop(gone) - self._params.initial)
        for each in types:
            self._credits.setdefault(each, self._params.initial)

    def _close_account(self, surplus: int) -> None:
        """Distribute the balance of a closed account over other types.

        A surplus is given to the types in deficit, and a deficit is taken from the types in surplus. Together these
        types have at least as much, because the mean is always the initial credits.
        """
        sign = 1 if surplus > 0 else -1
        others = {each: sign * (self._params.initial - has) for each, has in self._credits.items()}
        for each, part in apportioned(abs(surplus), {each: owed for each, owed in others.items() if owed > 0}).items():
            self._credits[each] += sign * part

    def repayments(self, batch: Sequence[LiveRequest]) -> dict[AdapterType, int]:
        """Return the credits that move in an iteration in which all of ``batch`` run and no request is passed over.

        Types in surplus are served now and pay; types in deficit receive, in proportion to their requests.
        """
        requests, initial = Counter(request.adapter for request in batch), self._params.initial
        debtors = {each: count for each, count in requests.items() if self[each] < initial}
        if not debtors:
            return {}
        owed = {each: self[each] - initial for each in requests if self[each] > initial}
        paid = {each: min(surplus, self._params.price * requests[each]) for each, surplus in owed.items()}
        return {each: -part for each, part in paid.items()} | apportioned(sum(paid.values()), debtors)

    def starving(self, on_turn: AdapterDigest | None = None) -> Collection[AdapterType]:
        """Update which types are starving, and return them.

        Args:
            on_turn: adapter that is merged because it starved. Its turn lasts until its credits are below
                ``turn_ends_below``, because frequent switches would cost more than the iterations between them.
        """
        for each, has in self._credits.items():
            is_on_turn = on_turn is not None and each == on_turn
            if each in self._starving and has < self._params.satisfied_below(is_on_turn=is_on_turn):
                self._starving.discard(each)
            elif has > self._params.starves_above:
                self._starving.add(each)
        return self._starving

    def turn_steps(self, passed_over: int) -> int:
        """Return the number of iterations of a turn (at least 1) that passes over this many requests each time."""
        rules = self._params
        return max(1, (rules.starves_above - rules.satisfied_below(is_on_turn=True)) // max(1, passed_over))

    def apply(self, gains: Mapping[AdapterType, int], steps: int) -> None:
        """Apply the gains of ``steps`` identical iterations."""
        for each, gain in gains.items():
            self._credits[each] += steps * gain

    def steps_until_review(self, gains: Mapping[AdapterType, int]) -> float:
        """Return the number of iterations after which a type's state may change.

        A type may change between starving, surplus, deficit and unable to pay.

        Merged turns of starving types do not use this number, because their iterations are decided one by one.
        """
        rules, steps = self._params, float("inf")
        for each, gain in gains.items():
            has, starves = self._credits[each], each in self._starving
            if gain > 0 and has < rules.initial:  # until the type's deficit is settled
                steps = min(steps, (rules.initial - has) // gain)
            elif gain > 0 and not starves:
                steps = min(steps, (rules.starves_above - has) // gain + 1)
            elif gain < 0 and has > rules.initial:  # until the type's surplus is spent; it stops starving before that
                steps = min(steps, (has - rules.initial) // -gain)
                steps = min(steps, (has - rules.normal_below) // -gain + 1) if starves else steps
            elif gain < 0 and starves:
                steps = min(steps, (has - rules.normal_below) // -gain + 1)
            elif gain < 0:  # the type is merged, and must be able to pay for each iteration
                steps = min(steps, has // -gain)
        return max(1, steps)


class _Pending(NamedTuple):
    """Holds the last choice, with the effects of each of its iterations.

    Attributes:
        merged: adapter that is merged for the choice; None for none.
        starving: starving types that the choice serves; empty if no type starves.
        gains: credits by type.
        iteration: entry for the log of the tuning period; None if the iteration does not count.
        is_provisional: whether measured times alone may change the next choice. This is true for the first choice of a
            merge state or period, because the thresholds may have moved, and for turns of starving types that may be
            served in two ways.
    """

    merged: AdapterDigest | None
    starving: Set[AdapterType]
    gains: dict[AdapterType, int]
    iteration: ModeIteration | None
    is_provisional: bool


class MergeTurns(BatchingMode):
    """Chooses between merged and unmerged iterations, and serves starving types in turns.

    Args:
        setup: facts about the replica.
        threshold_params: parameters of the thresholds.
        credit_params: parameters of the credits; None for our defaults.

    Attributes:
        max_batch: largest number of requests in a batch.
        thresholds: alpha and beta, with their tuning.
        credits: credit accounts of the types.
        times: measured times of steps and switches.
    """

    merges = True

    def __init__(
        self,
        setup: BatchingSetup,
        threshold_params: ThresholdParams = BREAK_EVEN,
        credit_params: CreditParams | None = None,
    ) -> None:
        self.max_batch = setup.max_batch
        self.times = ModeTimes(setup.kernel_form, setup.rank)
        self.thresholds = BreakEvenThresholds(self.times, threshold_params)
        self.credits = TurnCredits(credit_params or default_credit_params(setup.max_batch))
        self._merged: AdapterDigest | None = None
        # Adapter merged by Algorithm 1; a turn of a starving type interrupts it
        self._state: AdapterDigest | None = None
        self._on_turn: AdapterDigest | None = None
        self._pending: _Pending | None = None

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return requests of starving types if there are any, otherwise the choice of dynamic batching."""
        self._pending = None
        counts = Counter(request.adapter for request in live)
        self.credits.update_types(counts)
        if not live:
            return BatchingChoice(self._merged, frozenset())
        oldest = live[: self.max_batch]
        legal = {request.adapter for request in live if request.is_legal}
        starving = self.credits.starving(self._on_turn) if len(counts) > 1 else ()
        candidate: AdapterDigest | None = None
        if starving:
            merged, batch = self._starving_turn(live, starving, legal)
        else:
            # A merged adapter without live requests counts as unmerged, so that another adapter can be merged without
            # an unmerged iteration in between. The exception is when unmerged iterations are due to be measured.
            state = self._state if counts[self._state] else None
            is_trial = state is None and self.times.lora_steps_due > 0
            merged, batch, candidate = self._decide(live, self._solvent(legal, oldest), state, is_trial=is_trial)
        is_first = merged != self._merged
        if is_first or not starving:
            is_first = self.thresholds.start_iteration(merged, candidate) or is_first
        self._pending = _Pending(
            merged,
            frozenset(starving),
            self._gains(batch, oldest, merged, serves_starving=bool(starving)),
            self._iteration(counts[candidate], oldest) if candidate is not None else None,
            is_first or bool(starving),
        )
        return allow(batch, live, merged)

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        """Record the times, apply the credits, and log the iterations for the tuning.

        Raises:
            AssertionError: ``choose`` was not called before.
        """
        assert self._pending is not None
        # The state is set here, not in ``choose``, because a plan without sequences does not switch.
        self._merged = self._pending.merged
        self._on_turn = self._merged if self._pending.starving else None
        if not self._pending.starving:
            self._state = self._merged
        is_trial, has_measured = self.times.lora_steps_due > 0, self.times.has_measured(len(work.rows))
        note_run(self.times, steps, work, step_s, self._merged is not None, switch_s)
        has_learned = not has_measured and self.times.has_measured(len(work.rows))
        if has_learned or (is_trial and not self.times.lora_steps_due):
            self.thresholds.recalibrate()
        starving = self._pending.starving
        # Otherwise the starving types wait for their adapters and had no turn
        if not starving or starving & work.types:
            self.credits.apply(self._pending.gains, steps)
        if self._pending.iteration is not None:
            self.thresholds.note(self._pending.iteration, steps)

    def steps_until_review(self) -> float:
        """Return the number of steps until credits or the end of a period may change the choice.

        Return 1 if measured times may change it.
        """
        if self._pending is None:
            return inf
        if self._pending.is_provisional:
            return 1
        steps = self.credits.steps_until_review(self._pending.gains)
        if self._pending.merged is None:
            steps = min(steps, self.times.lora_steps_due or inf)
        return steps if self._pending.iteration is None else min(steps, self.thresholds.iterations_left)

    def _gains(
        self,
        batch: Sequence[LiveRequest],
        oldest: Sequence[LiveRequest],
        merged: AdapterDigest | None,
        *,
        serves_starving: bool,
    ) -> dict[AdapterType, int]:
        if not (serves_starving or merged is not None):
            return {}
        return credit_transfers(batch, oldest) or (self.credits.repayments(batch) if serves_starving else {})

    def _decide(
        self,
        live: Sequence[LiveRequest],
        legal: Collection[AdapterType],
        merged: AdapterDigest | None,
        *,
        is_trial: bool = False,
    ) -> Decision:
        """Return the decision of Algorithm 1 with ``merged`` as the merged adapter. A trial merges no adapter."""
        alpha = inf if is_trial else self.thresholds.alpha
        return decide(live, merged, legal, self.max_batch, alpha, self.thresholds.beta)

    def _starving_turn(
        self, live: Sequence[LiveRequest], starving: Collection[AdapterType], legal: Collection[AdapterType]
    ) -> tuple[AdapterDigest | None, Sequence[LiveRequest]]:
        """Return the adapter to merge for a turn of starving types, and the requests that run in it."""
        if (turn := self._merged_turn(live[: self.max_batch], starving, legal)) is not None:
            return turn, requests_of(turn, live)[: self.max_batch]
        batch = [request for request in live if request.adapter in starving][: self.max_batch]
        others = [request for request in live[: self.max_batch] if request.adapter not in starving]
        batch += others[: self.max_batch - len(batch)]
        is_merged = all(request.adapter == self._merged for request in batch)
        return (self._merged if is_merged else None), batch

    def _merged_turn(
        self, oldest: Sequence[LiveRequest], starving: Collection[AdapterType], legal: Collection[AdapterType]
    ) -> AdapterDigest | None:
        """Return the starving adapter to merge for a turn.

        Return None if serving all types one after the other takes longer than serving them in one batch, or if batches
        of so many adapters have not been measured yet.
        """
        counts = Counter(request.adapter for request in oldest)
        owed = [each for each in counts if each is not None and each in starving and each in legal]
        adapters = len(counts.keys() - {None})
        if not owed or not self.times.is_known or not self.times.has_measured(adapters):
            return None
        first = max(owed, key=lambda each: (each == self._on_turn, self.credits[each]))
        switch_s = self.times.switch_s(to_merged=True) / self.credits.turn_steps(len(oldest) - counts[first])
        in_turn_s = sum(self.times.batch_s(ModeBatch(count)) + switch_s for count in counts.values())
        together_s = self.times.batch_s(self.times.batch(request.adapter for request in oldest))
        return first if in_turn_s < together_s else None

    def _solvent(self, types: Collection[AdapterType], oldest: Sequence[LiveRequest]) -> Collection[AdapterType]:
        """Return the types with enough credits to pay for the requests that a merged iteration passes over."""
        among_oldest = Counter(request.adapter for request in oldest)
        return {each for each in types if self.credits[each] >= merging_cost(each, among_oldest)}

    def _iteration(self, candidates: int, oldest: Sequence[LiveRequest]) -> ModeIteration:
        unmerged = self.times.batch(request.adapter for request in oldest)
        return ModeIteration(ModeBatch(min(candidates, self.max_batch)), unmerged)
