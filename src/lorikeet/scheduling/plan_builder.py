"""Builds the plan of one step: which sequences run, and how many tokens each computes.

``PlanBuilder`` collects the sequences of a step within its token budget, and ``build_plan`` turns it into a plan.
``BatchSelector`` asks the batching mode which requests may run and which adapter is merged, and places prefills that
host cores assist.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import ModeStats
from lorikeet.core.plan import KernelForm, SequenceStart, SequenceStep, StepPlan, StepResult
from lorikeet.core.request import Request
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.costs.iteration_costs import IterationCosts
from lorikeet.memory.blocks import WaitReason
from lorikeet.memory.memory import Memory
from lorikeet.scheduling.batching.mode import ALL_REQUESTS, BatchingPolicy, BatchingSetup, BatchWork, LiveRequest
from lorikeet.scheduling.drafts import Drafts
from lorikeet.scheduling.state import SchedulerLimits, Sequence, StepTimeEstimator
from lorikeet.scheduling.step_costs import StepCostMeter


@dataclass(slots=True)
class PlanBuilder:
    """The sequences of a step with their token counts, and the rest of the token budget.

    Attributes:
        budget_tokens: tokens of the budget that are left.
        tokens: number of tokens to compute, by sequence.
        assisted: the same for prefills that host cores assist.
        preempted: whether a sequence was preempted for lack of blocks.
        adapters_without_slot: adapters for which there is no slot in this step; their requests are not tried again.
        decodes: decodes that run only if the step has no prefill (:meth:`set_decodes_aside`).
    """

    budget_tokens: int
    tokens: dict[Sequence, int] = field(default_factory=dict)
    assisted: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    adapters_without_slot: set[AdapterDigest | None] = field(default_factory=set)
    decodes: dict[Sequence, int] = field(default_factory=dict)

    def add_decodes(self, sequences: Many[Sequence]) -> None:
        """Add sequences with one remaining token each, none of them cold. The budget suffices."""
        self.tokens.update(dict.fromkeys(sequences, 1))
        self.budget_tokens -= len(sequences)

    def prefills(self) -> dict[Sequence, int]:
        """Return those of the tokens that are not of sequences that decode."""
        return {
            sequence: tokens
            for sequence, tokens in self.tokens.items()
            # As ``Sequence.is_decoding``: called for all sequences in every step.
            if (known := len(sequence.token_ids)) - sequence.computed_tokens != 1 or known <= sequence.prompt_tokens
        }

    def add(self, sequence: Sequence) -> None:
        """Add a sequence with as many of its remaining tokens as the budget allows."""
        tokens, lease = min(sequence.remaining_tokens, self.budget_tokens), sequence.lease
        if tokens:
            is_cold = lease is not None and lease.assisted and sequence.is_cold
            (self.assisted if is_cold else self.tokens)[sequence] = tokens
            self.budget_tokens -= tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and return its tokens to the budget."""
        self.budget_tokens += self.tokens.pop(sequence, 0) + self.assisted.pop(sequence, 0)
        self.decodes.pop(sequence, None)

    def set_decodes_aside(self) -> None:
        """Keep the sequences so far out of the step unless it gets no prefill."""
        self.budget_tokens += sum(self.tokens.values())
        self.decodes.update(self.tokens)
        self.tokens.clear()

    def run_decodes_without_prefill(self) -> None:
        """Fill a step that has no prefill with the decodes that were set aside."""
        if not (self.tokens or self.assisted):
            self.tokens.update(self.decodes)

    def lacks_slot(self, digest: AdapterDigest | None, running: Iterable[Sequence], most: int) -> bool:
        """Whether one more adapter beside those of the running sequences would exceed ``most``; 0 is no limit."""
        if digest is not None and most and digest not in self.adapters_without_slot:
            used = {sequence.digest for sequence in running} - {None}
            if digest not in used and len(used) >= most:
                self.adapters_without_slot.add(digest)
        return digest in self.adapters_without_slot

    def note_refusal(self, digest: AdapterDigest | None, why: WaitReason) -> WaitReason:
        """Record why a request was not admitted, and return the reason; requests of its adapter may be skipped then."""
        if why is WaitReason.SLOT:
            self.adapters_without_slot.add(digest)
        return why

    def grouped_by_adapter(self) -> list[tuple[Sequence, int]]:
        """Return sequences and their tokens, sequences of one adapter next to each other."""
        return sorted(self.tokens.items(), key=lambda item: item[0].digest or "")


