"""Who was passed over is owed: dLoRA's credits, which keep dynamic batching from starving anybody.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 3 (appendix A.1). It prints neither amounts nor values.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from math import inf
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.dynamic import Decision, decide, requests_of
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchingMode, BatchingSetup, BatchWork, LiveRequest, allow
from lorikeet.scheduling.batching.mode_times import Iteration, ModeBatch, ModeTimes, ThresholdParams, Thresholds

AdapterType = AdapterDigest | None
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


def transfers(chosen: Sequence[LiveRequest], oldest: Sequence[LiveRequest]) -> dict[AdapterType, int]:
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


def _apportion(total: int, weights: Mapping[AdapterType, int]) -> dict[AdapterType, int]:
    """Split ``total`` in proportion, into whole parts; none is larger than its exact part rounded up."""
    parts: dict[AdapterType, int] = {}
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
        self._credits: dict[AdapterType, int] = {}
        self._starving: set[AdapterType] = set()

    def __getitem__(self, each: AdapterType) -> int:
        """Return a type's credit."""
        return self._credits.get(each, self._params.initial)

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._credits)

    def total(self) -> int:
        """Return the sum over all accounts: that of as many initial credits."""
        return sum(self._credits.values())

    def meet(self, types: Collection[AdapterType]) -> None:
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

    def repayments(self, batch: Sequence[LiveRequest]) -> dict[AdapterType, int]:
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

    def starving(self, on_turn: AdapterDigest | None = None) -> Collection[AdapterType]:
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

    def apply(self, gains: Mapping[AdapterType, int], steps: int) -> None:
        """Book the transfers of identical iterations."""
        for each, gain in gains.items():
            self._credits[each] += steps * gain

    def steps_until_review(self, gains: Mapping[AdapterType, int]) -> float:
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


class _Pending(NamedTuple):
    """What the last choice brings with every iteration of it.

    Attributes:
        merged: adapter that is merged for it.
        starving: whose turn it is; nobody's if nobody starves.
        gains: credits by type.
        iteration: for the log of the period; None: it does not belong there.
        is_brief: the next choice may differ for times alone: the first of its state or its period, since the end of the
            last may have moved the thresholds, or the faster of two ways to serve those who starve.
    """

    merged: AdapterDigest | None
    starving: Set[AdapterType]
    gains: dict[AdapterType, int]
    iteration: Iteration | None
    is_brief: bool


