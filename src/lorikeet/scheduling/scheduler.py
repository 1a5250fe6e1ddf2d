"""Schedules one engine: queues requests, and plans one step after the other.

``Scheduler.plan`` extends the blocks of running sequences where needed, admits waiting requests, and returns a
``StepPlan``. ``Scheduler.commit`` applies the tokens of the step. The scheduler is plain data, and callers pass in the
time. The scheduler runs no kernels, and changes blocks only through ``Memory``.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from functools import partial

from lorikeet.core.events import (
    AdapterArrived,
    Admitted,
    Finished,
    FinishReason,
    KvArrived,
    Preempted,
    Queued,
    RequestEvent,
)
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.image_keys import salted_by_prompt
from lorikeet.core.messages import TokenOutput
from lorikeet.core.plan import NOT_FINITE, PACKING_ORDER, StepPlan, StepResult, TransferDone
from lorikeet.core.request import Request
from lorikeet.costs.iteration_costs import IterationCosts
from lorikeet.memory.blocks import WAITS_FOR, SequenceLease, WaitReason
from lorikeet.memory.memory import Memory
from lorikeet.memory.prefix_insertion import ComputedTokens
from lorikeet.presets import ColdStart, PrefillApart, Preset
from lorikeet.scheduling.admission import AdmissionPolicy, AdmissionQueue
from lorikeet.scheduling.assist_planner import AssistPlanner
from lorikeet.scheduling.background import BackgroundLast
from lorikeet.scheduling.batching.mode import BatchingPolicy, Unmerged
from lorikeet.scheduling.drafts import Drafter, Drafts
from lorikeet.scheduling.engine_load import EngineLoad
from lorikeet.scheduling.image_steps import StepImages, why_too_large
from lorikeet.scheduling.plan_builder import PlanBuilder, PlanLength, build_plan, continue_plan
from lorikeet.scheduling.preempted_kv import KEEP_KV_RULES
from lorikeet.scheduling.savings import SavingsEstimator
from lorikeet.scheduling.scheduler_view import SchedulerView
from lorikeet.scheduling.selection import BatchSelector
from lorikeet.scheduling.state import OutputCollector, SchedulerLimits, SchedulerStats, Sequence

MAX_UNINTERRUPTED_STEPS = 32
"""Largest number of identical decode steps in one plan if no request can arrive during the plan, or if an arrival ends
the plan."""


class Scheduler:
    """Chooses the requests that run in each step.

    Args:
        memory: leases blocks and starts transfers.
        load: sequences and step times, which the scheduler updates.
        admission: creates the queue of waiting requests.
        limits: limits of a plan.
        preset: options of the preset.
        batching: creates the batching mode.
        assist: planner of assisted prefills; None if host cores do not assist.
        iterations: profiled times of iterations; None without a profile.

    Attributes:
        queue: the waiting requests.
        selector: selects the requests that may run.
        held_until_s: time until which the last step waits for transfers at most (``Preset.step_hold``); ``inf`` if the
            step does not wait.
        preemptions: number of preemptions so far.
        prefix_queries_tokens: number of tokens of admitted sequences so far.
        prefix_hits_tokens: number of tokens of admitted sequences that were found in the cache.
    """

    def __init__(
        self,
        memory: Memory,
        load: EngineLoad,
        admission: AdmissionPolicy,
        limits: SchedulerLimits,
        preset: Preset,
        batching: BatchingPolicy = Unmerged,
        assist: AssistPlanner | None = None,
        iterations: IterationCosts | None = None,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._preset = preset
        self._load = load
        self._sequences = load.sequences
        self._running = load.running
        self._step_times = load.step_times
        self._load_order = (lambda ref, tokens: PACKING_ORDER) if assist is None else assist.load_order
        assist_costs = None if assist is None else assist.costs
        self.selector = BatchSelector(batching, limits, preset.kernel_form, memory, load, assist_costs, iterations)
        self._view = SchedulerView(memory, limits, self._running, self.selector, self._step_times)
        self.queue: AdmissionQueue = admission(self._view)
        self._savings = SavingsEstimator(memory, self._step_times, self.selector.meter, assist)
        self.drafter = Drafter(limits.max_draft_tokens)
        self._drops: list[RequestId] = []
        self._steps = 0
        self._last_end_s = 0.0
        self.held_until_s = math.inf
        self._decode_steps = 0
        self._running_step: tuple[StepPlan, StepResult] | None = None
        self._outputs = OutputCollector()
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0

    # --- requests ------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a new or resumed request. A request that can never run ends immediately with an error event."""
        self._outputs.events.append(Queued(request.request_id, now, request.attempt))
        if request.request_id in self._sequences:
            self._outputs.events.append(Finished(request.request_id, now, FinishReason.ERROR, error="the id is in use"))
            return
        problem = self._why_impossible(request)
        if problem is not None:
            self._outputs.events.append(
                Finished(request.request_id, now, FinishReason.ERROR, error=problem, impossible=True)
            )
            return
        if self._limits.whole_prompts and request.images:
            request = salted_by_prompt(request)
        sequence = self._enqueue(request, now)
        # ``_enqueue`` does not do this, because it also queues preempted sequences, which have arrived before.
        self._memory.arrive(request.adapter, sequence.keys, len(sequence.token_ids), now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """End a request and free its blocks. An unknown id is ignored, because the request may just have finished."""
        if request_id in self._sequences:
            self._finish(self._sequences[request_id], now, FinishReason.ABORT)

    def export_request(self, request_id: RequestId, now: float, *, keep_kv: bool = False) -> Request:
        """Remove a request and return it as plain data, which :meth:`submit` of this or another engine resumes.

        Args:
            request_id: the request.
            now: the time.
            keep_kv: whether the request's KV stays cached, even if the preset frees the KV of preempted sequences.

        Raises:
            KeyError: the request does not exist.
        """
        sequence = self._sequences[request_id]
        request = sequence.export()
        self._remove(sequence, now, will_resume=True, keep_kv=keep_kv)
        return request

    def live_adapters(self) -> tuple[set[AdapterDigest], set[AdapterDigest]]:
        """Return the adapter versions of the running and of the waiting requests."""
        running = {s.digest for s in self._running}
        waiting = {s.digest for s in self._sequences.values() if s.lease is None}
        return {d for d in running if d is not None}, {d for d in waiting if d is not None}

    def may_be_next(self, request: Request) -> bool:
        """Return whether a new request may be admitted next, because no waiting request precedes it."""
        queue = self.queue
        if isinstance(queue, BackgroundLast) and not request.background:
            queue = queue.foreground
        return not len(queue)

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Ids of all requests, running and waiting."""
        return tuple(self._sequences)

    @property
    def has_requests(self) -> bool:
        """Whether the scheduler has any request."""
        return bool(self._sequences)

    def stats(self) -> SchedulerStats:
        """Return the numbers of requests by state."""
        return SchedulerStats.of(self._running, len(self._sequences))

    def queued(self) -> dict[str, int]:
        """Count the requests without blocks by the reason for which they wait; see ``EngineStats.queued``."""
        without = (each for each in self._sequences.values() if each.lease is None)
        return dict(Counter("order" if each.refused is None else each.refused.name.lower() for each in without))

    def take_outputs(self) -> tuple[tuple[TokenOutput, ...], tuple[RequestEvent, ...]]:
        """Return the tokens and events since the last call."""
        return self._outputs.take()

    def finish_transfer(self, done: TransferDone, now: float) -> None:
        """Apply the end of a transfer.

        If the transfer failed, requests that waited for the adapter end with the transfer's error. Requests that were
        queued after the transfer had begun are queued again, because the files may have been replaced since then.
        Requests that waited for KV are queued again and compute the KV.
        """
        outcome = self._memory.finish_transfer(done, now)
        for sequence in self._owners(outcome.adapter):
            self._outputs.events.append(AdapterArrived(sequence.request_id, now))
        for sequence in self._owners(outcome.kv):
            self._outputs.events.append(KvArrived(sequence.request_id, now))
        for sequence in self._owners(outcome.without_adapter):
            if sequence.queued_s <= outcome.began_s:
                self._finish(sequence, now, FinishReason.ERROR, error=outcome.error)
            else:
                self._suspend(sequence, now)
        for sequence in self._owners(outcome.without_kv):
            self._suspend(sequence, now)

    def _owners(self, leases: Iterable[SequenceLease]) -> list[Sequence]:
        wanted = set(leases)
        return [sequence for sequence in self._running if sequence.lease in wanted] if wanted else []

    # --- plan ----------------------------------------------------------------------------------------

    def plan(self, now: float, until_s: float | None = None) -> StepPlan:
        """Return the plan of the next step, after leasing its blocks and starting transfers.

        Args:
            now: the time.
            until_s: time until which no request arrives, on a virtual clock (see ``Engine.step``); otherwise None.
        """
        builder = PlanBuilder(self._limits.max_num_batched_tokens, StepImages(self._memory.images, self._limits))
        self._review(now)
        self._choose(now)
        self._grow(builder, now)
        self._admit(builder, now)
        self._arrange(builder, now)
        length = self._length(builder, now, until_s)
        return self._build(builder, length, now)

    def continue_plan(self, *, further: bool) -> StepPlan | None:
        """Return the plan of the step that the executor already runs (async scheduling); None if no step runs.

        Args:
            further: whether the executor may run the remaining repeats of the plan after that step.
        """
        if self._running_step is None:
            return None
        plan = continue_plan(*self._running_step, self._steps, self._sequences, further=further)
        self._running_step = None
        self._steps += plan is not None
        return plan

    def _review(self, now: float) -> None:
        """Preempt the requests that the admission policy returns to its queue."""
        for request in self.queue.review(now):
            restarts = self.queue.restarts_squashed and not request.background
            self._suspend(self._sequences[request.request_id], now, restarts=restarts)

    def _choose(self, now: float) -> None:
        """Call the batching mode to choose requests, and report the queue to the memory's policies."""
        self.selector.choose(self.queue.urgency)
        self._memory.note_waiting(len(self.queue), self.queue.wanted, now)

    def _grow(self, builder: PlanBuilder, now: float) -> None:
        """Add the running sequences to the step, each with blocks for its next token."""
        able = self.selector.allowed(self._running)
        if self._memory.awaited_transfers:
            able = [s for s in able if s.can_run]
        all_grown = self._memory.try_grow([(s.lease, len(s.token_ids)) for s in able if s.lease], now)
        decodes = [s for s in able if len(s.token_ids) - s.computed_tokens == 1]
        has_others = len(decodes) < len(able)
        # A cold sequence with one token left is an assisted prefill, not a decode.
        has_cold = self._memory.awaited_transfers and any(s.is_cold for s in able)
        if all_grown and not has_cold and len(decodes) <= builder.budget_tokens:
            builder.add_decodes(decodes)
        else:
            self._add_running([s for s in able if s.remaining_tokens <= 1], builder, now, all_grown=all_grown)
        self._defer_decodes(builder)
        if has_others:
            prefills = [s for s in able if s.remaining_tokens > 1]
            self._add_running(prefills, builder, now, all_grown=all_grown)

    def _add_running(self, sequences: list[Sequence], builder: PlanBuilder, now: float, *, all_grown: bool) -> None:
        for sequence in sequences:
            # An earlier iteration may have preempted the sequence
            can_run = sequence.lease is not None and builder.budget_tokens
            if can_run and (all_grown or self._grow_or_preempt(sequence, builder, now)):
                builder.add(sequence)

    def _defer_decodes(self, builder: PlanBuilder) -> None:
        if self._preset.prefill_apart is PrefillApart.ALWAYS:
            builder.defer_decodes()

    def _grow_or_preempt(self, sequence: Sequence, builder: PlanBuilder, now: float) -> bool:
        """Lease the block for a sequence's next token. If necessary, preempt the last running sequences for it."""
        assert sequence.lease is not None
        while not self._memory.try_grow([(sequence.lease, len(sequence.token_ids))], now):
            if self._memory.blocks_are_being_freed or (len(self._running) == 1 and self._memory.transfers_in_flight):
                return False  # the sequence runs again when a transfer has ended
            # Sequences that the batching mode has not chosen are preempted first. The last sequence may be this
            # sequence. A sequence that runs alone can lack blocks only if its blocks duplicate blocks in the tree,
            # because two sequences computed them at the same time. After its readmission, it shares the blocks in the
            # tree.
            last = self.selector.last_not_allowed(self._running) or self._running[-1]
            builder.remove(last)
            builder.preempted = True
            self._suspend(last, now)
            if last is sequence:
                return False
        return True

    @property
    def _decodes_until_admission(self) -> int:
        """Return the number of decode steps until requests may be admitted again."""
        return max(0, self._preset.decodes_between_prefills - self._decode_steps)

    def _admit(self, builder: PlanBuilder, now: float) -> None:
        """Admit waiting requests to the step, unless running sequences lack blocks or must decode first.

        If no sequence can run, even after the transfers in flight, preempt sequences that the batching mode has not
        chosen.
        """
        if builder.preempted or (self._running and self._decodes_until_admission):
            return
        self._admit_waiting(builder, now)
        while not (builder.tokens or builder.assisted or self._memory.transfers_will_unblock):
            victim = self.selector.last_not_allowed(self._running)
            if victim is None:
                return
            self._suspend(victim, now)
            builder.adapters_without_slot.clear()
            self.selector.count_untried()
            self._admit_waiting(builder, now)

    def _admit_waiting(self, builder: PlanBuilder, now: float) -> None:
        """Try the admission policy's candidates until none is left or the step is full."""
        if not (builder.budget_tokens and self.selector.can_admit_more(self._running)):
            self.queue.skip(now)
            return
        policy = self.queue.admit(now)
        candidate = next(policy, None)
        while candidate is not None and builder.budget_tokens and self.selector.can_admit_more(self._running):
            sequence = self._sequences[candidate.request.request_id]
            refused = self._try_admit(sequence, builder, now)
            if refused is None:
                self._outputs.events += self._savings.order(sequence, candidate.saved_s, now)
            else:
                sequence.refused = refused
            try:
                candidate = policy.send(refused)
            except StopIteration:
                break
        policy.close()

    def _try_admit(self, sequence: Sequence, builder: PlanBuilder, now: float) -> WaitReason | None:
        """Lease blocks for a waiting request and add it to the step.

        Return None if the request is admitted, otherwise the reason why it must wait. To free blocks, running sequences
        that the batching mode has not chosen are preempted.
        """
        request = sequence.request
        if not self.selector.allows(sequence.request_id):
            return WaitReason.SLOT
        self.selector.note_tried()
        if builder.lacks_slot(request.digest):
            return WaitReason.SLOT
        admit = partial(
            self._memory.try_admit,
            request.adapter,
            sequence.keys,
            salt=request.kv_salt,
            start=request.adapter_start,
            load_order=self._load_order,
        )
        lease = admit(len(sequence.token_ids), now)
        while lease in (WaitReason.KV_BLOCKS, WaitReason.ADAPTER_BLOCKS) and not self._memory.blocks_are_being_freed:
            victim = self.selector.last_not_allowed(self._running)
            if victim is None:
                break
            self._suspend(victim, now)
            lease = admit(len(sequence.token_ids), now)
        if isinstance(lease, WaitReason):
            return builder.note_refusal(request.digest, lease)
        self._start_running(sequence, lease, now)
        if sequence.can_run:
            builder.add(sequence)
        return None

    def _start_running(self, sequence: Sequence, lease: SequenceLease, now: float) -> None:
        """Add an admitted sequence to the running sequences."""
        cached = lease.cached_blocks * self._memory.block_size
        sequence.lease = lease
        sequence.computed_tokens = cached
        insort(self._running, sequence, key=lambda running: self.queue.precedence(running.request))
        self.prefix_queries_tokens += len(sequence.token_ids)
        self.prefix_hits_tokens += cached
        waits_for_adapter = bool(lease.adapter_transfers) and not sequence.is_cold
        waits_for_kv = bool(lease.kv_transfers)
        waited_for = "" if sequence.refused is None else WAITS_FOR[sequence.refused]
        self._outputs.events.append(
            Admitted(sequence.request_id, now, cached, waits_for_adapter, waits_for_kv, waited_for)
        )
        self._outputs.events += self._savings.admitted(sequence, lease, now)
        self._outputs.events += self._savings.switched(sequence, self._memory.guards.take_switches(), now)
        sequence.admitted_s = now
        if lease.adapter_transfers and not lease.kv_transfers:
            sequence.cold_start = ColdStart.ASSIST if lease.assisted else ColdStart.WAIT
            sequence.cold_tokens = len(sequence.token_ids) - cached

    def _arrange(self, builder: PlanBuilder, now: float) -> None:
        """Divide the sequences between this step and the next one, and draft tokens."""
        builder.run_deferred_decodes()
        if self._preset.prefill_apart is PrefillApart.WHEN_FASTER and not builder.preempted:
            self.selector.separate_prefills(builder)
        self._memory.note_batch(len(self._running), now)
        self._memory.swapper.after_admission(now)
        self.held_until_s = math.inf
        if self._memory.awaited_transfers and (self._preset.cold_start is ColdStart.BLOCK or self._holds(builder, now)):
            builder.tokens.clear()
        self.selector.place_assisted_prefills(builder)
        self.selector.switch_merged(builder)
        builder.drafts = self._draft(builder, now)

    def _holds(self, builder: PlanBuilder, now: float) -> bool:
        """Return whether the step waits for transfers (``Preset.step_hold``).

        A step waits if the requests that need the transfers gain more time than all others lose. A step waits for at
        most half of its duration, even if more requests arrive.
        """
        step_s = self._memory.iteration_s
        if not builder.tokens or not self._preset.step_hold:
            return False
        awaiting = sum(not sequence.can_run for sequence in self._running)
        hold_s = self._memory.awaited_s()
        until_s = self._last_end_s + step_s / 2
        pays = hold_s * self._load.delay_per_lost_second() <= (step_s - hold_s) * awaiting
        if not pays or now + hold_s >= until_s:
            return False
        self.held_until_s = until_s
        return True

    def _draft(self, builder: PlanBuilder, now: float) -> Drafts:
        """Return drafted tokens to verify in the step, and lease blocks for them.

        Return none if they do not fit the step.
        """
        if not self._limits.max_draft_tokens or builder.preempted:
            return {}
        # A prefill that ends in the step also has a draft, because an adapter's answers often begin alike.
        sequences = [s for s, tokens in builder.tokens.items() if tokens == s.remaining_tokens and not s.is_cold]
        cost = self._step_times.row_cost(len(builder.tokens))
        # Drafts at most double the number of logit rows, for which the executor has memory.
        most = min(builder.budget_tokens, max(self._limits.max_num_seqs, self._limits.max_draft_tokens))
        drafts = self.drafter.draft(sequences, most, cost)
        ahead = [
            (s.lease, len(s.token_ids) + len(drafts[s.request_id]))
            for s in sequences
            if s.lease and s.request_id in drafts
        ]
        return drafts if self._memory.try_grow(ahead, now) else {}

    def _length(self, builder: PlanBuilder, now: float, until_s: float | None) -> PlanLength:
        """Return the limits of the plan's length, and lease blocks for its steps."""
        limits = self._limits
        async_scheduling = (
            limits.async_scheduling
            and limits.num_scheduler_steps > 1
            and self._preset.kernel_form.fits_graphs(self.selector.merged)
            and until_s is None
        )
        # If no request can arrive, or if an arrival ends the plan, only scheduled work limits the plan's length.
        is_uninterrupted = until_s is not None or (async_scheduling and not len(self.queue))
        repeat = 1
        if not (builder.drafts or self.drafter.pays(builder.tokens)):
            repeat = self._repeat(builder, now, async_scheduling=async_scheduling, is_uninterrupted=is_uninterrupted)
        limit_s = limits.multi_step_limit_s
        if is_uninterrupted:
            limit_s = min(math.inf if until_s is None else until_s, self._memory.swapper.due_s) - now
        if len(self.queue):
            limit_s = min(limit_s, self.queue.due_s - now)
        return PlanLength(repeat, limit_s, overlapped=async_scheduling and repeat > 1)

    def _repeat(self, builder: PlanBuilder, now: float, *, async_scheduling: bool, is_uninterrupted: bool) -> int:
        """Return the number of identical decode steps that the plan may run, and lease blocks for them.

        Waiting requests lose no time, because blocks become free only when a sequence ends, which also ends the plan.
        """
        if not is_uninterrupted and self._limits.num_scheduler_steps == 1:
            return 1
        sequences = list(builder.tokens)
        if not sequences or builder.preempted or builder.prefills():
            return 1
        if self._memory.awaited_transfers and not (is_uninterrupted or async_scheduling):
            return 1
        until_review = self.queue.tokens_until_review((s.request, s.output_tokens) for s in sequences)
        most = min(self.selector.steps_until_review, until_review, min(s.tokens_left for s in sequences))
        if len(self.queue) and self._decodes_until_admission:
            most = min(most, self._decodes_until_admission)
        few = min(most, self._limits.num_scheduler_steps)
        many = min(most, MAX_UNINTERRUPTED_STEPS) if is_uninterrupted else few
        for repeat in dict.fromkeys((int(many), int(few))):
            ahead = [(s.lease, len(s.token_ids) + repeat - 1) for s in sequences if s.lease]
            if repeat > 1 and self._memory.try_grow(ahead, now):
                return repeat
        return 1

    def _build(self, builder: PlanBuilder, length: PlanLength, now: float) -> StepPlan:
        """Return the plan, with the transfers, evictions and ended sequences since the last plan."""
        drops = tuple(self._drops)
        self._drops = []
        merged = self.selector.merged
        plan = build_plan(builder, length, self._steps, self._memory, self._preset.kernel_form, drops, merged, now)
        self._steps += not plan.is_empty
        return plan

    # --- commit --------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Apply the tokens of a step. A sequence's KV is inserted into the tree only if its adapter has arrived."""
        self._running_step = (plan, result) if result.next_runs else None
        if plan.sequences:
            self._note_step(plan, result, now)
        if plan.images:
            broken = [image.key for image in plan.images if image.request_id in result.failed]
            self._memory.images.computed((image.key for image in plan.images), broken, result.tower_s)
        computed = []
        states = []
        has_states = bool(self._memory.snapshots.blocks)
        ended = []
        failed = result.failed
        has_drafts = bool(self._limits.max_draft_tokens)
        block_size = self._memory.block_size
        for step, tokens in zip(plan.sequences, result.tokens, strict=True):
            sequence = self._sequences[step.request_id]
            lease = sequence.lease
            assert lease is not None
            if failed and step.request_id in failed:  # the sequence's KV is not committed
                error = failed[step.request_id]
                self._finish(sequence, now, FinishReason.ERROR, error=error, impossible=error != NOT_FINITE)
                continue
            finish = self._outputs.accept(sequence, tokens, now)
            if sequence.cold_start is not None and tokens:
                self._outputs.events += self._savings.cold_ended(sequence, now)
            end = step.start + step.tokens
            if has_drafts:
                # KV of rejected drafted tokens does not count as computed, because the next tokens overwrite it.
                end -= len(step.draft)
                kept = step.kept(tokens) if step.draft else 0
                self.drafter.note(sequence, len(step.draft), kept, end)
                end += kept
            # A plan of several steps may have run past a stop token. KV after the stop token does not count as
            # computed.
            end = min(end + result.steps_run - 1, len(sequence.token_ids))
            sequence.computed_tokens = end
            if has_states:
                states.append((lease, end))
            if sequence.request.pooling is not None and not sequence.remaining_tokens:
                finish = FinishReason.STOP, None
            # The tree does not contain all full blocks yet
            if end >= (len(lease.path) + 1) * block_size and lease.is_ready:
                computed.append(ComputedTokens(lease, sequence.hashed_token_ids, end))
            if finish is not None:
                ended.append((sequence, *finish))
        if waited_s := self._outputs.take_waited_s():
            self._memory.guards.waited(waited_s, now)
        self._memory.commit(computed, now)
        if has_states:
            self._memory.commit_states(states, now)
        for sequence, reason, stop_token_id in ended:
            self._finish(sequence, now, reason, stop_token_id)

    def _note_step(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Report the duration of a step to all estimators."""
        self._last_end_s = now
        step_s = (result.duration_s - result.switch_s - result.tower_s) / result.steps_run
        self._memory.note_step(step_s)
        self._load.note_busy(now, result.steps_run, result.duration_s)
        prefill = [step.tokens for step in plan.sequences if step.tokens > 1 and step.known_tokens > 1]
        drafted = sum([len(step.draft) for step in plan.sequences]) if self._limits.max_draft_tokens else 0
        self._decode_steps = 0 if prefill else self._decode_steps + result.steps_run
        if not plan.assisted:
            self._step_times.note(sum(prefill), len(plan.sequences) - len(prefill) + drafted, step_s)
        self.selector.note(plan, result, step_s)
        if plan.merged is not None:
            merged = [self._sequences[step.request_id] for step in plan.sequences]
            self._savings.note_merged(plan, merged, result, step_s)

    # --- internals -----------------------------------------------------------------------------------

    def _suspend(self, sequence: Sequence, now: float, *, restarts: bool = False) -> None:
        """Preempt a sequence: release its blocks and queue it again.

        If the sequence restarts, its KV and output are dropped.
        """
        assert sequence.lease is not None
        keys = sequence.lease.keys
        if restarts or sequence.request.pools_all_tokens:
            keys = []
            sequence.computed_tokens = 0
        self.preemptions += 1
        self._outputs.events.append(Preempted(sequence.request_id, now))
        self._enqueue(self.export_request(sequence.request_id, now), now, keys, restarts=restarts)

    def _enqueue(self, request: Request, now: float, keys: Iterable[bytes] = (), *, restarts: bool = False) -> Sequence:
        """Add a sequence for a request to the queue. ``keys`` are known keys of the sequence's first blocks."""
        longest = len(request.prompt_token_ids) + request.sampling.max_tokens
        sequence = Sequence(request, now, min(longest, self._limits.max_model_len), restarts=restarts)
        sequence.keys = self._memory.keys_of(
            request.digest, sequence.hashed_token_ids, list(keys), salt=request.kv_salt, start=request.adapter_start
        )
        self._load.add(sequence)
        if request.background and not isinstance(self.queue, BackgroundLast):
            self.queue = BackgroundLast(self.queue, self._view)  # created at the first background request
        self.queue.add(request, now)
        return sequence

    def _why_impossible(self, request: Request) -> str | None:
        """Return the reason why a request can never run; None if it can run."""
        known = len(request.prompt_token_ids) + len(request.output_token_ids)
        if not request.prompt_token_ids:
            return "the prompt has no tokens"
        if known >= self._limits.max_model_len:
            return f"{known} tokens leave no space for output in a context of {self._limits.max_model_len}"
        if (reason := why_too_large(request, self._limits)) is not None:
            return reason
        longest = min(len(request.prompt_token_ids) + request.sampling.max_tokens, self._limits.max_model_len)
        return self._memory.why_impossible(request.adapter, longest)

    def _finish(
        self,
        sequence: Sequence,
        now: float,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: str | None = None,
        *,
        impossible: bool = False,
    ) -> None:
        """End a request, and append the events of its end."""
        self._remove(sequence, now)
        self._outputs.events += self._savings.merged(sequence, now)
        self._outputs.events.append(Finished(sequence.request_id, now, reason, stop_token_id, error, impossible))

    def _remove(self, sequence: Sequence, now: float, *, will_resume: bool = False, keep_kv: bool = False) -> None:
        """Remove a sequence from the queue or the running list, and release its blocks."""
        del self._sequences[sequence.request_id]
        self.drafter.ended(sequence, will_resume=will_resume)
        if sequence.lease is None:
            self.queue.remove(sequence.request, now)
            return
        if not will_resume:
            self.queue.answered(sequence.request, sequence.output_tokens, now)
        self.queue.ended(sequence.request, now, will_resume=will_resume)
        if will_resume:
            computed = sequence.computed_tokens if sequence.is_ready else 0
            keep_kv = keep_kv or KEEP_KV_RULES[self._preset.preempted_kv](self._memory, self._step_times, computed)
            self._memory.suspend(sequence.lease, sequence.hashed_token_ids, computed, now, keep_kv=keep_kv)
        else:
            self._memory.release(sequence.lease, now)
        sequence.lease = None
        self._running.remove(sequence)
        if sequence.started:
            self._drops.append(sequence.request_id)
