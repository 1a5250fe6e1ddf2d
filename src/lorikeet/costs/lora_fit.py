"""What adapters add to a step, from measured differences."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.core.plan import KernelForm
from lorikeet.costs.fit import Floats, Regression, quality
from lorikeet.costs.model import LoraWork
from lorikeet.costs.profile import Fit, LoraCosts

_OF_ADDED, _OF_BASE = 0.05, 0.02
"""Share of an addition, and of the step that it was measured against, that the model may miss it by."""
_SURE_OF_ADDED, _SURE_OF_BASE = 0.05, 0.007
"""Shares, of which the larger is a standard error that is small enough: what einsums add is soon known."""


class LoraMeasurement(NamedTuple):
    """A step with adapters, measured in turns with the same step of the base model.

    Attributes:
        work: ranks of the step.
        base_s: without adapters, each time.
        with_s: with them, in the same moments.
    """

    work: LoraWork
    base_s: list[float]
    with_s: list[float]

    @property
    def total_s(self) -> float:
        """All these times together."""
        return sum(self.base_s) + sum(self.with_s)

    @property
    def is_sure(self) -> bool:
        """Whether the standard error of the addition is small, or next to nothing beside the step."""
        pair = np.array([self.base_s, self.with_s])
        base_s, added_s = float(np.median(pair[0])), _added_s(pair)
        error_s = base_s * float(np.std(pair[1] / pair[0], ddof=1)) / len(self.with_s) ** 0.5
        return bool(error_s <= max(_SURE_OF_ADDED * added_s, _SURE_OF_BASE * base_s))


def fit_lora(measurements: Sequence[LoraMeasurement], form: KernelForm) -> LoraCosts:
    """Return the constants of one kernel form that meet the measured additions best.

    What adapters add is small beside what a machine's speed changes by from second to second: so each measurement
    counts as a ratio to the base model's at the same moment. A difference of two steps carries the noise of both, so
    a point weighs by the size of the steps as well as by its own.

    Einsums copy every adapter and add whole rows whatever the ranks, and chunks make them longer by more than their
    tokens explain, so theirs have constants for that; in the other forms it is too little to be told from noise.
    """
    works = [measured.work for measured in measurements]
    einsum = form is KernelForm.EINSUM
    counts = np.array(
        [
            [
                *(1.0, w.decode_row_ranks, w.prefill_token_ranks, w.adapter_ranks),
                *([w.rows, w.adapters, w.prefill_token_ranks > 0] * einsum),
            ]
            for w in works
        ],
        dtype=np.float64,
    )
    pairs = [np.array([measured.base_s, measured.with_s]) for measured in measurements]
    base_s = np.array([np.median(pair[0]) for pair in pairs])
    added_s = np.array([_added_s(pair) for pair in pairs])
    tolerances = _OF_ADDED * np.abs(added_s) + _OF_BASE * base_s

    def redraw(generator: np.random.Generator) -> Floats:
        return np.array([_added_s(generator.choice(pair, pair.shape[1], axis=1)) for pair in pairs])

    found = Regression(counts, added_s, tolerances, redraw)
    decodes = np.array([work.prefill_token_ranks == 0 for work in works])
    prefills = np.array([work.decode_row_ranks == 0 for work in works])
    return LoraCosts(
        fixed=found.figure(0, "s"),
        decode_row_rank=found.figure(1, "s/rank"),
        prefill_token_rank=found.figure(2, "s/rank"),
        adapter_rank=found.figure(3, "s/rank"),
        row=found.figure(4, "s/row") if einsum else None,
        adapter=found.figure(5, "s/adapter") if einsum else None,
        prefill=found.figure(6, "s") if einsum else None,
        decode_fit=_quality(found, base_s, decodes),
        prefill_fit=_quality(found, base_s, prefills),
    )


def _added_s(pair: Floats) -> float:
    """Return what adapters added, from times without and with them, ``[2, times]``."""
    base_s, with_s = pair
    return float(np.median(base_s)) * (_middle(with_s / base_s) - 1)


def _middle(values: Floats) -> float:
    """Return the mean of the middle half: nearly as sure as a mean, and blind to what else the machine did."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _quality(found: Regression, base_s: Floats, which: npt.NDArray[np.bool_]) -> Fit:
    """Return how well additions are met. Errors are relative to whole steps: an addition may be next to nothing."""
    fit = quality(found.predicted[which], found.measured[which])
    missed = np.abs(found.predicted - found.measured) / (base_s + found.measured)
    return msgspec.structs.replace(fit, worst=float(missed[which].max()))
