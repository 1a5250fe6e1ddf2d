"""Requests that leave an engine with their KV."""

import math
from collections.abc import Callable

import msgspec

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import Clock
from lorikeet.core.executor import Executor
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.messages import (
    Abort,
    DropAdapter,
    EngineStats,
    Exported,
    ExportRequest,
    ImportKv,
    MemoryStats,
    RegisterAdapters,
    StepOutputs,
    Submit,
)
from lorikeet.core.plan import StepPlan, StepResult
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


class PendingExports:
    """Those that have been let go, and whose KV is on its way to the host tier, from where it is handed over.

    Args:
        memory: holds the KV meanwhile.
        executor: reads it.
    """

    def __init__(self, memory: Memory, executor: Executor) -> None:
        self._memory = memory
        self._executor = executor
        self._leaving: dict[RequestId, SequenceLease] = {}

    def begin(self, request: Request, now: float) -> None:
        """Gather the KV of a request that is no longer here."""
        memory = self._memory
        adapter = BASE if request.adapter is None else memory.register(request.adapter)
        keys = memory.keys_of(request.digest, request.prompt_token_ids + request.output_token_ids)
        self._leaving[request.request_id] = memory.kv_migration.begin_export(adapter, keys, now)

    def adapters(self) -> set[AdapterDigest | None]:
        """Return the versions whose KV is held."""
        return {self._memory.tree.digest(lease.adapter) for lease in self._leaving.values()}

    def take(self, now: float) -> tuple[Exported, ...]:
        """Return those whose KV has been gathered since the last call; some or all of it may be lacking."""
        ready = [request_id for request_id, lease in self._leaving.items() if lease.is_ready]
        return tuple(self._hand_over(request_id, now) for request_id in ready)

    def _hand_over(self, request_id: RequestId, now: float) -> Exported:
        lease = self._leaving.pop(request_id)
        blocks = self._memory.kv_migration.exported_blocks(lease)
        contents = self._executor.read_host(blocks)
        self._memory.release(lease, now)
        return Exported(request_id, tuple(lease.keys[: len(blocks)]), contents)


_NOTHING = StepPlan(step=-1)


