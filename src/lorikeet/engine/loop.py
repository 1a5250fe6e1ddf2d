"""The engine loop of one replica: plan a step, execute it, commit the result."""

import math
from bisect import bisect_left
from collections.abc import Callable

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import Clock
from lorikeet.core.executor import Executor
from lorikeet.core.guard import Switch
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.image_keys import hashed_token_ids
from lorikeet.core.messages import (
    STEP_TOKENS_BOUNDS,
    Abort,
    DropAdapter,
    EngineStats,
    ExportedKv,
    ExportRequest,
    ImportKv,
    MemoryStats,
    PinAdapters,
    RegisterAdapters,
    StepOutputs,
    Submit,
)
from lorikeet.core.plan import Pooled, PromptLogprobs, StepPlan, StepResult
from lorikeet.core.request import Request
from lorikeet.engine.recording import (
    EventsSent,
    Message,
    NoRecorder,
    Planned,
    PlanRan,
    Received,
    Recorder,
    RequestExported,
    Transferred,
)
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.memory import Memory
from lorikeet.memory.tree import BASE, NodeKind
from lorikeet.presets import ColdStart
from lorikeet.scheduling.admission import AdmissionQueue
from lorikeet.scheduling.scheduler import Scheduler

_NOTHING = StepPlan(step=-1)
"""An empty plan, for turns in which nothing is scheduled."""


