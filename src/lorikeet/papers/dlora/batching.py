"""Implements dLoRA's batching mode as printed: dynamic batching with tuned thresholds, and credits against starvation.

``DLora`` decides each iteration by Algorithm 1 (``dynamic.decide``), whose thresholds Algorithm 2 tunes
(``thresholds.Thresholds``). Algorithm 3 comes before both: requests that are passed over earn credits for their type
(``credits.Credits``), and a type with many credits runs next, alone and unmerged.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024, section
4.2 and appendix A.1. What they leave open: docs/decisions/batching-mode.md.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest
from lorikeet.papers.dlora.credits import (
    PATIENCE,
    AdapterType,
    Credits,
    credit_transfers,
    merging_cost,
)
from lorikeet.papers.dlora.dynamic import decide, requests_of
from lorikeet.papers.dlora.iteration_times import iteration_times, note_run
from lorikeet.papers.dlora.thresholds import Iteration, ThresholdParams, Thresholds
from lorikeet.scheduling.batching.mode import BatchingChoice, BatchingMode, BatchingSetup, BatchWork, LiveRequest, allow


class _Pending(NamedTuple):
    """Holds the last choice, with the effects of each of its iterations.

    Attributes:
        merged: adapter that is merged for the choice; None for none.
        gains: credits by type.
        needed: credits that the merged adapter must have for the next iteration; empty if it needs none.
        iteration: entry for the log of the tuning period; None if the iteration does not count.
        is_provisional: whether the next choice may differ, because this choice changes the state, or a period ended
            with it.
    """

    merged: AdapterDigest | None
    gains: dict[AdapterType, int]
    needed: dict[AdapterType, int]
    iteration: Iteration | None
    is_provisional: bool


class DLora(BatchingMode):
    """Chooses between merged and unmerged iterations, and serves starving types first.

    Args:
        setup: facts about the replica.
        tuned: whether the thresholds are tuned while serving.
        patience: patience of the credits, see ``Credits``. With an infinite patience, starvation is not prevented.

    Attributes:
        max_batch: largest number of requests in a batch.
        thresholds: alpha and beta, with their tuning.
        credits: credit accounts of the types.
        times: times of iterations and switches, from the replica's profile if it has one, otherwise measured.
    """

    merges = True
    needs = frozenset({"iterations"})

    def __init__(
        self,
        setup: BatchingSetup,
        *,
        tuned: bool = True,
        patience: float = PATIENCE,
    ) -> None:
        self.max_batch = setup.max_batch
        self._tuned = tuned
        self.times = iteration_times(setup)
        self.thresholds = Thresholds(self.times, ThresholdParams())
        self.credits = Credits(setup.known_adapters, patience, setup.max_batch)
        self._merged: AdapterDigest | None = None
        self._pending: _Pending | None = None

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Return requests of starving types if there are any, otherwise the choice of dynamic batching."""
        self._pending = None
        if not live:
            return BatchingChoice(self._merged, frozenset())
        counts = Counter(request.adapter for request in live)
        oldest = live[: self.max_batch]
        if starving := self.credits.starving(counts):
            batch = [request for request in live if request.adapter in starving][: self.max_batch]
            # Algorithm 3 leaves open whether these requests run merged. Only requests of the merged adapter can run
            # merged.
            merged = self._merged if all(request.adapter == self._merged for request in batch) else None
            is_first = self._is_first(merged, None)
            self._pending = _Pending(merged, credit_transfers(batch, oldest), {}, None, is_first)
            return allow(batch, live, merged)
        among_oldest = Counter(request.adapter for request in oldest)
        costs = {each: merging_cost(each, among_oldest) for each in counts}
        legal = {each.adapter for each in live if each.is_legal and self.credits[each.adapter] >= costs[each.adapter]}
        merged, chosen, candidate = decide(
            live, self._merged, legal, self.max_batch, self.thresholds.alpha, self.thresholds.beta
        )
        is_first = self._is_first(merged, candidate)
        gains = {} if merged is None else credit_transfers(chosen, oldest)
        needed = {merged: costs[merged]} if gains else {}
        self._pending = _Pending(merged, gains, needed, self._iteration(candidate, live), is_first)
        return allow(chosen, live, merged)

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        """Record the times, apply the credits, and log the iterations for the tuning.

        Raises:
            AssertionError: ``choose`` was not called before.
        """
        assert self._pending is not None
        # The state is set here, not in ``choose``, because a plan without sequences does not switch.
        self._merged = self._pending.merged
        note_run(self.times, steps, work, step_s, self._merged is not None, switch_s)
        self.credits.apply(self._pending.gains, steps)
        if self._pending.iteration is not None:
            self.thresholds.note(self._pending.iteration, steps)

    def steps_until_review(self) -> float:
        """Return the number of steps until credits or the end of a period may change the choice."""
        if self._pending is None:
            return inf
        if self._pending.is_provisional:
            return 1
        steps = self.credits.iterations_until_review(self._pending.gains, self._pending.needed)
        return steps if self._pending.iteration is None else min(steps, self.thresholds.iterations_left)

    def _is_first(self, merged: AdapterDigest | None, candidate: AdapterDigest | None) -> bool:
        """Return whether an iteration is the first of its state or of a period.

        The end of a period may have moved a threshold.
        """
        has_ended = self._tuned and self.thresholds.start_iteration(merged, candidate)
        return has_ended or merged != self._merged

    def _iteration(self, candidate: AdapterDigest | None, live: Sequence[LiveRequest]) -> Iteration | None:
        """Return the log entry of an iteration; None without tuning, a candidate, or times of both states."""
        if not self._tuned or candidate is None or not self.times.is_known:
            return None
        merged, unmerged = requests_of(candidate, live)[: self.max_batch], live[: self.max_batch]
        return Iteration(len(merged), self.times.merged_s(merged), len(unmerged), self.times.unmerged_s(unmerged))
