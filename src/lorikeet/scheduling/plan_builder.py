"""Builds the plan of one step: which sequences run, and how many tokens each computes.

Within what admission and memory allow, the batching mode chooses who runs and which adapter is merged. Prefills that
host cores assist join the step, or get a step of their own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.assist_costs import AssistCosts
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import ModeStats
from lorikeet.core.plan import KernelForm, SequenceStart, SequenceStep, StepPlan, StepResult
from lorikeet.core.request import Request
from lorikeet.memory.blocks import WaitReason
from lorikeet.memory.memory import Memory
from lorikeet.scheduling.batching.mode import ALL_REQUESTS, BatchingPolicy, BatchingSetup, BatchWork, LiveRequest
from lorikeet.scheduling.state import SchedulerLimits, Sequence
from lorikeet.scheduling.step_times import StepTimeEstimator


@dataclass(slots=True)
class PlanBuilder:
    """Who gets how many tokens, and what is left of the step's budget.

    Attributes:
        budget_tokens: not given to anybody yet.
        tokens: by sequence.
        cold: the same of prefills that the host assists.
        preempted: whether a sequence lost its blocks for want of room.
        without_slot: adapters that others are in the way of; their requests need not be tried again in this step.
    """

    budget_tokens: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    cold: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    without_slot: set[AdapterDigest | None] = field(default_factory=set)

    def give(self, sequence: Sequence) -> None:
        """Give a sequence what it can use of the budget."""
        tokens = min(sequence.remaining_tokens, self.budget_tokens)
        if tokens:
            (self.cold if sequence.is_cold else self.tokens)[sequence] = tokens
            self.budget_tokens -= tokens

    def take_back(self, sequence: Sequence) -> None:
        """Take from a sequence what it was given."""
        self.budget_tokens += self.tokens.pop(sequence, 0) + self.cold.pop(sequence, 0)

    def lacks_slot(self, digest: AdapterDigest | None, running: Iterable[Sequence], most: int) -> bool:
        """Whether an adapter beside those of the running sequences makes more than ``most``; 0 is no limit."""
        if digest is not None and most and digest not in self.without_slot:
            used = {sequence.digest for sequence in running} - {None}
            if digest not in used and len(used) >= most:
                self.without_slot.add(digest)
        return digest in self.without_slot

    def refused(self, digest: AdapterDigest | None, why: WaitReason) -> WaitReason:
        """A request was not admitted; note what that says of others under its adapter, and return the reason."""
        if why is WaitReason.SLOT:
            self.without_slot.add(digest)
        return why

    def by_adapter(self) -> list[tuple[Sequence, int]]:
        """Return who gets what, sequences of one adapter side by side."""
        return sorted(self.tokens.items(), key=lambda item: item[0].digest or "")


def build_plan(
    draft: PlanBuilder,
    step: int,
    memory: Memory,
    kernel_form: KernelForm,
    drops: tuple[RequestId, ...],
    merged: AdapterDigest | None,
    repeat: int,
    limit_s: float,
    overlapped: bool,
) -> StepPlan:
    """Turn a draft into a value, with all that the memory has begun since the last one.

    Args:
        draft: who runs.
        step: its number.
        memory: tells of transfers and evictions.
        kernel_form: of the row.
        drops: sequences that the executor may forget.
        merged: the adapter that is merged meanwhile.
        repeat, limit_s, overlapped: of the plan.
    """
    starts: list[SequenceStart] = []
    steps: list[SequenceStep] = []
    adapters: dict[AdapterDigest, None] = {}
    assisted: dict[AdapterDigest, None] = {}
    for sequence, tokens in draft.by_adapter():
        if not sequence.started:
            starts.append(sequence.start())
            sequence.started = True
        if sequence.digest is not None:
            adapters[sequence.digest] = None
            if sequence.is_cold:
                assisted[sequence.digest] = None
        steps.append(sequence.step(tokens))
    transfers, urgent = memory.take_transfers()
    return StepPlan(
        step=step,
        sequences=tuple(steps),
        starts=tuple(starts),
        drops=drops,
        adapters=tuple(adapters),
        transfers=transfers,
        urgent=urgent,
        evictions=memory.take_evictions(),
        kernel_form=kernel_form,
        merged=merged,
        repeat=repeat,
        max_duration_s=limit_s,
        assisted=tuple(assisted),
        overlapped=overlapped,
    )


def continue_plan(
    plan: StepPlan, result: StepResult, step: int, sequences: Mapping[RequestId, Sequence], *, further: bool
) -> StepPlan | None:
    """Return a plan for the step that runs since another returned; None if all of its sequences have left.

    Args:
        plan, result: that one, and what it brought.
        step: its number.
        sequences: of all requests.
        further: whether it may have steps after that one, as many as are left of ``plan``.
    """
    found = (sequences.get(each.request_id) for each in plan.sequences)
    staying = [sequence for sequence in found if sequence is not None and sequence.is_ready and sequence.is_decoding]
    limit_s = plan.max_duration_s - result.duration_s
    further = further and limit_s > 0 and len(staying) == len(plan.sequences)
    if not staying:
        return None
    return StepPlan(
        step=step,
        sequences=tuple(sequence.step(1) for sequence in staying),
        adapters=tuple(dict.fromkeys(sequence.digest for sequence in staying if sequence.digest is not None)),
        kernel_form=plan.kernel_form,
        merged=plan.merged,
        repeat=plan.repeat - result.steps_run if further else 1,
        max_duration_s=limit_s,
        overlapped=True,
        continues=True,
    )


_KNOWN_RANKS = 4096
"""Ranks of so many adapters are remembered: to find one out is to look at all layers."""


class BatchSelector:
    """See the module.

    Args:
        batching: makes the row's batching mode.
        limits: of a plan.
        kernel_form: how mixed ranks are computed.
        memory: knows which adapters are on the device.
        sequences: the scheduler's, by request.
        step_times: how long steps take.
        assist: what assisted prefills cost; None if there are none.

    Attributes:
        merged: the adapter that the last plan with sequences ran merged, None if it ran unmerged.
    """

    def __init__(
        self,
        batching: BatchingPolicy,
        limits: SchedulerLimits,
        kernel_form: KernelForm,
        memory: Memory,
        sequences: Mapping[RequestId, Sequence],
        step_times: StepTimeEstimator,
        assist: AssistCosts | None = None,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._mode = batching(
            BatchingSetup(
                limits.max_num_seqs,
                kernel_form,
                lru_cache(_KNOWN_RANKS)(self._rank),
                lambda: len(memory.tree.adapters),
                memory.total_blocks * memory.block_size,
            )
        )
        self._sequences = sequences
        self._step_times = step_times
        self._assist = assist
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._choice = ALL_REQUESTS
        self._had_cold_step = self._put_cold_off = False
        self._untried = 0
        self.merged: AdapterDigest | None = None
        self._switches = self._merged_steps = self._assisted_steps = 0
        self._switch_s = 0.0

    def stats(self) -> ModeStats:
        """Return what there is to tell."""
        return ModeStats(self.merged, self._switches, self._switch_s, self._merged_steps, self._assisted_steps)

    # --- batching mode -------------------------------------------------------------------------------

    def choose(self, urgency: Callable[[Request], Any]) -> None:
        """Let the batching mode look at all requests before a step, in the order of ``urgency``."""
        if not self._mode.follows_requests:
            return
        tree, legal = self._memory.tree, dict[AdapterDigest | None, bool]()
        live = []
        self._refs.clear()
        for sequence in sorted(self._sequences.values(), key=lambda each: urgency(each.request)):
            digest = sequence.digest
            if digest not in legal:
                node = tree.adapter(digest)
                legal[digest] = node is not None and bool(tree.on_device[node])
                if sequence.request.adapter is not None:
                    self._refs[sequence.request.adapter.digest] = sequence.request.adapter
            live.append(LiveRequest(sequence.request_id, digest, legal[digest], len(sequence.token_ids)))
        self._choice = self._mode.choose(live)
        self.count_untried()

    def count_untried(self) -> None:
        """Count those who may run and wait, to be tried for admission."""
        chosen = self._choice.requests
        self._untried = 0 if chosen is None else sum(self._sequences[each].lease is None for each in chosen)

    def tried(self) -> None:
        """One of them is being tried."""
        self._untried -= 1

    def goes_on(self, running: Many[Sequence]) -> bool:
        """Whether another sequence may be admitted, if need be in the place of one that may not run now."""
        if self._choice.requests is not None and self._untried <= 0:
            return False
        return len(running) < self._limits.max_num_seqs or self.last_displaced(running) is not None

    def allows(self, request_id: RequestId) -> bool:
        """Whether the batching mode lets it run now."""
        return self._choice.requests is None or request_id in self._choice.requests

    def allowed(self, running: Many[Sequence]) -> Many[Sequence]:
        """Return those of the running sequences that it lets run."""
        return running if self._choice.requests is None else [s for s in running if self.allows(s.request_id)]

    def last_displaced(self, running: Many[Sequence]) -> Sequence | None:
        """Return who of those that may not run now would be the first to give its blocks back."""
        if self._choice.requests is None:
            return None
        return next((sequence for sequence in reversed(running) if not self.allows(sequence.request_id)), None)

    @property
    def steps_until_review(self) -> float:
        """Identical steps after which the batching mode may choose otherwise, or cold prefills have their turn."""
        return 1 if self._put_cold_off else self._mode.steps_until_review()

    def merged_for(self, draft: PlanBuilder) -> AdapterDigest | None:
        """Return which adapter a plan runs merged. One that runs nobody leaves it as it is."""
        merged = self._choice.merged if draft.tokens else self.merged
        self._switches += merged != self.merged
        self.merged = merged
        return merged

    def note(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """Tell the batching mode how long a plan took, without its switch ``step_s`` for each of its steps."""
        self._switch_s += result.switch_s
        self._merged_steps += result.steps_run if plan.merged is not None else 0
        self._assisted_steps += bool(plan.assisted)
        if not self._mode.follows_requests:
            return
        rows, types, decodes, prefill_tokens = Counter[AdapterDigest](), set[AdapterDigest | None](), 0, 0
        for step in plan.sequences:
            sequence = self._sequences[step.request_id]
            is_decode = sequence.is_decoding
            decodes += is_decode
            prefill_tokens += 0 if is_decode else step.tokens
            digest = sequence.digest
            types.add(digest)
            if digest is not None and plan.merged is None:
                rows[digest] += step.tokens
        prefills, is_assisted = len(plan.sequences) - decodes, bool(plan.assisted)
        work = BatchWork(prefills, prefill_tokens, decodes, rows, types, is_assisted)
        self._mode.ran(result.steps_run, work, step_s, result.switch_s)

    def _rank(self, digest: AdapterDigest) -> int:
        return self._refs[digest].max_rank

    # --- cold prefills -------------------------------------------------------------------------------

    def place_cold(self, draft: PlanBuilder) -> None:
        """Let assisted prefills join the step, or have one of their own.

        They join unless they would delay its decodes by more than a decode step takes. Else they take turns with the
        others, beginning with their own.
        """
        self._put_cold_off = False
        if not draft.cold:
            self._had_cold_step = False
            return
        decodes = sum(sequence.is_decoding for sequence in draft.tokens)
        if decodes and self._cold_delay_s(draft) > self._step_times.step_s(0, decodes):
            self._had_cold_step = not self._had_cold_step
            if not self._had_cold_step:
                self._put_cold_off = True
                draft.cold.clear()
                return
            draft.tokens.clear()
        draft.tokens.update(draft.cold)

    def _cold_delay_s(self, draft: PlanBuilder) -> float:
        """Return by how much longer a step takes at most since host workers take part in it."""
        assist, delay_s = self._assist, 0.0
        assert assist is not None, "prefills are assisted at costs that nobody knows"
        for sequence, tokens in draft.cold.items():
            ref = sequence.request.adapter
            assert ref is not None
            device_s = assist.layers * assist.device_layer_s(tokens)
            delay_s += assist.assisted(ref, tokens).first_token_s - device_s
        return delay_s