class Engine:
    """One replica. The same class on every executor and clock (design, idea 2).

    Args:
        scheduler: owns the requests.
        memory: owns the blocks.
        executor: runs plans.
        clock: real or virtual.
        cold_start: whether transfers stop everything.
        on_ran: called with every plan that has run, and what came of it.
        recorder: is told all that plans depend on.
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
        self._departures = PendingExports(memory, executor)
        self._unwanted: set[AdapterDigest] = set()
        self._has_news = False
        self._last_plan = _NOTHING
        self._steps = 0

    def submit(self, request: Request) -> None:
        """Queue a new or a resumed request."""
        # Behind others that wait it would hardly be admitted before one that runs has ended, which ends the plan.
        now = self._receive(Submit(request), is_news=not len(self.queue))
        self._scheduler.submit(request, now)

    def abort(self, request_id: RequestId) -> None:
        """End a request; unknown ids are ignored."""
        now = self._receive(Abort(request_id))
        self._scheduler.abort(request_id, now)

    def export_request(self, request_id: RequestId) -> Request:
        """Take a request out as plain data, to be resumed by :meth:`submit` here or elsewhere."""
        now = self._receive(RequestExported(request_id))
        return self._scheduler.export_request(request_id, now)

    def export_with_kv(self, request_id: RequestId) -> Request | None:
        """Take a request out with its KV, to be resumed elsewhere; None if it is not here.

        Its KV goes to the host tier while the engine goes on; then ``StepOutputs.exported_kv`` has it, for
        :meth:`import_kv` of another engine with the same settings.
        """
        now = self._receive(ExportRequest(request_id))
        try:
            request = self._scheduler.export_request(request_id, now, keep_kv=True)
        except KeyError:  # it may just have finished
            return None
        self._departures.begin(request, now)
        return request

    def import_kv(self, message: ImportKv) -> None:
        """Take KV in that another engine has computed, as far as the host tier has room for it."""
        now = self._receive(msgspec.structs.replace(message, blocks=()))
        adapter = BASE if message.adapter is None else self._memory.register(message.adapter)
        places = self._memory.kv_migration.import_kv(adapter, message.keys, now)
        if message.blocks:  # a replay has none
            contents = [message.blocks[index] for index, _ in places]
            self._executor.write_host([block for _, block in places], contents)

    def register_adapters(self, refs: tuple[AdapterRef, ...]) -> None:
        """Take note of versions that requests may come for, so that they can be read and prefetched."""
        self._receive(RegisterAdapters(refs))
        for ref in refs:
            self._memory.register(ref)

    def drop_adapter(self, digest: AdapterDigest) -> None:
        """Free a version as soon as no request runs or waits under it; ``AdapterEvicted`` tells when.

        Requests that still arrive for it are served first: they were accepted before it was dropped.
        """
        self._receive(DropAdapter(digest))
        self._unwanted.add(digest)

    def step(self, until_s: float | None = None) -> StepOutputs:
        """Run one turn and return all that it has to tell. Without work it runs nothing.

        Where the device runs the next decode step meanwhile, the next turn is for that step; nothing is planned anew
        before there is news, or the plan is over.

        Args:
            until_s: on a virtual clock, when the next request arrives (``inf``: none will). Then all steps that would
                be planned alike until that time, or until something else happens, run in this turn.

        Raises:
            ExecutorError: the step failed; the engine cannot go on.
        """
        now = self._take_transfers()
        exported_kv: tuple[Exported, ...] = ()
        plan = _NOTHING if self._is_held else self._scheduler.continue_plan(further=not self._has_news)
        if plan is None:
            exported_kv = self._departures.take(now)
            self._free_unwanted(now)
            self._memory.swapper.tick(now)
            plan, self._has_news = self._scheduler.plan(now, until_s), False
        self._recorder.note(Planned(now, until_s, plan))
        if not plan.is_empty:
            result = self._executor.execute(plan)
            now = self._clock.now()
            self._recorder.note(PlanRan(now, result))
            self._scheduler.commit(plan, result, now)
            self._steps += result.steps_run if plan.sequences else 0
            if self._on_ran is not None:
                self._on_ran(plan, result)
        self._last_plan = plan
        tokens, events = self._scheduler.take_outputs()
        adapter_events = self._memory.take_events()
        if events or adapter_events:
            self._recorder.note(EventsSent(events, adapter_events))
        return StepOutputs(tokens, events, adapter_events, exported_kv=exported_kv)

    @property
    def is_busy(self) -> bool:
        """Whether the last turn ran something; if not, the next brings nothing before a message or a transfer's end."""
        return not self._last_plan.is_empty

    @property
    def has_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return self._scheduler.has_requests

    @property
    def has_chores(self) -> bool:
        """Whether there is something to do without requests: transfers, or ticks that move something."""
        return self.has_transfers or self.host_fill_pending or self.due_s < math.inf

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is under way."""
        return bool(self._memory.transfers_in_flight)

    @property
    def due_s(self) -> float:
        """Until when the loop may rest if nothing happens: its clock's time of the next tick or prefetch, if any."""
        return math.inf if self._is_held else self._memory.swapper.idle_until_s

    @property
    def host_fill_pending(self) -> bool:
        """Whether known adapters are still being read into the host tier."""
        return self._memory.swapper.has_host_reads(self._clock.now())

    @property
    def queue(self) -> AdmissionQueue:
        """The waiting requests; for whoever looks at an engine in the same process."""
        return self._scheduler.queue

    def wait_for_transfer(self, timeout_s: float | None = None) -> None:
        """Block until a transfer has ended; for drivers in the same process."""
        self._executor.wait_for_transfer(timeout_s)

    def close(self) -> None:
        """Release the executor, and end the recording."""
        self._executor.close()
        self._recorder.close()

    def stats(self) -> EngineStats:
        """Return the gauges as they are after the last step."""
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
            step_tokens=sum(step.tokens for step in self._last_plan.sequences),
            memory=self._memory.stats(),
            ahead_of_adapter=gauges.ahead_of_adapter,
            modes=self._scheduler.selector.stats(),
            queue=self._scheduler.queue.stats(),
            assist=self._executor.assist_counters(),
        )

    def memory_stats(self) -> MemoryStats:
        """Return what the memory tells now."""
        return self._memory.stats()

    def _receive(self, message: Message, *, is_news: bool = True) -> float:
        """Note what the engine is told, and whether it is to plan anew for that; return the time."""
        now, self._has_news = self._clock.now(), self._has_news or is_news
        self._recorder.note(Received(now, message))
        return now

    @property
    def _is_held(self) -> bool:
        """Whether nothing runs before a transfer has ended that somebody waits for. Messages are heard meanwhile."""
        return self._cold_start is ColdStart.BLOCK and bool(self._memory.awaited_transfers)

    def _take_transfers(self) -> float:
        """Take finished transfers in, and return the time."""
        transfers = self._executor.completed_transfers()
        now = self._clock.now()
        if transfers:
            self._has_news = True
            self._recorder.note(Transferred(now, tuple(transfers)))
        for done in transfers:
            self._scheduler.finish_transfer(done, now)
        return now

    def _free_unwanted(self, now: float) -> None:
        if not self._unwanted:
            return
        running, waiting = self._scheduler.live_adapters()
        for digest in sorted(self._unwanted - running - waiting - self._departures.adapters()):
            if self._memory.retire(digest, now):
                self._unwanted.discard(digest)
