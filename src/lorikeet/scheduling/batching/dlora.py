"""dLoRA's batching: merged or unmerged by need, with thresholds that tune themselves and credits against starvation.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
section 4.2 and appendix A.1. What it leaves open: docs/decisions/batching-mode.md.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.credits import CreditParams, Credits, Type, transfers, usual_params
from lorikeet.scheduling.batching.dynamic import decide
from lorikeet.scheduling.batching.mode import BatchingMode, BatchingSetup, BatchWork, Choice, Live, allow
from lorikeet.scheduling.batching.thresholds import Iteration, ThresholdParams, Thresholds
from lorikeet.scheduling.batching.times import Batch, ModeTimes


class _Pending(NamedTuple):
    """What the last choice brings with every iteration of it.

    Attributes:
        merged: adapter that is merged for it.
        gains: credits by type.
        iteration: for the log of the period; None: it does not belong there.
        switched: the state has changed, so the next choice may differ for that alone.
    """

    merged: AdapterDigest | None
    gains: dict[Type, int]
    iteration: Iteration | None
    switched: bool


class DLora(BatchingMode):
    """See the module.

    Args:
        setup: of the replica.
        tuned: whether the thresholds move.
        credited: whether credits are kept; without them nothing prevents starvation.
        backfill: a batch of starving requests is filled up with the oldest others.
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
        self.credits = Credits(credit_params or usual_params(setup.max_batch))
        self._merged: AdapterDigest | None = None
        self._pending: _Pending | None = None

    def choose(self, live: Sequence[Live]) -> Choice:
        """Return the starving if there are any, else what dynamic batching decides."""
        self._pending = None
        counts = Counter(request.adapter for request in live)
        if self._credited:
            self.credits.meet(counts)
        if not live:
            return Choice(self._merged, frozenset())
        oldest, before = live[: self.max_batch], self._merged
        merged = before
        candidate: AdapterDigest | None = None
        starving = self._starving(live, oldest)
        if starving:
            batch: Sequence[Live] = starving
            if any(request.adapter != before for request in batch):
                merged = None
        else:
            legal = self._solvent({request.adapter for request in live if request.is_legal}, oldest)
            alpha, beta = self.thresholds.alpha, self.thresholds.beta
            merged, batch, candidate = decide(live, before, legal, self.max_batch, alpha, beta)
        switched = merged != before
        if self._tuned and (switched or not starving):
            self.thresholds.meet(merged, candidate)
        logged = self._tuned and candidate is not None
        self._pending = _Pending(
            merged,
            self._gains(batch, oldest, merged, is_pass=bool(starving)),
            self._iteration(counts[candidate], oldest) if logged else None,
            switched,
        )
        return allow(batch, live, merged)

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        """Learn from the times, book the credits, and log the iterations.

        Raises:
            AssertionError: nothing was chosen before.
        """
        assert self._pending is not None
        self._merged = self._pending.merged  # not before: a plan that runs nobody switches nothing
        self.times.note(steps, work, step_s)
        if switch_s:
            self.times.note_switch(self._merged is not None, switch_s)
        self.credits.apply(self._pending.gains, steps)
        if self._pending.iteration is not None:
            self.thresholds.note(self._pending.iteration, steps)
        self._pending = None

    def steps_until_review(self) -> float:
        """Return the steps until credits or the end of a period may change the choice, 1 right after a switch."""
        if self._pending is None:
            return float("inf")
        if self._pending.switched:
            return 1
        steps = self.credits.steps_until_review(self._pending.gains)
        return steps if self._pending.iteration is None else min(steps, self.thresholds.steps_left)

    def _gains(
        self, batch: Sequence[Live], oldest: Sequence[Live], merged: AdapterDigest | None, *, is_pass: bool
    ) -> dict[Type, int]:
        if not self._credited or not (is_pass or merged is not None):
            return {}
        return transfers(batch, oldest) or (self.credits.repayments(batch) if is_pass else {})

    def _starving(self, live: Sequence[Live], oldest: Sequence[Live]) -> list[Live]:
        """Return the batch of those who starve, empty if nobody does."""
        types: Collection[Type] = self.credits.starving() if self._credited else ()
        batch = [request for request in live if request.adapter in types][: self.max_batch]
        if batch and self._backfill:
            others = [request for request in oldest if request.adapter not in types]
            batch += others[: self.max_batch - len(batch)]
        return batch

    def _solvent(self, types: Collection[Type], oldest: Sequence[Live]) -> Collection[Type]:
        """Return those whose credit covers everybody whom their merging would pass over in one iteration."""
        if not self._credited:
            return types
        counts = Counter(request.adapter for request in oldest)
        return {each for each in types if self.credits[each] >= len(oldest) - counts[each]}

    def _iteration(self, candidates: int, oldest: Sequence[Live]) -> Iteration:
        unmerged = self.times.batch(request.adapter for request in oldest)
        return Iteration(Batch(min(candidates, self.max_batch)), unmerged)
