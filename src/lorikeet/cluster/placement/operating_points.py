"""Computes operating points: tokens per second that a replica sustains under the SLO with adapters of one rank."""

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import numpy as np

from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.replica_estimates import estimated_load


class Points(Protocol):
    """Maps a rank to the highest load of a replica under the SLO, in tokens per second."""

    def __getitem__(self, rank: int) -> float:
        """Return the load at a rank. The load never rises with the rank."""
        ...

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:
        """Update the costs of a replica and the lengths of a mean request. A length of 0 is unknown."""
        ...


class EstimatedPoints:
    """Estimates operating points from a replica's costs (``estimated_load``).

    Args:
        costs: costs of a replica.
        prompt_tokens, output_tokens: lengths of a mean request.
        max_batch: largest number of sequences in a step.
        tpot_s: TPOT target in seconds; 0 for the default target.
    """

    def __init__(
        self, costs: ReplicaCosts, prompt_tokens: int, output_tokens: int, max_batch: int, tpot_s: float = 0.0
    ) -> None:
        self._costs = costs
        self._lengths = prompt_tokens, output_tokens
        self._max_batch = max_batch
        self._tpot_s = tpot_s
        self._known: dict[int, float] = {}

    def __getitem__(self, rank: int) -> float:
        """Return the load in tokens per second at a rank."""
        if rank not in self._known:
            self._known[rank] = estimated_load(self._costs, rank, *self._lengths, self._max_batch, self._tpot_s)
        return self._known[rank]

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:
        """Update the costs of a replica and the lengths of a mean request."""
        self._costs = costs
        self._lengths = round(prompt_tokens) or self._lengths[0], round(output_tokens) or self._lengths[1]
        self._known.clear()


class OperatingPoints:
    """Interpolates measured operating points between ranks, and extrapolates beyond them.

    A larger rank is never faster. A measurement that contradicts this is noise, and is replaced by the non-increasing
    least-squares fit. Between two ranks, the time per token (one over the load) is interpolated linearly. Below the
    smallest rank it is constant. Above the largest rank, the last line continues.

    Source: LoRAServe, section IV-A, for the idea; the interpolation is ours.

    Args:
        tokens_per_s: load by rank, in tokens of prompts and answers per second.

    Raises:
        ValueError: no rank, or a load that is not positive.
        ModuleNotFoundError: SciPy is not installed.
    """

    def __init__(self, tokens_per_s: Mapping[int, float]) -> None:
        if not tokens_per_s or min(tokens_per_s.values()) <= 0:
            raise ValueError(f"Operating points must be positive loads by rank: {dict(tokens_per_s)}")
        from scipy.optimize import isotonic_regression  # of the extra `cluster`

        self._ranks = np.array(sorted(tokens_per_s), dtype=float)
        loads = np.array([tokens_per_s[rank] for rank in sorted(tokens_per_s)], dtype=float)
        self._token_s = 1 / isotonic_regression(loads, increasing=False).x
        self._known: dict[int, float] = {}

    def __getitem__(self, rank: int) -> float:
        """Return the load in tokens per second at a rank."""
        if rank not in self._known:
            beyond = max(0.0, rank - self._ranks[-1])
            self._known[rank] = 1 / float(np.interp(rank, self._ranks, self._token_s) + beyond * self._last_slope)
        return self._known[rank]

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:
        """Do nothing, because searched points do not change with the costs."""

    @cached_property
    def _last_slope(self) -> float:
        """Rise of the seconds per token with the rank, between the two largest ranks."""
        if len(self._ranks) == 1:
            return 0.0
        return float(np.diff(self._token_s[-2:])[0] / np.diff(self._ranks[-2:])[0])
