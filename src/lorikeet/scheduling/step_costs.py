"""Measures the costs of steps while the engine serves."""

from collections.abc import Callable, Mapping
from operator import mul

import numpy as np
from numpy.typing import NDArray

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.scheduling.state import RobustFit

_SCALE = np.array((1.0, 100.0, 10.0, 1.0, 10_000.0, 100.0))
"""Units of the features (step, prompt tokens, decodes, any LoRA, LoRA work of prompts and of decodes)."""
_DECODES, _PREFILLS, _LORA_DECODES, _LORA_PREFILLS = range(4)
_WINDOW = 64
"""Number of the latest steps of each kind that count."""
_RIDGE = 1e-4
_UTILIZATION_S = 5.0
_MOST_UTILIZED = 0.95
"""Half-life of the measured utilization in seconds, and the highest utilization that counts."""
_FEWEST = 16
"""Number of steps with prompts, and of steps without, that are needed for an estimate."""


class Utilization:
    """Measures the share of the engine's time that grows with the requests: everything except each step's fixed part.

    A lost second delays the current requests, and the requests that arrive while the engine catches up. In a queue with
    exponential gaps the total delay is 1 / (1 - share) seconds.
    """

    def __init__(self) -> None:
        self._from_s = self._elapsed_s = self._busy_s = self._steps = 0.0

    def note(self, now: float, steps: int, busy_s: float) -> None:
        """Add the steps that end now, and their total duration."""
        passed_s = max(0.0, now - self._from_s)
        fade = 0.5 ** (passed_s / _UTILIZATION_S)
        self._from_s = now
        self._elapsed_s = self._elapsed_s * fade + passed_s
        self._busy_s = self._busy_s * fade + busy_s
        self._steps = self._steps * fade + steps

    def delay_of_a_second(self, step_s: float) -> float:
        """Return the delay in seconds per lost second. ``step_s`` is the fixed part of a step."""
        work_s = max(0.0, self._busy_s - self._steps * step_s)
        return 1 / (1 - min(work_s / self._elapsed_s, _MOST_UTILIZED)) if self._elapsed_s else 1.0


class StepCostMeter:
    """Fits the costs of a step to the latest steps of each kind, so that rare kinds stay represented.

    Args:
        form: form in which kernels compute mixed ranks.
        rank: returns the rank of an adapter.
    """

    def __init__(self, form: KernelForm, rank: Callable[[AdapterDigest], int]) -> None:
        self._form = form
        self._rank = rank
        self._fit = RobustFit(features=len(_SCALE), kinds=4, window=_WINDOW, ridge=_RIDGE)
        self._seen = [0] * 4
        self._costs: ReplicaCosts | None = None
        self._fitted_at = 0

    def note(
        self,
        steps: int,
        step_s: float,
        prefill_tokens: int,
        decodes: int,
        prefill_rows: Mapping[AdapterDigest, int],
        decode_rows: Mapping[AdapterDigest, int],
    ) -> None:
        """Add identical steps.

        Args:
            steps: number of them.
            step_s: mean seconds of a step.
            prefill_tokens, decodes: number of prompt tokens, and of decoding sequences, in each step.
            prefill_rows, decode_rows: numbers of prompt tokens and of decoding sequences by adapter, without the merged
                adapter.
        """
        prefill_work, decode_work = self._work(prefill_rows, decode_rows)
        has_lora = bool(prefill_rows or decode_rows)
        kind = (_LORA_DECODES if has_lora else _DECODES) + bool(prefill_tokens)
        sample: NDArray[np.float64] = np.array(
            (1.0, prefill_tokens, decodes, has_lora, prefill_work, decode_work), np.float64
        )
        self._fit.note(sample / _SCALE, step_s, steps, kind)
        self._seen[kind] += 1

    @property
    def is_known(self) -> bool:
        """Whether enough steps with prompts and enough without have been recorded."""
        with_prompts = self._seen[_PREFILLS] + self._seen[_LORA_PREFILLS]
        return min(with_prompts, sum(self._seen) - with_prompts) >= _FEWEST

    def costs(self) -> ReplicaCosts | None:
        """Return the costs of a step, without loads; None until enough steps are recorded."""
        if not self.is_known:
            return None
        seen = sum(self._seen)
        if self._costs is None or seen - self._fitted_at >= _FEWEST:
            self._costs = ReplicaCosts(*(self._fit.parts() / _SCALE).tolist())
            self._fitted_at = seen
        return self._costs

    def step_s(
        self,
        prefill_tokens: int,
        decodes: int,
        prefill_rows: Mapping[AdapterDigest, int],
        decode_rows: Mapping[AdapterDigest, int],
    ) -> float:
        """Return the expected seconds of a step; 0 until enough steps are recorded.

        See :meth:`note` for the arguments.
        """
        costs = self.costs()
        if costs is None:
            return 0.0
        prefill_work, decode_work = self._work(prefill_rows, decode_rows)
        lora_s = costs.lora_s * bool(prefill_rows or decode_rows)
        lora_s += costs.lora_prefill_s * prefill_work + costs.lora_decode_s * decode_work
        return costs.step_s + costs.prefill_token_s * prefill_tokens + costs.decode_s * decodes + lora_s

    def _work(self, prefill: Mapping[AdapterDigest, int], decode: Mapping[AdapterDigest, int]) -> tuple[float, float]:
        """Return the products of ranks and rows, of prompts and of decodes, as the kernel form counts them."""
        if not (prefill or decode):
            return 0.0, 0.0
        if self._form is KernelForm.UNPADDED:
            return self._products(prefill), self._products(decode)
        adapters = prefill.keys() | decode.keys()
        largest = max(map(self._rank, adapters)) * (len(adapters) if self._form is KernelForm.EINSUM else 1)
        return float(largest * sum(prefill.values())), float(largest * sum(decode.values()))

    def _products(self, rows: Mapping[AdapterDigest, int]) -> float:
        """Return the sum of the products of ranks and rows."""
        return float(sum(map(mul, rows.values(), map(self._rank, rows))))
