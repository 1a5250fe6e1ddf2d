"""What becomes of the KV of a sequence that must give its blocks back and will go on later."""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.assist_costs import AssistCosts
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
from lorikeet.core.messages import TokenOutput
from lorikeet.core.plan import StepPlan, StepResult, Tier, TransferDone
from lorikeet.core.request import Request
from lorikeet.memory.blocks import SequenceLease, WaitReason
from lorikeet.memory.memory import ComputedTokens, Memory
from lorikeet.memory.tree import NodeKind, NodeTransfer
from lorikeet.presets import ColdStart, PreemptedKv, Preset
from lorikeet.scheduling.admission import AdmissionPolicy, RunningRequest
from lorikeet.scheduling.batching.mode import BatchingPolicy, Unmerged
from lorikeet.scheduling.plan_builder import BatchSelector, PlanBuilder, build_plan, continue_plan
from lorikeet.scheduling.state import OutputCollector, SchedulerLimits, SchedulerStats, Sequence
from lorikeet.scheduling.step_times import StepTimeEstimator

KeepKvRule = Callable[[Memory, StepTimeEstimator, int], bool]
"""Whether it is kept, by what it would cost: of so many computed tokens."""


def _swap_is_cheaper(memory: Memory, step_times: StepTimeEstimator, tokens: int) -> bool:
    """Keep what the link moves out and in again sooner than steps of its size compute it anew."""
    blocks, tiers = memory.blocks_for(tokens), memory.tiers
    swap_s = tiers.copy_s(Tier.DEVICE, Tier.HOST, blocks) + tiers.copy_s(Tier.HOST, Tier.DEVICE, blocks)
    return swap_s <= step_times.step_s(tokens, 0)


KEEPS_KV: Mapping[PreemptedKv, KeepKvRule] = {
    PreemptedKv.KEPT: lambda memory, step_times, tokens: True,
    PreemptedKv.DROPPED: lambda memory, step_times, tokens: False,
    PreemptedKv.CHEAPER: _swap_is_cheaper,
}


class SchedulerView:
    """See ``admission.EngineView``.

    Args:
        memory: of the engine.
        max_model_len: longest sequence.
        running: the scheduler's list of them.
        selection: who may run.
        step_times: of the steps.
    """

    def __init__(
        self,
        memory: Memory,
        max_model_len: int,
        running: Many[Sequence],
        selection: BatchSelector,
        step_times: StepTimeEstimator,
    ) -> None:
        self._memory = memory
        self.max_model_len = max_model_len
        self._running = running
        self._selection = selection
        self.step_times = step_times

    @property
    def total_tokens(self) -> int:
        """Room of the whole pool."""
        return self._memory.total_blocks * self._memory.block_size

    def free_tokens(self) -> int:
        """Return the room that could be lent for KV now, if all left that may leave."""
        return self._memory.evictor.available(NodeKind.KV) * self._memory.block_size

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        """Return the room that an adapter takes; 0 for the base model."""
        return 0 if adapter is None else self._memory.adapters.device_blocks(adapter) * self._memory.block_size

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        """Whether it is on the device or on its way there. The base model is."""
        tree, node = self._memory.tree, self._memory.tree.adapter(None if adapter is None else adapter.digest)
        return node is not None and bool(tree.on_device[node] or tree.moving[node] == NodeTransfer.IN)

    def may_run(self, request: Request) -> bool:
        """Whether the batching mode lets a request run now that waits."""
        return self._selection.allows(request.request_id)

    def running(self) -> list[RunningRequest]:
        """Return the admitted requests, in the order in which they would keep their room."""
        block_size = self._memory.block_size
        return [
            RunningRequest(s.request, s.output_tokens, len(s.lease.blocks) * block_size)
            for s in self._running
            if s.lease
        ]


UNDISTURBED_STEPS = 32
"""Most identical decode steps in one plan where nothing can come meanwhile, or what comes ends it."""


