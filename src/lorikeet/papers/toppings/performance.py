"""TOPPINGS' models of the time of a step by the ranks in it (section 5, equation 2): PrePerf and DecPerf."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from lorikeet.cluster.routing.fleet import Numbers
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile


class PerformanceModel(msgspec.Struct, frozen=True):
    """Seconds of a step: ``slope_s * work + fixed_s``; a step without requests takes no time.

    Work is the sum of ranks for the kernel form ``unpadded`` (MBGMV), and rows times the largest rank for ``padded``
    (BGMV). Rows are requests that have an adapter.

    Attributes:
        form: kernel form.
        slope_s: per rank of a row (alpha).
        fixed_s: the base model and everything else (beta).
        token_s: per prefilled token of a request. The paper's equation has no tokens: 0 is the paper.

    Raises:
        ValueError: the paper has no model of this kernel form.
    """

    form: KernelForm
    slope_s: float
    fixed_s: float
    token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.form is KernelForm.EINSUM:
            raise ValueError("There is no performance model of the form einsum")

    def added_seconds(
        self, requests: Numbers, rows: Numbers, largest_rank: Numbers, total_rank: Numbers, rank: int
    ) -> tuple[Numbers, Numbers]:
        """Return by replica the seconds of a step with one more request, and how many of them the request adds.

        Args:
            requests, rows, largest_rank, total_rank: counts of the step without it, by replica.
            rank: of the request. Its tokens are not counted.
        """
        if self.form is KernelForm.UNPADDED:
            work = total_rank + rank
        else:
            work = (rows + bool(rank)) * np.maximum(largest_rank, rank)
        added = self.slope_s * (work - self._work(rows, largest_rank, total_rank)) + self.fixed_s * (requests == 0)
        return self.slope_s * work + self.fixed_s, added

    def _work(self, rows: Numbers, largest_rank: Numbers, total_rank: Numbers) -> Numbers:
        return total_rank if self.form is KernelForm.UNPADDED else rows * largest_rank


def fit_performance(form: KernelForm, steps: Iterable[tuple[Sequence[int], float]]) -> PerformanceModel:
    """Fit the model to measured steps by least squares.

    Args:
        form: kernel form.
        steps: ranks of a step's requests, and its seconds; at least two different amounts of work.

    Raises:
        ValueError: there are fewer.
    """
    measured = list(steps)
    unpadded = form is KernelForm.UNPADDED
    work = [sum(ranks) if unpadded else max(ranks, default=0) * sum(map(bool, ranks)) for ranks, _ in measured]
    if len(set(work)) < 2:
        raise ValueError("A performance model needs two different steps")
    slope_s, fixed_s = np.polyfit(work, [seconds for _, seconds in measured], 1)
    return PerformanceModel(form, float(slope_s), float(fixed_s))


_BATCHES = (4, 8, 16, 32)
_RANKS = (8, 16, 32, 64)
"""Ranks of the steps that performance models are fitted to, with ``_BATCHES``: those of TOPPINGS (section 5)."""

StepSeconds = Callable[[int, int], float]
"""Returns the seconds of a step of so many requests of one rank, each with its own adapter."""


def fit_models(
    form: KernelForm, prefill_s: StepSeconds, decode_s: StepSeconds
) -> tuple[PerformanceModel, PerformanceModel]:
    """Return TOPPINGS' PrePerf and DecPerf, fitted to steps of several batch sizes and ranks, as in the paper.

    Raises:
        ValueError: the paper has no model of this kernel form.
    """

    def fit(step_s: StepSeconds) -> PerformanceModel:
        steps = [((rank,) * batch, step_s(batch, rank)) for rank in _RANKS for batch in _BATCHES]
        return fit_performance(form, steps)

    return fit(prefill_s), fit(decode_s)


def models_of_costs(
    costs: ReplicaCosts, form: KernelForm, prompt_tokens: int
) -> tuple[PerformanceModel, PerformanceModel]:
    """Return the same models of a replica with these costs. The tokens of a prompt are part of the slope.

    Raises:
        ValueError: the paper has no model of this kernel form.
    """

    def prefill_s(batch: int, rank: int) -> float:
        return costs.step_s + costs.lora_s + costs.prefill_s(batch * prompt_tokens, rank)

    return fit_models(form, prefill_s, lambda batch, rank: costs.decode_step_s(batch, rank))


def performance_models(
    profile: CostProfile, form: KernelForm, prompt_tokens: int, output_tokens: int
) -> tuple[PerformanceModel, PerformanceModel]:
    """Return TOPPINGS' PrePerf and DecPerf, fitted to steps of several batch sizes and ranks in the profile.

    As in the paper all requests of a step have one rank, each its own adapter. The models do not count tokens: those of
    a prompt are part of the slope.

    Args:
        profile: costs of steps.
        form: kernel form.
        prompt_tokens, output_tokens: of a mean request; a decoding one has half of its answer.

    Raises:
        ValueError: the paper has no model of this kernel form.
        ProfileError: the profile does not know the kernel form.
    """
    context_tokens, model = prompt_tokens + output_tokens // 2, CostModel(profile, form)

    def prefill_s(batch: int, rank: int) -> float:
        sequences = (SequenceWork(0, prompt_tokens, True, adapter, rank) for adapter in range(batch))
        return model.step_s(step_work(sequences, form))

    def decode_s(batch: int, rank: int) -> float:
        sequences = (SequenceWork(context_tokens, 1, True, adapter, rank) for adapter in range(batch))
        return model.step_s(step_work(sequences, form))

    return fit_models(form, prefill_s, decode_s)
