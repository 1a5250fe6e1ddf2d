"""Merges an adapter only after its accumulated LoRA overhead exceeds the cost of the switches.

All requests run, in any mix, as without merging. An adapter may be merged only while all requests use it. The first
request of another adapter ends the merge. So requests wait only for the switch.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.mode import (
    ALL_REQUESTS,
    BatchingChoice,
    BatchingMode,
    BatchingSetup,
    BatchWork,
    LiveRequest,
)
from lorikeet.scheduling.step_costs import StepCostMeter

REGRET_SHARE: Final = 0.01
"""Largest share of the engine's time that trials without a gain may cost, including the next trial."""
_FIRST_STEPS: Final = 64
"""Number of steps of one adapter before the first trial, which measures the costs and savings of merging."""


class MergePaid(BatchingMode):
    """Merges the only adapter with requests, as soon as its accumulated overhead equals the cost of merging.

    This is the rent-or-buy rule: at any arrival of other requests, the time lost is at most twice the loss of a policy
    that knows the future. The total loss of all trials, compared with never merging, stays within ``REGRET_SHARE`` of
    the time: a trial begins only if this bound holds even without any saving. If LoRA costs too little, only the first
    trial begins.

    Args:
        setup: limits and costs of the replica.

    Attributes:
        net_s: seconds that merging has saved so far, including switches; negative if merging has cost time.
        busy_s: total seconds of all steps and switches.
    """

    merges = True

    def __init__(self, setup: BatchingSetup) -> None:
        self._meter = StepCostMeter(setup.kernel_form, setup.rank)
        self._rank = setup.rank
        self._longest_switch_s = 0.0
        self._merged: AdapterDigest | None = None
        self._alone: AdapterDigest | None = None  # the only adapter that has requests
        self._steps_alone = 0
        self._overhead_s = 0.0
        self._has_tried = False
        self.net_s = self.busy_s = 0.0

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        """Let all requests run. Merge their adapter if it is the only one and merging pays."""
        first = live[0].adapter if live else self._alone
        alone = first if all(request.adapter == first for request in live) else None
        if alone != self._alone:
            self._alone = alone
            self._steps_alone = 0
            self._overhead_s = 0.0
        if alone is None:
            return ALL_REQUESTS
        is_merged = alone == self._merged
        if is_merged or (live and all(request.is_legal for request in live) and self._pays()):
            return BatchingChoice(alone, None)
        return ALL_REQUESTS

    def _pays(self) -> bool:
        if not self._has_tried:
            return self._steps_alone >= _FIRST_STEPS
        switches_s = 2 * self._longest_switch_s
        may_lose_s = REGRET_SHARE * self.busy_s + self.net_s
        return self._overhead_s >= switches_s and switches_s <= may_lose_s

    def ran(self, steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        """Record the duration of steps, and the seconds that merging saved or would have saved."""
        is_merged = self._alone is not None and not work.rows and work.types == {self._alone}
        self.busy_s += steps * step_s + switch_s
        self.net_s -= switch_s
        self._longest_switch_s = max(self._longest_switch_s, switch_s)
        self._merged = self._alone if is_merged else None
        if work.is_assisted:
            return
        rows = Counter(work.rows)
        prefill_rows, decode_rows = (
            (Counter[AdapterDigest](), rows) if work.decodes else (rows, Counter[AdapterDigest]())
        )
        self._meter.note(steps, step_s, work.prefill_tokens, work.decodes, prefill_rows, decode_rows)
        if self._alone is None:
            return
        added_s = self._added_s(work)
        if is_merged:
            self._has_tried = True
            self.net_s += steps * added_s
        else:
            self._steps_alone += steps
            self._overhead_s += steps * added_s

    def _added_s(self, work: BatchWork) -> float:
        """Return the seconds that the only adapter adds to an unmerged step; 0 until they are known."""
        costs = self._meter.costs()
        alone = self._alone
        if costs is None or alone is None or not self._has_tried:
            return 0.0
        rank = self._rank(alone)
        return costs.lora_s + rank * (costs.lora_prefill_s * work.prefill_tokens + costs.lora_decode_s * work.decodes)

    def steps_until_review(self) -> float:
        """Return 1 while merging may begin to pay at the next step."""
        return 1 if self._alone is not None and self._merged is None else float("inf")