class Engine:
    """The loop of one replica.

    All executors and clocks use the same class.

    Args:
        scheduler: the scheduler, which owns the requests.
        memory: the memory, which owns the blocks, the tree and the tiers.
        executor: the executor of plans.
        clock: a real or virtual clock.
        cold_start: how requests wait for transfers. With ``BLOCK`` no step runs while a request waits for a transfer.
        on_ran: function called with every plan that has run, and the plan's result.
        recorder: the recorder of everything that plans depend on, for replay.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Memory,
        executor: Executor,
        clock: Clock,
        cold_start: ColdStart = ColdStart.WAIT,
        on_ran: Callable[[StepPlan, StepResult], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._executor = executor
        self._clock = clock
        self._cold_start = cold_start
        self._on_ran = on_ran
        self._recorder: Recorder = recorder or NoRecorder()
        self._exports = PendingExports(memory, executor)
        self._dropped: set[AdapterDigest] = set()
        self._must_replan = False
        self._last_plan = _NOTHING
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._pooled: list[Pooled] = []
        self._steps = self._computed_tokens = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKENS_BOUNDS) + 1)

    def submit(self, request: Request) -> None:
        """Queue a new or a resumed request."""
        # Behind waiting requests, the request is rarely admitted before a running request ends, which ends the plan
        # anyway.
        now = self._receive(Submit(request), must_replan=self._scheduler.may_be_next(request))
        self._scheduler.submit(request, now)

    def abort(self, request_id: RequestId) -> None:
        """End a request. Unknown ids are ignored."""
        now = self._receive(Abort(request_id))
        self._scheduler.abort(request_id, now)

    def export_request(self, request_id: RequestId) -> Request:
        """Remove a request and return it as plain data. :meth:`submit` of any engine can resume it."""
        now = self._receive(RequestExported(request_id))
        return self._scheduler.export_request(request_id, now)

    def export_all(self) -> list[Request]:
        """Remove all requests and return them as plain data; see :meth:`export_request`."""
        return [self.export_request(request_id) for request_id in self._scheduler.request_ids]

    def export_with_kv(self, request_id: RequestId) -> Request | None:
        """Remove a request and export its KV, so that another engine can resume it.

        Return None for an unknown request.

        The KV is copied to the host tier while the engine keeps running. A later ``StepOutputs.exported_kv`` has the KV
        for :meth:`import_kv` of another engine with the same settings.
        """
        now = self._receive(ExportRequest(request_id))
        try:
            request = self._scheduler.export_request(request_id, now, keep_kv=True)
        except KeyError:  # The request may have just finished.
            return None
        self._exports.begin(request, now)
        return request

    def import_kv(self, message: ImportKv) -> None:
        """Store KV that another engine has computed, if the host tier has room."""
        now = self._receive(msgspec.structs.replace(message, blocks=()))
        adapter = BASE if message.adapter is None else self._memory.register(message.adapter)
        places = self._memory.kv_migration.import_kv(adapter, message.keys, now)
        if message.blocks:  # A replay has no bytes.
            contents = [message.blocks[index] for index, _ in places]
            self._executor.write_host([block for _, block in places], contents)

    def pin_adapters(self, digests: tuple[AdapterDigest, ...]) -> None:
        """Mark exactly these versions as pinned, so that they are evicted last."""
        now = self._receive(PinAdapters(digests))
        self._memory.pin_adapters(digests, now)

    def register_adapters(self, refs: tuple[AdapterRef, ...]) -> None:
        """Register versions for which requests may arrive, so that the versions can be read ahead and prefetched."""
        self._receive(RegisterAdapters(refs))
        for ref in refs:
            self._memory.register(ref)

    def drop_adapter(self, digest: AdapterDigest) -> None:
        """Free a version once no request uses it. ``AdapterEvicted`` reports the eviction.

        Requests for the version that still arrive are served first, since they were accepted before the drop.
        """
        self._receive(DropAdapter(digest))
        self._dropped.add(digest)

    def step(self, until_s: float | None = None) -> StepOutputs:
        """Run one turn of the loop: plan, execute, commit.

        Returns all outputs since the last turn.

        An empty plan is not executed.

        Args:
            until_s: arrival time of the next request, for a virtual clock (``inf``: no request will arrive). If given,
                this turn runs all steps that would be planned alike until that time or the next event.

        Raises:
            ExecutorError: the step failed. The engine cannot continue.
        """
        now = self._apply_transfers()
        plan, exported_kv = self._plan(now, until_s)
        if not plan.is_empty:
            result = self._executor.execute(plan)
            self._commit(plan, result)
        self._last_plan = plan
        return self._outputs(exported_kv)

    def _apply_transfers(self) -> float:
        """Apply the transfers that have finished, and return the time."""
        transfers = self._executor.completed_transfers()
        now = self._clock.now()
        if transfers:
            self._must_replan = True
            self._recorder.note(Transferred(now, tuple(transfers)))
        for done in transfers:
            self._scheduler.finish_transfer(done, now)
        return now

    def _plan(self, now: float, until_s: float | None) -> tuple[StepPlan, tuple[ExportedKv, ...]]:
        """Return the next plan, and the KV of finished exports.

        With async scheduling the device may already run the next decode step of the last plan. The plan then continues
        with that step, and the scheduler runs again only after a change or at the end of the plan.
        """
        exported_kv: tuple[ExportedKv, ...] = ()
        plan = _NOTHING if self._is_blocked else self._scheduler.continue_plan(further=not self._must_replan)
        if plan is None:
            exported_kv = self._exports.take(now)
            self._free_dropped(now)
            self._memory.swapper.tick(now)
            plan = self._scheduler.plan(now, until_s)
            self._must_replan = False
        self._recorder.note(Planned(now, until_s, plan))
        return plan, exported_kv

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        now = self._clock.now()
        self._recorder.note(PlanRan(now, result))
        self._scheduler.commit(plan, result, now)
        self._prompt_logprobs += result.prompt_logprobs
        self._pooled += result.pooled
        if plan.sequences:
            tokens = sum([step.tokens for step in plan.sequences])
            self._steps += result.steps_run
            self._computed_tokens += tokens * result.steps_run
            self._steps_by_tokens[bisect_left(STEP_TOKENS_BOUNDS, tokens)] += result.steps_run
        if self._on_ran is not None:
            self._on_ran(plan, result)

    def _outputs(self, exported_kv: tuple[ExportedKv, ...]) -> StepOutputs:
        tokens, events = self._scheduler.take_outputs()
        adapter_events = self._memory.take_events()
        if events or adapter_events:
            self._recorder.note(EventsSent(events, adapter_events))
        prompt_logprobs = tuple(self._prompt_logprobs)
        self._prompt_logprobs = []
        pooled = tuple(self._pooled)
        self._pooled = []
        return StepOutputs(
            tokens, events, adapter_events, exported_kv=exported_kv, prompt_logprobs=prompt_logprobs, pooled=pooled
        )

    @property
    def is_busy(self) -> bool:
        """Whether the last turn ran a step. If not, only a message, a finished transfer or a tick can start one."""
        return not self._last_plan.is_empty

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return self._scheduler.has_requests

    @property
    def has_chores(self) -> bool:
        """Whether there is work without requests: transfers in flight, or ticks that move blocks."""
        return self.has_transfers or self.host_fill_pending or self.due_s < math.inf

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is in flight."""
        return bool(self._memory.transfers_in_flight)

    @property
    def due_s(self) -> float:
        """Time of the next tick or prefetch, on the engine's clock, until which an idle loop may rest, if any."""
        return math.inf if self._is_blocked else min(self._memory.swapper.idle_until_s, self._scheduler.held_until_s)

    @property
    def host_fill_pending(self) -> bool:
        """Whether known adapters are still being read into the host tier."""
        return self._memory.swapper.has_host_reads(self._clock.now())

    @property
    def queue(self) -> AdmissionQueue:
        """The waiting requests, for callers in the same process, such as tests and the simulator."""
        return self._scheduler.queue

    def wait_for_transfer(self, timeout_s: float | None = None) -> None:
        """Block until a transfer has ended, for at most ``timeout_s`` seconds. For drivers in the same process."""
        self._executor.wait_for_transfer(timeout_s)

    def close(self) -> None:
        """Close the executor and the recording."""
        self._executor.close()
        self._recorder.close()

    def stats(self) -> EngineStats:
        """Return the gauges after the last step."""
        counts = self._memory.counts()
        running, waiting = self._scheduler.live_adapters()
        gauges = self._scheduler.stats()
        return EngineStats(
            at_s=self._clock.now(),
            steps=self._steps,
            running=gauges.running,
            waiting=gauges.waiting,
            waiting_for_adapter=gauges.waiting_for_adapter,
            waiting_for_kv=gauges.waiting_for_kv,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            kv_blocks=counts.kv,
            adapter_blocks=counts.adapter,
            inflight_blocks=counts.inflight,
            total_blocks=self._memory.total_blocks,
            kv_limit_blocks=self._memory.evictor.limit(NodeKind.KV),
            resident_adapters=self._memory.resident(),
            running_adapters=tuple(sorted(running)),
            waiting_adapters=tuple(sorted(waiting)),
            prefix_queries_tokens=self._scheduler.prefix_queries_tokens,
            prefix_hits_tokens=self._scheduler.prefix_hits_tokens,
            preemptions=self._scheduler.preemptions,
            steps_by_tokens=tuple(self._steps_by_tokens),
            computed_tokens=self._computed_tokens,
            memory=self._memory.stats(),
            ahead_of_adapter=gauges.ahead_of_adapter,
            modes=self._scheduler.selector.stats(),
            queue=self._scheduler.queue.stats(),
            assist=self._executor.assist_counters(),
            costs=self._scheduler.selector.meter.costs(),
            hosted_adapters=self._memory.hosted(),
            queued=self._scheduler.queued(),
            drafted_tokens=self._scheduler.drafter.drafted_tokens,
            kept_tokens=self._scheduler.drafter.kept_tokens,
            guards=self._memory.guards.stats(),
            images=self._memory.images.stats(),
        )

    def take_switches(self) -> list[Switch]:
        """Return the switches of guarded parts since the last call, for the log."""
        return self._memory.guards.take_logged()

    def memory_stats(self) -> MemoryStats:
        """Return the counters and gauges of the memory."""
        return self._memory.stats()

    def _receive(self, message: Message, *, must_replan: bool = True) -> float:
        """Record a message, note whether it ends a plan that continues, and return the time."""
        now = self._clock.now()
        self._must_replan = self._must_replan or must_replan
        self._recorder.note(Received(now, message))
        return now

    @property
    def _is_blocked(self) -> bool:
        """Return whether no step may run because a request waits for a transfer (cold start ``BLOCK``)."""
        return self._cold_start is ColdStart.BLOCK and bool(self._memory.awaited_transfers)

    def _free_dropped(self, now: float) -> None:
        if not self._dropped:
            return
        running, waiting = self._scheduler.live_adapters()
        for digest in sorted(self._dropped - running - waiting - self._exports.adapters()):
            if self._memory.retire(digest, now):
                self._dropped.discard(digest)


