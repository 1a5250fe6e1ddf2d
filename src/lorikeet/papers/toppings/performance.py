"""Implements TOPPINGS' models of a step's time by its ranks (section 5, equation 2): PrePerf and DecPerf."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from lorikeet.cluster.routing.fleet import Numbers
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile


class PerformanceModel(msgspec.Struct, frozen=True):
    """Computes the seconds of a step: ``slope_s * work + fixed_s``. A step without requests takes no time.

    Work is the sum of ranks for the kernel form ``unpadded`` (MBGMV), and rows times the largest rank for ``padded``
    (BGMV). Rows are requests that have an adapter.

    Attributes:
        form: kernel form.
        slope_s: seconds per rank of a row (alpha).
        fixed_s: seconds of the base model and everything else (beta).
        token_s: seconds per prefilled token of a request. The paper's equation has no tokens, which is the value 0.

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
        """Return, by replica, the seconds of a step with one more request, and the seconds that the request adds.

        Args:
            requests, rows, largest_rank, total_rank: counts of the step without it, by replica.
            rank: rank of the request. Its tokens are not counted.
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
        steps: ranks of the requests and the seconds of each step, with at least two different amounts of work.

    Raises:
        ValueError: the steps have fewer different amounts of work.
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
"""Ranks and batch sizes of the steps to which performance models are fitted, as in TOPPINGS (section 5)."""

StepSeconds = Callable[[int, int], float]
"""Returns the seconds of a step, given the number of requests with different adapters and their common rank."""


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
    """Return PrePerf and DecPerf of a replica with these costs. The tokens of a prompt are part of the slope.

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

    As in the paper, all requests of a step have one rank and different adapters. The models do not count tokens; the
    tokens of a prompt are part of the slope.

    Args:
        profile: costs of steps.
        form: kernel form.
        prompt_tokens, output_tokens: lengths of a mean request. A decoding request has half of its answer.

    Raises:
        ValueError: the paper has no model of this kernel form.
        ProfileError: the profile lacks the kernel form.
    """
    context_tokens, model = prompt_tokens + output_tokens // 2, CostModel(profile, form)

    def prefill_s(batch: int, rank: int) -> float:
        sequences = (SequenceWork(0, prompt_tokens, True, adapter, rank) for adapter in range(batch))
        return model.step_s(step_work(sequences, form))

    def decode_s(batch: int, rank: int) -> float:
        sequences = (SequenceWork(context_tokens, 1, True, adapter, rank) for adapter in range(batch))
        return model.step_s(step_work(sequences, form))

    return fit_models(form, prefill_s, decode_s)
