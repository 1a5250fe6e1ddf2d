"""How long a step takes by the ranks in it (TOPPINGS, section 5, equation 2)."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from lorikeet.cluster.loads import Numbers
from lorikeet.core.plan import KernelForm


class PerformanceModel(msgspec.Struct, frozen=True):
    """Seconds of a step: ``slope_s * work + fixed_s``, and nothing for a step without requests.

    Work is the sum of ranks for the kernel form ``unpadded`` (MBGMV), and rows times the largest rank for ``padded``
    (BGMV). Rows are requests that have an adapter.

    Attributes:
        form: of the kernel.
        slope_s: per rank of a row (alpha).
        fixed_s: the base model and all else (beta).
        token_s: per token of a request that is prefilled. The paper's equation has no tokens; 0 is the paper.

    Raises:
        ValueError: the paper has no model of this form.
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
        """Return seconds of the step with one more request of a rank, and by how many they are more than before.

        Args:
            requests, rows, largest_rank, total_rank: counts of the step before, by replica.
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
        form: of the kernel.
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
