"""Merging with a bound on what it may cost: an adapter is merged only when its past overhead has paid for the switches.

All requests run, in any mix, as without merging. Only while every request is of one adapter may that adapter be merged;
the first request of another ends it. So merging makes nobody wait but for the switch itself.
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
"""Trials that did not pay may have cost this share of the engine's time at most, together with the next one."""
_FIRST_STEPS: Final = 64
"""Steps of one adapter after which merging is tried first; what it costs and saves is not known before."""


class MergePaid(BatchingMode):
    """Merges the only adapter that has requests, as soon as its overhead so far would have paid for it.

    That is the rule for renting or buying: whenever the other requests come, the time lost is at most twice that of
    who had known. What trials have lost altogether, against never merging, stays within ``REGRET_SHARE`` of the time:
    a trial begins only if it would stay within even if it saved nothing. Where LoRA costs too little for that, no trial
    begins but the first.

    Args:
        setup: of the replica.

    Attributes:
        net_s: seconds that merging has saved so far, switches included; negative if it has cost time.
        busy_s: seconds of all steps and switches.
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
        """Let all requests run; merge their adapter if it is the only one and that pays."""
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
        """Record the times, and what merging has saved or would have saved."""
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
        """Return what the only adapter adds to a step if it is not merged; 0 before that is known."""
        costs = self._meter.costs()
        alone = self._alone
        if costs is None or alone is None or not self._has_tried:
            return 0.0
        rank = self._rank(alone)
        return costs.lora_s + rank * (costs.lora_prefill_s * work.prefill_tokens + costs.lora_decode_s * work.decodes)

    def steps_until_review(self) -> float:
        """Return 1 while the next step may be the one at which merging pays."""
        return 1 if self._alone is not None and self._merged is None else float("inf")