def build_plan(
    builder: PlanBuilder,
    step: int,
    memory: Memory,
    kernel_form: KernelForm,
    drops: tuple[RequestId, ...],
    merged: AdapterDigest | None,
    repeat: int,
    limit_s: float,
    overlapped: bool,
    drafts: Drafts,
) -> StepPlan:
    """Return the plan of a step, with the transfers and evictions that the memory has begun since the last plan.

    Args:
        builder: the sequences of the step.
        step: number of the step.
        memory: returns transfers and evictions.
        kernel_form: of the preset.
        drops: sequences that the executor may forget.
        merged: the adapter that is merged for the step, None for none.
        repeat, limit_s, overlapped: ``StepPlan.repeat``, ``max_duration_s`` and ``overlapped``.
        drafts: tokens that are computed beside those of a sequence.
    """
    starts: list[SequenceStart] = []
    steps: list[SequenceStep] = []
    adapters: dict[AdapterDigest, None] = {}
    assisted: dict[AdapterDigest, None] = {}
    for sequence, tokens in builder.grouped_by_adapter():
        if not sequence.started:
            starts.append(sequence.start())
            sequence.started = True
        if sequence.digest is not None:
            adapters[sequence.digest] = None
            if sequence in builder.assisted:
                assisted[sequence.digest] = None
        steps.append(sequence.step(tokens, drafts.get(sequence.request_id, ()) if drafts else ()))
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
    """Return the plan of a step that the executor has already started while ``result`` was returned (async scheduling).

    Args:
        plan, result: plan and result of the step before it.
        step: number of the step.
        sequences: all sequences by request.
        further: whether the executor may run the remaining repeats of ``plan`` after it.

    Returns:
        The plan; None if none of the sequences is left.
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


_MOST_LONGER = 0.2
"""A step without its decodes and the one after it take at most so much longer than both together: tokens of running
answers come later by that."""

_CACHED_RANKS = 4096
"""Adapters whose largest rank is cached, since it is computed over all layers."""


class BatchSelector:
    """Selects the requests that may run in a step, by the batching mode, and places assisted prefills.

    Args:
        batching: creates the preset's batching mode.
        limits: bounds of a plan.
        kernel_form: how mixed ranks are computed.
        memory: knows which adapters are on the device.
        sequences: the scheduler's sequences by request.
        step_times: estimates how long steps take.
        assist: costs of assisted prefills; None if host cores do not assist.
        iterations: profiled times of iterations; None without a profile.

    Attributes:
        merged: the adapter that was merged for the last plan with sequences, None if none was.
        meter: measures what steps cost.
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
        iterations: IterationCosts | None = None,
    ) -> None:
        self._limits = limits
        self._memory = memory
        rank = lru_cache(_CACHED_RANKS)(self._rank)
        self.meter = StepCostMeter(kernel_form, rank)
        self._mode = batching(
            BatchingSetup(
                limits.max_num_seqs,
                kernel_form,
                rank,
                lambda: len(memory.tree.adapters),
                memory.total_blocks * memory.block_size,
                iterations,
            )
        )
        self._sequences = sequences
        self._step_times = step_times
        self._assist = assist
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._choice = ALL_REQUESTS
        self._last_step_was_assisted = self._assisted_postponed = self._last_step_was_apart = False
        self._untried = 0
        self.merged: AdapterDigest | None = None
        self._switches = self._merged_steps = self._assisted_steps = 0
        self._switch_s = 0.0

    def stats(self) -> ModeStats:
        """Return the statistics of the batching mode."""
        return ModeStats(self.merged, self._switches, self._switch_s, self._merged_steps, self._assisted_steps)

    # --- batching mode -------------------------------------------------------------------------------

    def choose(self, urgency: Callable[[Request], Any]) -> None:
        """Let the batching mode choose among all requests before a step, in the order of ``urgency``."""
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
            # An adapter that acts on a part of the tokens is never merged, just as the base.
            may_merge = None if sequence.request.adapter_start else digest
            live.append(LiveRequest(sequence.request_id, may_merge, legal[digest], len(sequence.token_ids)))
        self._choice = self._mode.choose(live)
        self.count_untried()

    def count_untried(self) -> None:
        """Count the waiting requests that the batching mode has chosen, which are to be tried for admission."""
        chosen = self._choice.requests
        self._untried = 0 if chosen is None else sum(self._sequences[each].lease is None for each in chosen)

    def note_tried(self) -> None:
        """Record that one of the chosen waiting requests is being tried."""
        self._untried -= 1

    def can_admit_more(self, running: Many[Sequence]) -> bool:
        """Whether another sequence may be admitted. Those that may not run now keep their blocks beside the others."""
        if self._choice.requests is not None:
            return self._untried > 0  # a mode never chooses more than fit into a step
        return len(running) < self._limits.max_num_seqs

    def allows(self, request_id: RequestId) -> bool:
        """Whether the batching mode lets a request run now."""
        return self._choice.requests is None or request_id in self._choice.requests

    def allowed(self, running: Many[Sequence]) -> Many[Sequence]:
        """Return those of the running sequences that the batching mode lets run."""
        return running if self._choice.requests is None else [s for s in running if self.allows(s.request_id)]

    def last_not_allowed(self, running: Many[Sequence]) -> Sequence | None:
        """Return the running sequence to preempt first of those that may not run now; None if all may."""
        if self._choice.requests is None:
            return None
        return next((sequence for sequence in reversed(running) if not self.allows(sequence.request_id)), None)

    @property
    def steps_until_review(self) -> float:
        """Identical steps until the batching mode may choose otherwise, or postponed assisted prefills are due."""
        return 1 if self._assisted_postponed else self._mode.steps_until_review()

    def merged_adapter(self, builder: PlanBuilder) -> AdapterDigest | None:
        """Return the adapter that is merged for a plan; a plan without sequences keeps the present one."""
        merged = self._choice.merged if builder.tokens else self.merged
        self._switches += merged != self.merged
        self.merged = merged
        return merged

    def note(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """Report a finished plan to the batching mode; ``step_s`` is the mean step time without the merge switch."""
        self._switch_s += result.switch_s
        self._merged_steps += result.steps_run if plan.merged is not None else 0
        self._assisted_steps += bool(plan.assisted)
        prefills, decodes, prefill_tokens = 0, 0, 0
        prefill_rows, decode_rows = Counter[AdapterDigest](), Counter[AdapterDigest]()
        types: dict[AdapterDigest | None, AdapterRef | None] = {}
        sequences, is_merged = self._sequences, plan.merged is not None
        for step in plan.sequences:
            sequence, tokens = sequences[step.request_id], step.tokens
            known, digest = len(sequence.token_ids), sequence.digest
            if known - sequence.computed_tokens == 1 and known > sequence.prompt_tokens:
                decodes, rows = decodes + tokens, decode_rows
            else:
                prefills, prefill_tokens, rows = prefills + 1, prefill_tokens + tokens, prefill_rows
            if digest not in types:
                types[digest] = sequence.request.adapter
            if digest is not None and not is_merged:
                rows[digest] = rows.get(digest, 0) + tokens
        for ref in types.values():
            if ref is not None:
                self._refs.setdefault(ref.digest, ref)
        is_assisted = bool(plan.assisted)
        if not is_assisted:
            self.meter.note(result.steps_run, step_s, prefill_tokens, decodes, prefill_rows, decode_rows)
        if not self._mode.follows_requests:
            self._refs.clear()
            return
        work = BatchWork(prefills, prefill_tokens, decodes, prefill_rows + decode_rows, set(types), is_assisted)
        self._mode.ran(result.steps_run, work, step_s, result.switch_s)

    def _rank(self, digest: AdapterDigest) -> int:
        return self._refs[digest].max_rank

    # --- prefills apart ------------------------------------------------------------------------------

    def leave_decodes_out(self, builder: PlanBuilder, delay_per_lost_second: Callable[[], float]) -> None:
        """Leave the decodes out of a step if that pays (``PrefillApart.PAYS``); never twice in a row.

        Those that get their first token in the step gain the time of its decodes, and what prompts take longer beside
        adapters of larger ranks. All others lose what both steps take longer than the one.

        Args:
            builder: the sequences of the step.
            delay_per_lost_second: returns by how many seconds all requests are delayed if the engine loses one.
        """
        was_apart, self._last_step_was_apart = self._last_step_was_apart, False
        prefills = builder.prefills()
        if was_apart or not prefills or len(prefills) == len(builder.tokens):
            return
        decodes = [sequence for sequence in builder.tokens if sequence not in prefills]
        ending = [sequence for sequence, tokens in prefills.items() if tokens == sequence.remaining_tokens]
        tokens, none = sum(prefills.values()), Counter[AdapterDigest]()
        rows, decode_rows = self._rows(prefills), self._rows(dict.fromkeys(decodes, 1))
        together_s = self.meter.step_s(tokens, len(decodes), rows, decode_rows)
        alone_s = self.meter.step_s(tokens, 0, rows, none)
        decodes_s = self.meter.step_s(0, len(decodes), none, decode_rows)
        if not self._mode.follows_requests:
            self._refs.clear()
        later_s = alone_s + decodes_s - together_s
        if later_s > _MOST_LONGER * together_s:
            return
        gain_s = len(ending) * (together_s - alone_s)
        if gain_s > 0 and (later_s <= 0 or gain_s > later_s * delay_per_lost_second()):
            builder.tokens = prefills  # the decodes are not tried again in this step
            self._last_step_was_apart = True

    def _rows(self, tokens: Mapping[Sequence, int]) -> Counter[AdapterDigest]:
        """Return the tokens of each adapter."""
        rows = Counter[AdapterDigest]()
        for sequence, count in tokens.items():
            if (ref := sequence.request.adapter) is not None:
                self._refs.setdefault(ref.digest, ref)
                rows[ref.digest] += count
        return rows

    # --- assisted prefills ---------------------------------------------------------------------------

    def place_assisted_prefills(self, builder: PlanBuilder) -> None:
        """Add assisted prefills to the step, or give them a step of their own.

        They join the step unless they would delay its decodes by more than a decode step takes. Otherwise steps
        alternate between the assisted prefills, which come first, and the other sequences.
        """
        self._assisted_postponed = False
        if not builder.assisted:
            self._last_step_was_assisted = False
            return
        decodes = sum(sequence.is_decoding for sequence in builder.tokens)
        if decodes and self._assist_delay_s(builder) > self._step_times.step_s(0, decodes):
            self._last_step_was_assisted = not self._last_step_was_assisted
            if not self._last_step_was_assisted:
                self._assisted_postponed = True
                builder.assisted.clear()
                return
            builder.tokens.clear()
        builder.tokens.update(builder.assisted)

    def _assist_delay_s(self, builder: PlanBuilder) -> float:
        """Return by how many seconds at most host workers prolong a step."""
        assist, delay_s = self._assist, 0.0
        assert assist is not None, "a prefill is assisted, but its costs are not known"
        for sequence, tokens in builder.assisted.items():
            ref = sequence.request.adapter
            assert ref is not None
            delay_s += assist.assisted(ref, tokens).first_token_s - assist.cached_s(ref, tokens)
        return delay_s
