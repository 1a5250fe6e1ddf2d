"""dLoRA's batching: merged or unmerged by need, with thresholds that tune themselves and credits against starvation.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
section 4.2 and appendix A.1. What it leaves open: docs/decisions/batching-mode.md.
"""

from collections import Counter
from collections.abc import Collection, Sequence, Set
from math import inf
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.credits import CreditParams, Credits, Type, transfers, usual_params
from lorikeet.scheduling.batching.dynamic import Decision, decide, requests_of
from lorikeet.scheduling.batching.mode import BatchingMode, BatchingSetup, BatchWork, Choice, Live, allow
from lorikeet.scheduling.batching.thresholds import Iteration, ThresholdParams, Thresholds
from lorikeet.scheduling.batching.times import Batch, ModeTimes


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
    starving: Set[Type]
    gains: dict[Type, int]
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

    def choose(self, live: Sequence[Live]) -> Choice:
        """Return the starving if there are any, else what dynamic batching decides."""
        self._pending = None
        counts = Counter(request.adapter for request in live)
        if self._credited:
            self.credits.meet(counts)
        if not live:
            return Choice(self._merged, frozenset())
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
        self, batch: Sequence[Live], oldest: Sequence[Live], merged: AdapterDigest | None, *, is_pass: bool
    ) -> dict[Type, int]:
        if not self._credited or not (is_pass or merged is not None):
            return {}
        return transfers(batch, oldest) or (self.credits.repayments(batch) if is_pass else {})

    def _decide(
        self, live: Sequence[Live], legal: Collection[Type], merged: AdapterDigest | None, *, is_trial: bool = False
    ) -> Decision:
        """Return what Algorithm 1 comes to, as if ``merged`` were merged; nothing is merged in a trial."""
        alpha = inf if is_trial else self.thresholds.alpha
        return decide(live, merged, legal, self.max_batch, alpha, self.thresholds.beta)

    def _pass(
        self, live: Sequence[Live], starving: Collection[Type], legal: Collection[Type]
    ) -> tuple[AdapterDigest | None, Sequence[Live]]:
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
        self, oldest: Sequence[Live], starving: Collection[Type], legal: Collection[Type]
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
        in_turn_s = sum(self.times.batch_s(Batch(count)) + switch_s for count in counts.values())
        together_s = self.times.batch_s(self.times.batch(request.adapter for request in oldest))
        return first if in_turn_s < together_s else None

    def _solvent(self, types: Collection[Type], oldest: Sequence[Live]) -> Collection[Type]:
        """Return those whose credit covers everybody whom their merging would pass over in one iteration."""
        if not self._credited:
            return types
        counts = Counter(request.adapter for request in oldest)
        return {each for each in types if self.credits[each] >= len(oldest) - counts[each]}

    def _iteration(self, candidates: int, oldest: Sequence[Live]) -> Iteration:
        unmerged = self.times.batch(request.adapter for request in oldest)
        return Iteration(Batch(min(candidates, self.max_batch)), unmerged)
