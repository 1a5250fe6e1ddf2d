"""Provides the times of merged and unmerged iterations, from the replica's profile or measured while serving."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import KernelForm
from lorikeet.costs.iteration_costs import IterationCosts
from lorikeet.papers.dlora.mode_times import ModeTimes, lora_work
from lorikeet.papers.dlora.thresholds import IterationTimes
from lorikeet.scheduling.batching.mode import BatchingSetup, BatchWork, LiveRequest


class NotedTimes(IterationTimes, Protocol):
    """Defines times that may be learned from running steps."""

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Record identical steps. ``step_s`` is the seconds of a step, without the switch before the first."""

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Record the time of a switch to a merged adapter, or to no merged adapter."""


def iteration_times(setup: BatchingSetup) -> NotedTimes:
    """Return the profiled times, as in the paper (section 4.2).

    If the replica has no profile, return measured times.
    """
    if setup.iterations is not None:
        return ProfiledTimes(setup.iterations, setup.kernel_form, setup.rank)
    return ModeTimes(setup.kernel_form, setup.rank)


def note_run(times: NotedTimes, steps: int, work: BatchWork, step_s: float, is_merged: bool, switch_s: float) -> None:
    """Record identical steps, and the switch before the first of them if there was one.

    Args:
        times: times that record the steps.
        steps: number of steps.
        work: work of each step.
        step_s: mean seconds of a step, without the switch.
        is_merged: whether an adapter is merged in the steps.
        switch_s: seconds of the switch; 0 without a switch.
    """
    times.note(steps, work, step_s)
    if switch_s:
        times.note_switch(is_merged, switch_s)


class ProfiledTimes:
    """Computes times from a profile, as if every request of a batch decodes.

    Args:
        costs: costs of the profile.
        form: form in which kernels compute mixed ranks.
        rank: returns the rank of an adapter.
    """

    is_known = True

    def __init__(self, costs: IterationCosts, form: KernelForm, rank: Callable[[AdapterDigest], int]) -> None:
        self._costs, self._form, self._rank = costs, form, rank

    def merged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the time of an iteration of requests of one merged adapter."""
        return self._costs.base_s(len(batch), sum(request.tokens for request in batch))

    def unmerged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the time of an iteration of requests of any adapters."""
        rows = Counter(request.adapter for request in batch if request.adapter is not None)
        work = lora_work(self._form, rows, self._rank)
        return self.merged_s(batch) + self._costs.lora_part_s(rows.total(), work, len(rows))

    def switch_s(self, to_merged: bool) -> float:
        """Return the time of a switch."""
        return self._costs.merge_s if to_merged else self._costs.unmerge_s

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Do nothing, because a profile does not change."""

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Do nothing, because a profile does not change."""
