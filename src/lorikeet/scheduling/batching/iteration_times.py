"""Times of merged and unmerged iterations: from the replica's profile, or measured while serving."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.iteration_costs import IterationCosts
from lorikeet.core.plan import KernelForm
from lorikeet.scheduling.batching.mode import BatchingSetup, BatchWork, LiveRequest
from lorikeet.scheduling.batching.thresholds import IterationTimes
from lorikeet.scheduling.state import RobustFit, faded

_SCALE = np.array((1.0, 100.0, 10.0, 1.0, 1000.0))
"""Units of the features (step, prefill tokens, decodes, any LoRA, LoRA work), so that they are of similar size."""
_RIDGE = 1e-6
_WINDOW = 256
_PLAIN, _LORA = 0, 1
_KNOWN_STEPS = 8
"""Steps of a kind after which its time counts as known; a single step may be delayed, and is most often a prefill."""


class NotedTimes(IterationTimes, Protocol):
    """Times that may be learned from the steps that run."""

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Record identical steps, each of so many seconds without the switch before the first."""

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Record the time of a switch to a merged adapter, or to none."""


def iteration_times(setup: BatchingSetup) -> NotedTimes:
    """Return the profiled times, as in the paper (section 4.2); measured ones, if the replica has no profile."""
    if setup.iterations is not None:
        return ProfiledTimes(setup.iterations, setup.kernel_form, setup.rank)
    return MeasuredTimes(setup.kernel_form, setup.rank)


class ProfiledTimes:
    """Times by a profile. Every request of a batch is taken to decode.

    Args:
        costs: of the profile.
        form: how mixed ranks are computed.
        rank: returns the rank of an adapter.
    """

    is_known = True

    def __init__(self, costs: IterationCosts, form: KernelForm, rank: Callable[[AdapterDigest], int]) -> None:
        self._costs, self._form, self._rank = costs, form, rank

    def merged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the time of an iteration of requests of one adapter, which is merged."""
        return self._costs.base_s(len(batch), sum(request.tokens for request in batch))

    def unmerged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the time of an iteration of requests of any adapters."""
        rows = rows_of(batch)
        work = lora_work(self._form, rows, self._rank)
        return self.merged_s(batch) + self._costs.lora_part_s(rows.total(), work, len(rows))

    def switch_s(self, to_merged: bool) -> float:
        """Return the time of a switch."""
        return self._costs.merge_s if to_merged else self._costs.unmerge_s

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Do nothing: the profile stays as it is."""

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Do nothing."""


class MeasuredTimes:
    """A linear fit of recent step times in both states, and the mean time of a switch each way.

    The fit has a cost per step, per prefill token and per decode, which both states share, and costs for any LoRA and
    for LoRA work, which merged and base-only steps do not have. Steps with and without LoRA are forgotten separately,
    so that the times of one state stay known while the replica is in the other for long. A request of a batch is taken
    to prefill and decode as recent requests did.

    Args:
        form: how mixed ranks are computed.
        rank: returns the rank of an adapter.
    """

    def __init__(self, form: KernelForm, rank: Callable[[AdapterDigest], int]) -> None:
        self._form, self._rank = form, rank
        self._fit = RobustFit(features=len(_SCALE), kinds=2, window=_WINDOW, ridge=_RIDGE)
        self._mix = np.zeros(3)  # sequences, prefill tokens, decodes of recent steps
        self._switches: dict[bool, list[float]] = {True: [], False: []}
        self._seen = [0, 0]  # steps of each kind

    @property
    def is_known(self) -> bool:
        """Whether there have been enough steps both with and without LoRA, so that the states can be compared."""
        return min(self._seen) >= _KNOWN_STEPS

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Add identical steps to the fit. Those that host cores assisted say nothing about others."""
        if work.is_assisted:
            return
        lora = lora_work(self._form, work.rows, self._rank)
        kind = _LORA if lora else _PLAIN
        self._seen[kind] += steps
        self._fit.note(_features(work.prefill_tokens, work.decodes, lora), step_s, steps, kind)
        mix = np.array((work.prefills + work.decodes, work.prefill_tokens, work.decodes), np.float64)
        self._mix = faded(self._mix, mix, steps)

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Record the time of a switch to a merged adapter, or to none."""
        self._switches[to_merged] = [*self._switches[to_merged][1 - _WINDOW :], switch_s]

    def merged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the expected time of a step of requests of one adapter, which is merged."""
        return self._batch_s(len(batch), 0.0)

    def unmerged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the expected time of a step of requests of any adapters."""
        return self._batch_s(len(batch), lora_work(self._form, rows_of(batch), self._rank))

    def switch_s(self, to_merged: bool) -> float:
        """Return the expected time of a switch: the mean of past ones, or of those the other way; 0 before any."""
        known = self._switches[to_merged] or self._switches[not to_merged]
        return sum(known) / len(known) if known else 0.0

    def _batch_s(self, requests: int, lora: float) -> float:
        sequences, prefill_tokens, decodes = self._mix.tolist()
        per_sequence = requests / sequences if sequences else 0.0
        prefill_tokens, decodes = prefill_tokens * per_sequence, decodes * per_sequence
        rows = (prefill_tokens + decodes) / requests if requests else 0.0
        return float(_features(prefill_tokens, decodes, lora * rows) @ self._fit.parts())


def rows_of(batch: Sequence[LiveRequest]) -> Counter[AdapterDigest]:
    """Return the number of requests of each adapter, those of the base model left out."""
    return Counter(request.adapter for request in batch if request.adapter is not None)


def lora_work(form: KernelForm, rows: Mapping[AdapterDigest, int], rank: Callable[[AdapterDigest], int]) -> float:
    """Return the LoRA work of a step: rows times ranks.

    Args:
        form: ``unpadded`` counts the rank of each row, ``padded`` the largest rank of the step, ``einsum`` the latter
            once for every adapter of the step.
        rows: number of tokens by adapter.
        rank: returns the rank of an adapter.
    """
    if form is KernelForm.UNPADDED or not rows:
        return float(sum(count * rank(adapter) for adapter, count in rows.items()))
    padded = sum(rows.values()) * max(map(rank, rows))
    return float(padded * (len(rows) if form is KernelForm.EINSUM else 1))


def _features(prefill_tokens: float, decodes: float, lora: float) -> np.ndarray:
    features: np.ndarray = np.array((1.0, prefill_tokens, decodes, lora > 0, lora)) / _SCALE
    return features
