"""Selects the requests that may run in a step, by the batching mode."""

import collections.abc
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import ModeStats
from lorikeet.core.plan import KernelForm, StepPlan, StepResult
from lorikeet.core.request import Request
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.costs.iteration_costs import IterationCosts
from lorikeet.memory.memory import Memory
from lorikeet.scheduling.batching.mode import ALL_REQUESTS, BatchingPolicy, BatchingSetup, BatchWork, LiveRequest
from lorikeet.scheduling.engine_load import EngineLoad
from lorikeet.scheduling.plan_builder import PlanBuilder
from lorikeet.scheduling.state import SchedulerLimits, Sequence
from lorikeet.scheduling.step_costs import StepCostMeter

_MAX_SLOWDOWN = 0.2
"""Largest share by which a step of prefills and a step of decodes may together take longer than one combined step.

Running answers get their next tokens later by this time.
"""

_CACHED_RANKS = 4096
"""Number of adapters whose largest rank is cached, because the rank is computed over all layers."""


class BatchSelector:
    """Selects the requests that may run in a step, and separates prefills from decodes if that saves time.

    Args:
        batching: creates the preset's batching mode.
        limits: limits of a plan.
        kernel_form: form in which kernels compute mixed ranks.
        memory: the engine's memory, which knows the adapters on the device.
        load: sequences of the scheduler and their step times.
        assist: costs of assisted prefills; None if host cores do not assist.
        iterations: profiled times of iterations; None without a profile.

    Attributes:
        merged: adapter that was merged for the last plan with sequences; None for none.
        meter: measures the costs of steps.
    """

    def __init__(
        self,
        batching: BatchingPolicy,
        limits: SchedulerLimits,
        kernel_form: KernelForm,
        memory: Memory,
        load: EngineLoad,
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
        self._sequences = load.sequences
        self._load = load
        self._assist = assist
        self._choice = ALL_REQUESTS
        self._last_step_was_assisted = False
        self._last_step_had_only_prefills = False
        self._assisted_postponed = False
        self._untried = 0
        self.merged: AdapterDigest | None = None
        self._switches = 0
        self._merged_steps = 0
        self._assisted_steps = 0
        self._switch_s = 0.0

    def stats(self) -> ModeStats:
        """Return the statistics of the batching mode."""
        return ModeStats(self.merged, self._switches, self._switch_s, self._merged_steps, self._assisted_steps)

    # --- batching mode -------------------------------------------------------------------------------

    def choose(self, urgency: Callable[[Request], Any]) -> None:
        """Call the batching mode before a step to choose among all requests, in the order of ``urgency``."""
        if not self._mode.follows_requests:
            return
        tree = self._memory.tree
        resident: dict[AdapterDigest | None, bool] = {}
        live = []
        for sequence in sorted(self._sequences.values(), key=lambda each: urgency(each.request)):
            digest = sequence.digest
            if digest not in resident:
                node = tree.adapter(digest)
                resident[digest] = node is not None and bool(tree.on_device[node])
            # Merging would change all tokens, so an adapter that acts on only a part of them is never merged.
            may_merge = None if sequence.request.adapter_start else digest
            live.append(LiveRequest(sequence.request_id, may_merge, resident[digest], len(sequence.token_ids)))
        self._choice = self._mode.choose(live)
        self.count_untried()

    def count_untried(self) -> None:
        """Count the waiting requests that the batching mode has chosen and that are not yet tried for admission."""
        chosen = self._choice.requests
        self._untried = 0 if chosen is None else sum(self._sequences[each].lease is None for each in chosen)

    def note_tried(self) -> None:
        """Record that a chosen waiting request is being tried."""
        self._untried -= 1

    def can_admit_more(self, running: collections.abc.Sequence[Sequence]) -> bool:
        """Return whether another sequence may be admitted.

        Running sequences that the batching mode has not chosen keep their blocks.
        """
        if self._choice.requests is not None:
            return self._untried > 0  # a mode never chooses more requests than fit a step
        return len(running) < self._limits.max_num_seqs

    def allows(self, request_id: RequestId) -> bool:
        """Return whether the batching mode allows a request to run now."""
        return self._choice.requests is None or request_id in self._choice.requests

    def allowed(self, running: collections.abc.Sequence[Sequence]) -> collections.abc.Sequence[Sequence]:
        """Return the running sequences that the batching mode allows to run now."""
        return running if self._choice.requests is None else [s for s in running if self.allows(s.request_id)]

    def last_not_allowed(self, running: collections.abc.Sequence[Sequence]) -> Sequence | None:
        """Return the last running sequence that may not run now; None if all may run.

        This sequence is preempted first.
        """
        if self._choice.requests is None:
            return None
        return next((sequence for sequence in reversed(running) if not self.allows(sequence.request_id)), None)

    @property
    def steps_until_review(self) -> float:
        """Number of identical steps until the batching mode may choose differently, or until postponed prefills run."""
        return 1 if self._assisted_postponed else self._mode.steps_until_review()

    def switch_merged(self, builder: PlanBuilder) -> None:
        """Set the merged adapter to the batching mode's choice. A plan without sequences keeps the current adapter."""
        if builder.tokens:
            self._switches += self._choice.merged != self.merged
            self.merged = self._choice.merged

    def note(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """Report a finished plan to the meter and the batching mode.

        Args:
            plan, result: plan and its result.
            step_s: mean seconds of its steps without the merge switch.
        """
        self._switch_s += result.switch_s
        self._merged_steps += result.steps_run if plan.merged is not None else 0
        self._assisted_steps += bool(plan.assisted)
        prefills = decodes = prefill_tokens = 0
        prefill_rows: dict[AdapterDigest, int] = {}
        decode_rows: dict[AdapterDigest, int] = {}
        types: set[AdapterDigest | None] = set()
        is_merged = plan.merged is not None
        for step in plan.sequences:
            sequence = self._sequences[step.request_id]
            tokens = step.tokens
            digest = sequence.digest
            if sequence.is_decoding:
                decodes += tokens
                rows = decode_rows
            else:
                prefills += 1
                prefill_tokens += tokens
                rows = prefill_rows
            types.add(digest)
            if digest is not None and not is_merged:
                rows[digest] = rows.get(digest, 0) + tokens
        is_assisted = bool(plan.assisted)
        if not is_assisted:
            self.meter.note(result.steps_run, step_s, prefill_tokens, decodes, prefill_rows, decode_rows)
        if not self._mode.follows_requests:
            return
        all_rows = Counter(prefill_rows) + Counter(decode_rows)
        work = BatchWork(prefills, prefill_tokens, decodes, all_rows, types, is_assisted)
        self._mode.ran(result.steps_run, work, step_s, result.switch_s)

    def _rank(self, digest: AdapterDigest) -> int:
        tree = self._memory.tree
        node = tree.adapter(digest)
        assert node is not None, "a live request's adapter is in the tree"
        return tree.adapters[node].ref.max_rank

    # --- steps of prefills alone ---------------------------------------------------------------------

    def separate_prefills(self, builder: PlanBuilder) -> None:
        """Run a step's prefills without its decodes if this saves time over all requests, but never twice in a row.

        Requests that get their first token in the step gain the decode time (and the slowdown from larger ranks). Every
        other request loses the extra time of two steps over one.
        """
        was_separate = self._last_step_had_only_prefills
        self._last_step_had_only_prefills = False
        prefills = builder.prefills()
        if was_separate or not prefills or len(prefills) == len(builder.tokens):
            return
        decodes = dict.fromkeys((sequence for sequence in builder.tokens if sequence not in prefills), 1)
        ending = [sequence for sequence, tokens in prefills.items() if tokens == sequence.remaining_tokens]
        tokens = sum(prefills.values())
        rows = self._rows(prefills)
        decode_rows = self._rows(decodes)
        together_s = self.meter.step_s(tokens, len(decodes), rows, decode_rows)
        alone_s = self.meter.step_s(tokens, 0, rows, {})
        decodes_s = self.meter.step_s(0, len(decodes), {}, decode_rows)
        later_s = alone_s + decodes_s - together_s
        if later_s > _MAX_SLOWDOWN * together_s:
            return
        gain_s = len(ending) * (together_s - alone_s)
        if gain_s > 0 and (later_s <= 0 or gain_s > later_s * self._load.delay_per_lost_second()):
            builder.tokens = prefills  # the decodes run in the next step
            self._last_step_had_only_prefills = True

    def _rows(self, tokens: Mapping[Sequence, int]) -> dict[AdapterDigest, int]:
        """Return the number of tokens of each adapter."""
        rows: dict[AdapterDigest, int] = {}
        for sequence, count in tokens.items():
            if (digest := sequence.digest) is not None:
                rows[digest] = rows.get(digest, 0) + count
        return rows

    # --- assisted prefills ---------------------------------------------------------------------------

    def place_assisted_prefills(self, builder: PlanBuilder) -> None:
        """Add assisted prefills to the step, or run them in a separate step.

        Assisted prefills join the step unless they would delay its decodes by more than the time of a decode step. In
        that case a step of the assisted prefills comes first, and a step of the other sequences follows.
        """
        self._assisted_postponed = False
        if not builder.assisted:
            self._last_step_was_assisted = False
            return
        decodes = sum(sequence.is_decoding for sequence in builder.tokens)
        if decodes and self._assist_delay_s(builder) > self._load.step_times.step_s(0, decodes):
            self._last_step_was_assisted = not self._last_step_was_assisted
            if not self._last_step_was_assisted:
                self._assisted_postponed = True
                builder.assisted.clear()
                return
            builder.tokens.clear()
        builder.tokens.update(builder.assisted)

    def _assist_delay_s(self, builder: PlanBuilder) -> float:
        """Return the largest number of seconds by which assisted prefills prolong a step."""
        assist = self._assist
        assert assist is not None, "a prefill is assisted, but its costs are not known"
        delay_s = 0.0
        for sequence, tokens in builder.assisted.items():
            ref = sequence.request.adapter
            assert ref is not None
            delay_s += assist.assisted(ref, tokens).first_token_s - assist.cached_s(ref, tokens)
        return delay_s