class PendingExports:
    """Requests that were exported with their KV, while the KV is copied to the host tier.

    Args:
        memory: the memory, which holds the KV until it is handed over.
        executor: the executor, which reads the KV from the host tier.
    """

    def __init__(self, memory: Memory, executor: Executor) -> None:
        self._memory = memory
        self._executor = executor
        self._leases: dict[RequestId, SequenceLease] = {}

    def begin(self, request: Request, now: float) -> None:
        """Start copying the KV of a request that the scheduler has released."""
        memory = self._memory
        adapter = BASE if request.adapter is None else memory.register(request.adapter)
        token_ids = hashed_token_ids(request.prompt_token_ids + request.output_token_ids, request.images)
        # KV of two owners is not sent. The engine that resumes the request computes the KV again.
        keys = [] if request.adapter_start else memory.keys_of(request.digest, token_ids, salt=request.kv_salt)
        self._leases[request.request_id] = memory.kv_migration.begin_export(adapter, keys, now)

    def adapters(self) -> set[AdapterDigest | None]:
        """Return the adapter versions of the KV that is held."""
        return {self._memory.tree.digest(lease.adapter) for lease in self._leases.values()}

    def take(self, now: float) -> tuple[ExportedKv, ...]:
        """Return the KV that has reached the host tier since the last call, without evicted blocks."""
        ready = [request_id for request_id, lease in self._leases.items() if lease.is_ready]
        return tuple(self._read(request_id, now) for request_id in ready)

    def _read(self, request_id: RequestId, now: float) -> ExportedKv:
        lease = self._leases.pop(request_id)
        blocks = self._memory.kv_migration.exported_blocks(lease)
        contents = self._executor.read_host(blocks)
        self._memory.release(lease, now)
        return ExportedKv(request_id, tuple(lease.keys[: len(blocks)]), contents)