class Scheduler:
    """Requests in, plans out.

    Args:
        memory: is asked for blocks; the scheduler never touches the pool itself.
        admission: makes the queue of the waiting requests.
        limits: bounds of a plan.
        preset: the system it belongs to.
        batching: makes the batching mode.
        assist: what prefills cost that the host assists; None if it cannot.

    Attributes:
        queue: the waiting requests.
        selection: who may run.
    """

    def __init__(
        self,
        memory: Memory,
        admission: AdmissionPolicy,
        limits: SchedulerLimits,
        preset: Preset,
        batching: BatchingPolicy = Unmerged,
        assist: AssistCosts | None = None,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._preset = preset
        self._sequences: dict[RequestId, Sequence] = {}
        self._running: list[Sequence] = []
        self._step_times = StepTimeEstimator()
        self.selection = BatchSelector(
            batching, limits, preset.kernel_form, memory, self._sequences, self._step_times, assist
        )
        view = SchedulerView(memory, limits.max_model_len, self._running, self.selection, self._step_times)
        self.queue = admission(view)
        self._drops: list[RequestId] = []
        self._steps = 0
        self._under_way: tuple[StepPlan, StepResult] | None = None
        self._outputs = OutputCollector()
        self.preemptions = self.prefix_queries_tokens = self.prefix_hits_tokens = 0

    # --- requests ------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a new or a resumed request; one that can never run ends at once with an error."""
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
        sequence = self._enqueue(request, now)
        # Not for those that give way: they are queued again, and have arrived before.
        self._memory.arrive(request.adapter, sequence.keys, len(sequence.token_ids), now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """End a request; its blocks are free at once. Unknown ids are ignored: it may just have finished."""
        if request_id in self._sequences:
            self._finish(self._sequences[request_id], now, FinishReason.ABORT)

    def export_request(self, request_id: RequestId, now: float, *, keep_kv: bool = False) -> Request:
        """Take a request out as plain data that :meth:`submit` resumes, here or in another engine.

        With ``keep_kv`` its KV stays, whatever the preset does with that of preempted sequences.

        Raises:
            KeyError: there is no such request.
        """
        sequence = self._sequences[request_id]
        request = sequence.export()
        self._leave(sequence, now, goes_on=True, keep_kv=keep_kv)
        return request

    def live_adapters(self) -> tuple[set[AdapterDigest], set[AdapterDigest]]:
        """Return the versions of the running and of the waiting requests."""
        running = {s.digest for s in self._running}
        waiting = {s.digest for s in self._sequences.values() if s.lease is None}
        return {d for d in running if d is not None}, {d for d in waiting if d is not None}

    @property
    def has_requests(self) -> bool:
        """Whether there is any request."""
        return bool(self._sequences)

    def gauges(self) -> SchedulerStats:
        """Return how many requests are in which state."""
        return SchedulerStats.of(self._running, len(self._sequences))

    def take_outputs(self) -> tuple[tuple[TokenOutput, ...], tuple[RequestEvent, ...]]:
        """Return tokens and events since the last call."""
        return self._outputs.take()

    def finish_transfer(self, done: TransferDone, now: float) -> None:
        """Take the end of a transfer in.

        If it failed, requests that waited for their adapter end with its error, but those that came after it had begun
        are queued again: the files may have been replaced since. So are those that waited for KV, to compute it.
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
        """Decide on the next step. Blocks are leased and loads are begun with it.

        Args:
            now: the time.
            until_s: on a virtual clock, until when nothing new arrives; see ``Engine.step``.
        """
        draft = PlanBuilder(self._limits.max_num_batched_tokens)
        for request in self.queue.review(now):
            self._suspend(self._sequences[request.request_id], now)
        self.selection.choose(self.queue.urgency)
        self._memory.note_waiting(len(self.queue), self.queue.wanted, now)
        self._continue_running(draft, now)
        if not draft.preempted:
            self._admit_waiting(draft, now)
            self._admit_instead(draft, now)
        self._memory.note_batch(len(self._running), now)
        self._memory.swapper.after_admission(now)
        if self._preset.cold_start is ColdStart.BLOCK and self._memory.awaited_transfers:
            draft.tokens.clear()  # everybody waits
        self.selection.place_cold(draft)
        limits, merged, form = self._limits, self.selection.merged_for(draft), self._preset.kernel_form
        async_scheduling = (
            limits.async_scheduling and limits.num_scheduler_steps > 1 and form.fits_graphs(merged) and until_s is None
        )
        # Where nothing can come, or what comes ends the repeat, only what there is to do without it is a limit.
        is_undisturbed = until_s is not None or (async_scheduling and not len(self.queue))
        repeat = self._repeat(draft, now, async_scheduling=async_scheduling, is_undisturbed=is_undisturbed)
        due_s = min(math.inf if until_s is None else until_s, self._memory.swapper.due_s)
        limit_s = due_s - now if is_undisturbed else limits.multi_step_limit_s
        limit_s = min(limit_s, self.queue.due_s - now if len(self.queue) else math.inf)
        drops, self._drops = tuple(self._drops), []
        plan = build_plan(
            draft, self._steps, self._memory, form, drops, merged, repeat, limit_s, async_scheduling and repeat > 1
        )
        self._steps += not plan.is_empty
        return plan

    def continue_plan(self, *, further: bool) -> StepPlan | None:
        """Return the plan of the step that runs already, the one to be made next; None if no step does.

        Args:
            further: whether steps may follow it by the same plan.
        """
        if self._under_way is None:
            return None
        plan = continue_plan(*self._under_way, self._steps, self._sequences, further=further)
        self._under_way = None
        self._steps += plan is not None
        return plan

    def _continue_running(self, draft: PlanBuilder, now: float) -> None:
        able = [s for s in self.selection.allowed(self._running) if s.can_run]
        have_room = self._memory.try_grow([(s.lease, len(s.token_ids)) for s in able if s.lease], now)
        for sequence in sorted(able, key=lambda s: s.remaining_tokens > 1):
            can_go_on = sequence.lease is not None and draft.budget_tokens  # some are preempted for those before them
            if can_go_on and (have_room or self._make_room(sequence, draft, now)):
                draft.give(sequence)

    def _make_room(self, sequence: Sequence, draft: PlanBuilder, now: float) -> bool:
        """Lease the block that the next token needs, at the expense of whoever has the least precedence if need be."""
        assert sequence.lease is not None
        while not self._memory.try_grow([(sequence.lease, len(sequence.token_ids))], now):
            if self._memory.room_is_coming or (len(self._running) == 1 and self._memory.transfers_under_way):
                return False  # left out until a transfer has ended
            # Those who may not run now go first. The last may be the sequence itself: alone, it can only lack room
            # because it holds copies of blocks that the tree has too (two sequences computed them at once);
            # readmitted, it shares them.
            last = self.selection.last_displaced(self._running) or self._running[-1]
            draft.take_back(last)
            draft.preempted = True
            self._suspend(last, now)
            if last is sequence:
                return False
        return True

    def _suspend(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's blocks, and queue it again."""
        assert sequence.lease is not None
        keys = sequence.lease.keys
        self.preemptions += 1
        self._outputs.events.append(Preempted(sequence.request_id, now))
        self._enqueue(self.export_request(sequence.request_id, now), now, keys)

    def _enqueue(self, request: Request, now: float, keys: Iterable[bytes] = ()) -> Sequence:
        longest = len(request.prompt_token_ids) + request.sampling.max_tokens
        sequence = Sequence(request, now, min(longest, self._limits.max_model_len))
        sequence.keys = self._memory.keys_of(request.digest, sequence.token_ids, list(keys))
        self._sequences[request.request_id] = sequence
        self.queue.add(request, now)
        return sequence

    def _admit_waiting(self, draft: PlanBuilder, now: float) -> None:
        """Try whom the policy names, until it names nobody or the step is full."""
        policy = self.queue.admit(now)
        request = next(policy, None)
        while request is not None and draft.budget_tokens and self.selection.goes_on(self._running):
            try:
                request = policy.send(self._try_admit(self._sequences[request.request_id], draft, now))
            except StopIteration:
                return
        policy.close()

    def _admit_instead(self, draft: PlanBuilder, now: float) -> None:
        """If nobody can run, and nothing is on its way that would let somebody, let those give way who may not run."""
        while not (draft.tokens or draft.cold or self._memory.relief_is_coming):
            displaced = self.selection.last_displaced(self._running)
            if displaced is None:
                return
            self._suspend(displaced, now)
            draft.without_slot.clear()
            self.selection.count_untried()
            self._admit_waiting(draft, now)

    def _try_admit(self, sequence: Sequence, draft: PlanBuilder, now: float) -> WaitReason | None:
        request = sequence.request
        if not self.selection.allows(sequence.request_id):
            return WaitReason.SLOT
        self.selection.tried()
        if draft.lacks_slot(request.digest, self._running, self._preset.max_step_adapters):
            return WaitReason.SLOT
        lease = self._memory.try_admit(request.adapter, sequence.keys, len(sequence.token_ids), now)
        while lease in (WaitReason.ROOM, WaitReason.ADAPTER_ROOM) and not self._memory.room_is_coming:
            displaced = self.selection.last_displaced(self._running)
            if displaced is None:
                break
            self._suspend(displaced, now)
            lease = self._memory.try_admit(request.adapter, sequence.keys, len(sequence.token_ids), now)
        if isinstance(lease, WaitReason):
            return draft.refused(request.digest, lease)
        if len(self._running) >= self._limits.max_num_seqs:
            displaced = self.selection.last_displaced(self._running)
            assert displaced is not None, "there was a slot"
            self._suspend(displaced, now)
        sequence.lease = lease
        sequence.computed_tokens = cached = lease.cached_blocks * self._memory.block_size
        insort(self._running, sequence, key=lambda running: self.queue.precedence(running.request))
        self.prefix_queries_tokens += len(sequence.token_ids)
        self.prefix_hits_tokens += cached
        waits = bool(lease.adapter_transfers) and not sequence.is_cold, bool(lease.kv_transfers)
        self._outputs.events.append(Admitted(request.request_id, now, cached, *waits))
        if sequence.can_run:
            draft.give(sequence)
        return None

    def _repeat(self, draft: PlanBuilder, now: float, *, async_scheduling: bool, is_undisturbed: bool) -> int:
        """Return for how many identical decode steps the plan can hold, with their blocks leased, if there are so many.

        Whoever waits may go on waiting: room comes only from a sequence that ends, which ends the repeat.
        """
        sequences = list(draft.tokens)
        if not sequences or draft.preempted or not all(s.is_decoding for s in reversed(sequences)):  # prefills are last
            return 1
        if self._memory.awaited_transfers and not (is_undisturbed or async_scheduling):
            return 1
        until_review = self.queue.tokens_until_review((s.request, s.output_tokens) for s in sequences)
        steps = min(self.selection.steps_until_review, until_review, min(s.tokens_left for s in sequences))
        few = min(steps, self._limits.num_scheduler_steps)
        for repeat in dict.fromkeys((min(steps, UNDISTURBED_STEPS), few) if is_undisturbed else (few,)):
            ahead = [(s.lease, len(s.token_ids) + int(repeat) - 1) for s in sequences if s.lease]
            if repeat > 1 and self._memory.try_grow(ahead, now):
                return int(repeat)
        return 1

    # --- commit --------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take the tokens of a step in. KV is not found by others before its adapter is there."""
        self._under_way = (plan, result) if result.next_runs else None
        if plan.sequences:
            step_s = (result.duration_s - result.switch_s) / result.steps_run
            self._memory.note_step(step_s)
            prefill = [step.tokens for step in plan.sequences if step.tokens > 1]
            if not plan.assisted:
                self._step_times.note(sum(prefill), len(plan.sequences) - len(prefill), step_s)
            self.selection.note(plan, result, step_s)
        computed, ended = [], []
        for step, tokens in zip(plan.sequences, result.tokens, strict=True):
            sequence = self._sequences[step.request_id]
            assert sequence.lease is not None
            if step.request_id in result.failed:  # nor is its KV worth keeping
                self._finish(sequence, now, FinishReason.ERROR, error="the model's output is not finite")
                continue
            finish = self._outputs.accept(sequence, tokens, now)
            # A repeat may have run past a stop token: what lies beyond it belongs to no token of ours.
            run_tokens = step.start + step.tokens + result.steps_run - 1
            sequence.computed_tokens = min(run_tokens, len(sequence.token_ids))
            if self._memory.is_behind(sequence.lease, sequence.computed_tokens) and sequence.lease.is_ready:
                computed.append(ComputedTokens(sequence.lease, sequence.token_ids, sequence.computed_tokens))
            if finish is not None:
                ended.append((sequence, *finish))
        self._memory.commit(computed, now)
        for sequence, reason, stop_token_id in ended:
            self._finish(sequence, now, reason, stop_token_id)

    # --- the inside ----------------------------------------------------------------------------------

    def _why_impossible(self, request: Request) -> str | None:
        known, left = len(request.prompt_token_ids) + len(request.output_token_ids), request.sampling.max_tokens
        if not request.prompt_token_ids:
            return "the prompt has no tokens"
        if known >= self._limits.max_model_len:
            return f"{known} tokens leave no room in a context of {self._limits.max_model_len}"
        longest = min(len(request.prompt_token_ids) + left, self._limits.max_model_len)
        return self._memory.why_impossible(request.adapter, longest)

    def _finish(
        self,
        sequence: Sequence,
        now: float,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        self._leave(sequence, now)
        self._outputs.events.append(Finished(sequence.request_id, now, reason, stop_token_id, error))

    def _leave(self, sequence: Sequence, now: float, *, goes_on: bool = False, keep_kv: bool = False) -> None:
        """Take a sequence out of everything."""
        del self._sequences[sequence.request_id]
        if sequence.lease is None:
            self.queue.remove(sequence.request, now)
            return
        self.queue.ended(sequence.request, now, goes_on=goes_on)
        if goes_on:
            computed = sequence.computed_tokens if sequence.is_ready else 0
            keep_kv = keep_kv or KEEPS_KV[self._preset.preempted_kv](self._memory, self._step_times, computed)
            self._memory.suspend(sequence.lease, sequence.token_ids, computed, now, keep_kv=keep_kv)
        else:
            self._memory.release(sequence.lease, now)
        sequence.lease = None
        self._running.remove(sequence)
        if sequence.started:
            self._drops.append(sequence.request_id)