class DLora(BatchingMode):
    """See the module.

    Args:
        setup: of the replica.
        tuned: whether the thresholds move.
        credited: whether credits are kept; without them nothing prevents starvation.
        backfill: those who starve have merged turns, one adapter after the other, where that is the faster way to serve
            everybody; else their turn is filled up with the oldest others. Without, it is theirs alone and unmerged, as
            the paper has it.
        threshold_params, credit_params: other values than ours.

    Attributes:
        max_batch: most requests in a batch.
        thresholds: alpha and beta, and the log of the period.
        credits: accounts of the types.
        times: of steps and switches so far.
    """

    def __init__(
        self,
        setup: BatchingSetup,
        *,
        tuned: bool = True,
        credited: bool = True,
        backfill: bool = False,
        threshold_params: ThresholdParams | None = None,
        credit_params: CreditParams | None = None,
    ) -> None:
        self.max_batch = setup.max_batch
        self._tuned, self._credited, self._backfill = tuned, credited, backfill
        self.times = ModeTimes(setup.kernel_form, setup.rank)
        self.thresholds = Thresholds(self.times, threshold_params)
        self.credits = Credits(credit_params or usual_params(setup.max_batch, has_turns=backfill))
        self._merged: AdapterDigest | None = None
        self._state: AdapterDigest | None = None  # what Algorithm 1 has merged: a turn of the starving interrupts it
        self._on_turn: AdapterDigest | None = None
        self._pending: _Pending | None = None

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return the starving if there are any, else what dynamic batching decides."""
        self._pending = None
        counts = Counter(request.adapter for request in live)
        if self._credited:
            self.credits.meet(counts)
        if not live:
            return BatchingChoice(self._merged, frozenset())
        oldest = live[: self.max_batch]
        legal = {request.adapter for request in live if request.is_legal}
        starving = self.credits.starving(self._on_turn) if self._credited and len(counts) > 1 else ()
        candidate: AdapterDigest | None = None
        if starving:
            merged, batch = self._pass(live, starving, legal)
        else:
            # What is merged for nobody is unmerged: the next may be merged without an unmerged iteration in between,
            # unless the cost of those ought to be measured.
            state = self._state if counts[self._state] else None
            is_trial = self._tuned and state is None and self.times.lora_steps_due > 0
            merged, batch, candidate = self._decide(live, self._solvent(legal, oldest), state, is_trial=is_trial)
        is_first = merged != self._merged
        if self._tuned and (is_first or not starving):
            is_first = self.thresholds.meet(merged, candidate) or is_first
        logged = self._tuned and candidate is not None
        self._pending = _Pending(
            merged,
            frozenset(starving),
            self._gains(batch, oldest, merged, is_pass=bool(starving)),
            self._iteration(counts[candidate], oldest) if logged else None,
            is_first or (bool(starving) and self._backfill),
        )
        return allow(batch, live, merged)

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        """Learn from the times, book the credits, and log the iterations.

        Raises:
            AssertionError: nothing was chosen before.
        """
        assert self._pending is not None
        # Not before: a plan that runs nobody switches nothing.
        self._merged = self._pending.merged
        self._on_turn = self._merged if self._backfill and self._pending.starving else None
        if not self._pending.starving:
            self._state = self._merged
        is_trial, has_measured = self.times.lora_steps_due > 0, self.times.has_measured(len(work.rows))
        if not work.is_assisted:
            self.times.note(steps, work, step_s)
        has_learned = not has_measured and self.times.has_measured(len(work.rows))
        if has_learned or (is_trial and not self.times.lora_steps_due):
            self.thresholds.begin()
        if switch_s:
            self.times.note_switch(self._merged is not None, switch_s)
        starving = self._pending.starving
        if not starving or starving & work.types:  # else their adapters are on their way: it was no turn of theirs
            self.credits.apply(self._pending.gains, steps)
        if self._pending.iteration is not None:
            self.thresholds.note(self._pending.iteration, steps)

    def steps_until_review(self) -> float:
        """Return the steps until credits or the end of a period may change the choice, 1 where times may do so too."""
        if self._pending is None:
            return inf
        if self._pending.is_brief:
            return 1
        steps = self.credits.steps_until_review(self._pending.gains)
        if self._pending.merged is None:
            steps = min(steps, self.times.lora_steps_due or inf)
        return steps if self._pending.iteration is None else min(steps, self.thresholds.steps_left)

    def _gains(
        self,
        batch: Sequence[LiveRequest],
        oldest: Sequence[LiveRequest],
        merged: AdapterDigest | None,
        *,
        is_pass: bool,
    ) -> dict[AdapterType, int]:
        if not self._credited or not (is_pass or merged is not None):
            return {}
        return transfers(batch, oldest) or (self.credits.repayments(batch) if is_pass else {})

    def _decide(
        self,
        live: Sequence[LiveRequest],
        legal: Collection[AdapterType],
        merged: AdapterDigest | None,
        *,
        is_trial: bool = False,
    ) -> Decision:
        """Return what Algorithm 1 comes to, as if ``merged`` were merged; nothing is merged in a trial."""
        alpha = inf if is_trial else self.thresholds.alpha
        return decide(live, merged, legal, self.max_batch, alpha, self.thresholds.beta)

    def _pass(
        self, live: Sequence[LiveRequest], starving: Collection[AdapterType], legal: Collection[AdapterType]
    ) -> tuple[AdapterDigest | None, Sequence[LiveRequest]]:
        """Return the turn of those who starve, and what is merged for it."""
        if self._backfill and (turn := self._turn(live[: self.max_batch], starving, legal)) is not None:
            return turn, requests_of(turn, live)[: self.max_batch]
        batch = [request for request in live if request.adapter in starving][: self.max_batch]
        if self._backfill:
            others = [request for request in live[: self.max_batch] if request.adapter not in starving]
            batch += others[: self.max_batch - len(batch)]
        is_merged = all(request.adapter == self._merged for request in batch)
        return (self._merged if is_merged else None), batch

    def _turn(
        self, oldest: Sequence[LiveRequest], starving: Collection[AdapterType], legal: Collection[AdapterType]
    ) -> AdapterDigest | None:
        """Return whom of the starving to merge; None if all types after the other take longer than all together.

        None as well if nobody has measured yet how long as many take together.
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
        """Return those whose credit covers everybody whom their merging would pass over in one iteration."""
        if not self._credited:
            return types
        counts = Counter(request.adapter for request in oldest)
        return {each for each in types if self.credits[each] >= len(oldest) - counts[each]}

    def _iteration(self, candidates: int, oldest: Sequence[LiveRequest]) -> Iteration:
        unmerged = self.times.batch(request.adapter for request in oldest)
        return Iteration(ModeBatch(min(candidates, self.max_batch)), unmerged)
