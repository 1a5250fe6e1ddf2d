"""The client of a cluster, in the API process: supervises engines, sends requests and owns the clients' streams.

The client of a cluster has the same interface as the client of one engine. A request whose replica dies continues on
another replica, from the tokens that this process has received. A migrated request continues in the same way.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from lorikeet.client.client import RequestHandle, RequestOutput, Streams
from lorikeet.client.state import AdoptionCounts, ClusterState, ReplicaView
from lorikeet.client.supervisor import EngineError, EngineSupervisor, EngineTimeouts
from lorikeet.cluster.controller.adapter_files import AdapterFiles
from lorikeet.cluster.controller.adopter import Adopter, Orphan
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher
from lorikeet.cluster.controller.parked_requests import ParkedRequest, ParkedRequests, resumed
from lorikeet.cluster.controller.parts import ClusterCosts, ClusterPolicies, ClusterProcesses
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.controller.replica_joiner import ReplicaJoiner
from lorikeet.cluster.controller.request_moves import HandOver, RequestMoves
from lorikeet.cluster.controller.snapshot import cluster_state
from lorikeet.cluster.placement.orchestrator import AdapterInfo
from lorikeet.cluster.placement.service import PlacementClient
from lorikeet.cluster.routing.fleet import Fleet, replica_gauges
from lorikeet.cluster.routing.request import RoutingRequest, routing_request
from lorikeet.cluster.tables import RoutingTable
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.config import Settings, for_engines
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, Decided, FinishReason, Mechanism
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId, RequestId
from lorikeet.core.messages import Abort, EngineReady, EngineStats, Progress, StepOutputs
from lorikeet.core.plan import Token
from lorikeet.core.request import Request

_DRAIN_CHECK_S = 0.05


_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)

log = structlog.get_logger("lorikeet")

HAND_OVER_S = 10.0
"""Most seconds for which a removed replica moves KV or is the source of copies, even if its drain is shorter."""

REPLACE_S = 10.0
"""Seconds until another replica is started in place of one that was given up; the pause doubles after each failure."""
_MAX_REPLACE_S = 300.0
"""Longest pause before a replica is replaced."""


class ClusterClient:
    """Sends requests to many engines; implements ``lorikeet.client.client.Engines``.

    Args:
        settings: settings of every replica.
        processes: starts and connects the replicas and the orchestrator.
        policies: policies of the preset.
        costs: costs of moves, and measured costs.

    Attributes:
        wanted: number of replicas that the load needs; None without autoscaling.
        adoptions: counts of replicas adopted and handed back, and of requests that went on at adopted replicas.
    """

    _engine_info: EngineReady

    def __init__(
        self,
        settings: Settings,
        processes: ClusterProcesses,
        policies: ClusterPolicies,
        costs: ClusterCosts,
    ) -> None:
        self._learned = costs.learned
        self.wanted: int | None = None
        self._is_paused = False
        self._settings = settings
        self._hosts = processes.hosts
        self._adoption = processes.adoption
        self._parked = ParkedRequests()
        self.adoptions = AdoptionCounts()
        self._context = zmq.asyncio.Context()
        self._replicas: dict[ReplicaId, LiveReplica] = {}
        self._numbers = count()
        self._streams = Streams()
        self._dispatcher = Dispatcher(policies.routing, prefetch=policies.prefetch, held_share=policies.held_share)
        self._placement = PlacementClient(processes.placement, policies.period_s, self._on_table)
        self._files = AdapterFiles(processes.transport, self._dispatcher, self._replicas, self._apply)
        self._joining = ReplicaJoiner(self._dispatcher, self._files, settings.engine, self._apply)
        self._moves = RequestMoves(self._streams, self._replicas, self._redispatch, costs.kv_bandwidth)
        self._hand_over = HandOver(self._streams, self._moves, self._dispatcher.fleet, costs.times)
        self._failure: EngineError | None = None
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []
        self._background: list[Callable[[], Coroutine[Any, Any, None]]] = [self._placement.run]
        if processes.adoption is not None:
            self._background.append(Adopter(self, processes.adoption).run)
        self._tasks = BackgroundTasks()

    # --- the interface of one engine's client ---------------------------------------------------------

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of one replica, which are the same for all replicas."""
        return self._engine_info

    @property
    def alive(self) -> bool:
        """Whether at least one replica is ready."""
        return any(replica.supervisor.alive for replica in self._replicas.values())

    @property
    def is_asleep(self) -> bool:
        """Whether the engines were put to sleep."""
        return any(replica.supervisor.is_asleep for replica in self._replicas.values())

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """Views of all replicas that have been started, by id."""
        return {replica_id: replica.supervisor for replica_id, replica in self._replicas.items() if replica.epoch}

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start all replicas in parallel; ``on_progress`` receives the first replica's progress."""
        log.info("starting replicas", replicas=self._settings.cluster.replicas)
        began_s = time.monotonic()

        async def start_one(on_progress: Callable[[Progress], None]) -> None:
            replica = await self._start_replica(on_progress)
            log.info("replica started", replica=replica, seconds=round(time.monotonic() - began_s, 1))

        try:
            async with asyncio.TaskGroup() as starts:
                starts.create_task(start_one(on_progress))
                for _ in range(1, self._settings.cluster.replicas):
                    starts.create_task(start_one(lambda progress: None))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        await (
            self._place()
        )  # Placing once, after all replicas have started, keeps adapters where they were before a restart.
        for work in self._background:
            self._tasks.run(work())
        return self.engine_info

    def submit(self, request: Request) -> RequestHandle:
        """Route a request and return its handle. See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        parked = self._parked.take(request)
        if parked is not None:
            request = resumed(request, parked.request)
        handle = self._streams.open(request, self._abort)
        self._placement.arrived(request.digest, len(request.prompt_token_ids))
        if parked is not None:
            self._resume(handle, parked)
        self._apply(self._arrive(handle, None if parked is None else parked.replica))
        return handle

    def _resume(self, handle: RequestHandle, parked: ParkedRequest) -> None:
        """Pass the tokens of a parked request to the client that has come back."""
        self.adoptions.resumed += 1
        tokens = handle.token_ids
        if tokens:
            handle.put(RequestOutput(tuple([Token(token_id) for token_id in tokens]), None))
        saved_s = 0.0
        if self._learned is not None:
            costs = self._learned.costs
            saved_s = costs.unloaded_ttft_s(len(handle.request.prompt_token_ids)) + len(tokens) * costs.decode_step_s(1)
        why = f"{parked.replica} was adopted from a lost server, with {len(tokens)} tokens of the answer"
        request_id = handle.request.request_id
        handle.timings.apply(Decided(request_id, time.monotonic(), Mechanism.PLACEMENT, saved_s, why))

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Accept requests for adapters. A replica loads one when its first request is sent there. See ``Engines``."""
        new = tuple(refs)
        self._files.register(new)
        known = [AdapterInfo(ref.digest, ref.max_rank, ref.weight_bytes) for ref in new]
        self._tasks.run(self._placement.register(known))

    def pin_adapters(self, digests: Iterable[AdapterDigest]) -> None:
        """Evict these versions last, at every replica that holds them. See ``Engines``."""
        self._files.pinned = tuple(digests)
        for replica in self._replicas.values():
            replica.supervisor.pin_adapters(self._files.pinned)

    def name_adapters(self, names: Mapping[AdapterName, AdapterDigest], epoch: str) -> None:
        """Send the names of all versions to every replica. See ``Engines``."""
        self._files.names = dict(names), epoch
        for replica in self._replicas.values():
            replica.supervisor.name_adapters(*self._files.names)

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Drop an adapter from all replicas and return the bytes freed. See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        freed = self._files.begin_drop(digest)
        await self._placement.drop(digest)
        if not freed.done():  # The adapter may have been registered again, or may be removed already.
            self._apply(self._dispatcher.retire(digest))
        return await freed

    def set_paused(self, paused: bool) -> None:
        """Pause or resume all replicas, including replicas that start later. See ``Engines``."""
        self._is_paused = paused
        for replica in self._replicas.values():
            replica.supervisor.set_paused(paused)

    def recompute(self, salt: str) -> None:
        """Route all requests in flight again, under a salt. See ``Engines``."""
        for handle in self._streams:
            handle.salt(salt)
            if handle.replica is None:  # It waits, and is sent later.
                continue
            request_id = handle.request.request_id
            self._replicas[handle.replica].supervisor.send(Abort(request_id))
            self._moves.forget(request_id)
            handle.left = "its KV was given up"
            handle.replica = None
            self._apply(self._dispatcher.ended(request_id, time.monotonic(), is_complete=False))
            self._apply(self._arrive(handle))

    async def sleep(self) -> None:
        """End the engines of all replicas until :meth:`wake`. See ``Engines``."""
        await asyncio.gather(*(replica.supervisor.sleep() for replica in self._replicas.values()))

    async def wake(self, *, pool: bool = True) -> None:
        """Start the engines of all replicas again. See ``Engines``."""
        await asyncio.gather(*(replica.supervisor.wake(pool=pool) for replica in self._replicas.values()))

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every adapter event. See ``Engines``."""
        self._on_adapter_event.append(callback)

    def describe(self) -> ClusterState:
        """Return a snapshot of the cluster. See ``Engines``."""
        table = self._placement.table
        copier = self._files.copier
        state = cluster_state(self._replicas, self._dispatcher, copier, table, self._moves, self.wanted)
        return msgspec.structs.replace(state, adoptions=self.adoptions)

    async def close(self) -> None:
        """Stop all replicas and fail the remaining requests. See ``Engines``."""
        await self._tasks.close()
        self._fail(EngineError("the server is shutting down"))
        is_temporary = not self._settings.cluster.pool_dir  # Each replica deletes its part.
        await asyncio.gather(*(self._files.end(each, discard=is_temporary) for each in list(self._replicas.values())))
        await self._files.copier.close()
        self._context.destroy(linger=0)

    # --- for background tasks of the cluster -----------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """State of the replicas for routing, read-only."""
        return self._dispatcher.fleet

    @property
    def size(self) -> int:
        """Number of replicas that start, run or restart, without replicas that are being removed."""
        return sum(not replica.is_leaving for replica in self._replicas.values())

    @property
    def staying(self) -> list[ReplicaId]:
        """Replicas that have started and are not being removed, in the order of their start."""
        return [name for name, replica in self._replicas.items() if replica.epoch and not replica.is_leaving]

    def sent_s(self) -> dict[RequestId, float]:
        """Return the time at which each request was sent to its replica.

        Requests that wait for a replica or are being moved are left out.
        """
        there = [handle for handle in self._streams if handle.replica is not None]
        moving = self._moves.exporting
        return {each.request.request_id: each.sent_s for each in there if each.request.request_id not in moving}

    def copies(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return all pairs of adapter and replica; the same object until something changes."""
        return self._files.copier.pairs()

    def add_background_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` from the start of this client to its end. Call it before :meth:`start`."""
        self._background.append(work)

    async def period(self) -> None:
        """Wait until the current placement period has ended."""
        await self._placement.period()

    # --- adding and removing replicas ------------------------------------------------------------------

    async def add_replica(self) -> ReplicaId:
        """Start one more replica, place adapters on it, and return its id. See ``Engines``."""
        replica_id = await self._start_replica(lambda progress: None)
        log.info("replica added", replica=replica_id, replicas=len(self._replicas))
        await self._place()
        return replica_id

    async def adopt_replica(self, orphan: Orphan) -> ReplicaId:
        """Take over a replica whose server is gone, with its engine, adapters and requests.

        Raises:
            EngineError: the replica died meanwhile.
        """
        began_s = time.monotonic()
        replica_id = await self._start_replica(lambda progress: None, orphan)
        self.adoptions.adopted += 1
        supervisor = self._replicas[replica_id].supervisor
        log.info(
            "replica adopted",
            replica=replica_id,
            server=orphan.server,
            address=supervisor.address,
            pid=supervisor.process_id,
            adapters=len(self._files.copier.placed_at(replica_id)),
            requests=self._parked.count_at(replica_id),
            silent_s=round(orphan.silent_s, 1),
            seconds=round(time.monotonic() - began_s, 2),
        )
        await self._place()
        return replica_id

    async def hand_back_replica(self, replica_id: ReplicaId) -> None:
        """Empty an adopted replica, and free it for the server that asks for it. See ``remove_replica`` for errors."""
        await self.remove_replica(replica_id, keeps_engine=True)
        self.adoptions.handed_back += 1

    async def _start_replica(self, on_progress: Callable[[Progress], None], orphan: Orphan | None = None) -> ReplicaId:
        replica_id = ReplicaId(f"replica-{next(self._numbers)}")
        host = self._hosts(replica_id) if orphan is None else orphan.host(replica_id)
        encoded = msgspec.json.encode(for_engines(self._settings))
        timeouts = EngineTimeouts.of(self._settings.engine)
        supervisor = EngineSupervisor(replica_id, host, self._context, encoded, self, timeouts)
        replica = self._replicas[replica_id] = LiveReplica(supervisor, "" if orphan is None else orphan.server)
        try:
            self._engine_info = await supervisor.start(on_progress)
            if self._is_paused:
                supervisor.set_paused(True)
        except BaseException as error:
            if isinstance(error, EngineError):
                where = supervisor.address
                log.warning("replica did not start", replica=replica_id, address=where, reason=str(error))
            self._replicas.pop(replica_id, None)
            self._files.lost(replica_id)
            supervisor.host.close()
            if not self._replicas:  # The other replicas died while this replica was starting.
                self._fail(EngineError(f"{replica_id} could not be started, and no other replica is left"))
            raise
        await self._joining.join(replica)
        return replica_id

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0, *, keeps_engine: bool = False) -> None:
        """Drain a replica and stop it, or free it for another server. See ``Engines``.

        Its requests continue on other replicas.
        """
        replica = self._replicas[replica_id]
        if not self._has_others(replica):
            raise EngineError(f"replica {replica_id} is the only one and cannot be removed")
        if not replica.epoch:
            raise EngineError(f"replica {replica_id} is still being started")
        replica.is_leaving = True
        log.info("replica drains", replica=replica_id, drain_s=drain_s)
        began_s = time.monotonic()
        if replica.is_joined:
            self._dispatcher.drain(replica_id)
            self._tasks.run(self._place())  # Other replicas can fetch adapters from this replica while it drains.
        while self._has_others(replica):
            is_needed = self._hand_over.advance(replica_id) or self._dispatcher.pool.is_source(replica_id)
            limit_s = max(drain_s, HAND_OVER_S) if is_needed else drain_s
            is_empty = not (is_needed or self._streams.at(replica_id))
            if is_empty or time.monotonic() >= began_s + limit_s:
                break
            await asyncio.sleep(_DRAIN_CHECK_S)
        if replica_id in self._replicas and not self._has_others(replica):
            self._tasks.run(self._joining.keep(replica))
            self._tasks.run(self._place())
            raise EngineError(f"replica {replica_id} is kept: all other replicas have been lost")
        self._replicas.pop(replica_id, None)  # The replica may have died while it drained.
        drained = not self._streams.at(replica_id)
        self._leave(replica)
        if keeps_engine and self._adoption is not None:
            await self._files.leave_running(replica, self._adoption.release)
        else:
            await self._files.end(replica, discard=True)
        ended = "replica handed back" if keeps_engine else "replica removed"
        log.info(ended, replica=replica_id, drained=drained, replicas=len(self._replicas))
        await self._place()

    def _has_others(self, replica: LiveReplica) -> bool:
        """Return whether another replica has started and is not being removed."""
        return any(self._replicas[other] is not replica for other in self.staying)

    async def _place(self) -> None:
        """Place adapters on all replicas that stay. Replicas whose engine is being restarted are included."""
        if there := self.staying:
            await self._placement.set_replicas(there)

    def _leave(self, replica: LiveReplica, *, died: bool = False, code: int | None = None) -> None:
        """Continue a replica's requests elsewhere.

        If the replica died, the crash counts against each of its running requests.
        """
        for digest in replica.drops:
            replica.drops.end(digest, 0)
        if self._learned is not None:
            self._learned.forget(replica.supervisor.replica)
        if not replica.is_joined:
            return
        replica.is_joined = False
        actions, orphaned = self._dispatcher.leave(replica.supervisor.replica)
        pending = [actions]
        for handle in [self._streams[request_id] for request_id in orphaned if request_id in self._streams]:
            was_running = handle.replica is not None
            if was_running:
                handle.left = f"{handle.replica} {'died' if died else 'left'}"
            handle.replica = None
            self._moves.forget(handle.request.request_id)
            if not (died and was_running) or self._streams.count_death(handle, code):
                pending.append(self._arrive(handle))
        # Drops end only now, because an adapter looks unused while its requests have no replica.
        for actions in pending:
            self._apply(actions)

    # --- events of supervisors ---------------------------------------------------------------------------

    def on_outputs(self, supervisor: EngineSupervisor, outputs: StepOutputs) -> None:
        """Deliver tokens and events, and update the dispatcher."""
        replica_id = supervisor.replica
        now = time.monotonic()
        replica = self._replicas.get(replica_id)
        if replica is None or self._failure is not None:
            return  # A replica that was removed or has failed may still have messages in flight.
        outputs = self._streams.without_stale(replica_id, outputs)
        for handle, finished in self._streams.apply(outputs):
            self._moves.forget(handle.request.request_id)
            if finished.reason in _COMPLETE:
                self._placement.answered(handle.request.digest, len(handle.token_ids))
        for event in outputs.adapter_events:
            replica.on_adapter_event(event)
            for on_event in self._on_adapter_event:
                on_event(event)
        if replica.is_joined:
            self._apply(self._dispatcher.apply_outputs(replica_id, outputs, now))
            if outputs.stats is not None:
                self._learn(replica_id, outputs.stats)
                gauges = replica_gauges(replica_id, replica.epoch, outputs.stats, supervisor.engine_info.block_size)
                self._apply(self._dispatcher.gauges(gauges, now))
        for exported in outputs.exported_kv:
            self._moves.on_exported(exported)

    def _learn(self, replica_id: ReplicaId, stats: EngineStats) -> None:
        """Update routing and placement with the costs that a replica reports."""
        if self._learned is not None and self._learned.note(replica_id, stats):
            self._dispatcher.routing.learn(self._learned.costs)
            self._placement.costs = self._learned.costs

    def on_exit(self, supervisor: EngineSupervisor, code: int | None) -> None:
        """Continue the replica's requests elsewhere; the requests wait if no other replica is open."""
        if (replica := self._replicas.get(supervisor.replica)) is not None:
            if not supervisor.is_asleep:
                log.warning("replica died; its requests continue elsewhere", replica=supervisor.replica, code=code)
            self._leave(replica, died=not supervisor.is_asleep, code=code)

    def on_restart(self, supervisor: EngineSupervisor) -> int:
        """Route requests to the replica again. Return 0, because its earlier requests continued at other replicas."""
        if (replica := self._replicas.get(supervisor.replica)) is not None:
            self._tasks.run(self._joining.join(replica))
        return 0

    def on_parked(self, supervisor: EngineSupervisor, requests: tuple[Request, ...]) -> None:
        """Keep the requests of an adopted replica until their clients come back."""
        self._parked.add(requests, supervisor.replica)

    def on_failed(self, supervisor: EngineSupervisor, failure: EngineError) -> None:
        """Remove the replica. If it was the last one, fail all requests."""
        replica = self._replicas.pop(supervisor.replica, None)
        if replica is None:
            return
        log.error("replica is given up", replica=supervisor.replica, reason=str(failure))
        self._leave(replica)
        self._files.lost(supervisor.replica)
        self._tasks.run(supervisor.close())  # A separate task, because the supervisor awaits this call.
        if self._replicas:
            self._tasks.run(self._place())
            # With autoscaling, the autoscaler replaces it; the server of an adopted one does when it comes back.
            if not (self._settings.cluster.max_replicas or replica.adopted_from):
                self._tasks.run(self._replace())
        else:
            self._fail(failure)

    async def _replace(self) -> None:
        """Start a replica in place of a replica that was given up.

        After each failure, the pause before the next attempt doubles.
        """
        pause_s = REPLACE_S
        while True:
            await asyncio.sleep(pause_s)
            if self._failure is not None:
                return
            with suppress(EngineError):  # ``add_replica`` has logged the error.
                await self.add_replica()
                return
            pause_s = min(2 * pause_s, _MAX_REPLACE_S)

    def _on_table(self, table: RoutingTable) -> None:
        self._apply(self._dispatcher.swap(table, time.monotonic()))

    # --- requests ------------------------------------------------------------------------------------

    def move(self, request_id: RequestId, target: ReplicaId, *, with_kv: bool = False) -> bool:
        """Move a request to another replica, without an interruption of its stream.

        Return False if the request cannot be moved now.

        The request's tokens are sent to the target. With ``with_kv`` its KV is exported too, as far as the KV fits the
        host tiers of both replicas. The target recomputes the rest.
        """
        return self._moves.begin(request_id, target, with_kv=with_kv)

    def _redispatch(self, handle: RequestHandle, target: ReplicaId | None) -> None:
        self._apply(self._dispatcher.move(self._routing_request(handle), target, time.monotonic()))

    def _arrive(self, handle: RequestHandle, home: ReplicaId | None = None) -> Actions:
        """Route a request that has no replica. The request may be the first one for its adapter."""
        if handle.request.adapter is not None:
            self._files.accept(handle.request.adapter)
        return self._dispatcher.arrive(self._routing_request(handle), time.monotonic(), home)

    def _routing_request(self, handle: RequestHandle) -> RoutingRequest:
        request = msgspec.structs.replace(handle.request, output_token_ids=handle.token_ids)
        return routing_request(request, self.engine_info.block_size if self._dispatcher.routing.wants_keys else None)

    def _apply(self, actions: Actions, reason: str = "") -> None:
        """Carry out the dispatcher's actions; ``reason`` is the cause if requests failed.

        The reason names folders and digests, so it is logged and not sent to clients.
        """
        self._files.carry_out(actions)
        for request_id, choice in actions.savings:
            why = f"{choice.replica} has least to do for it and for the requests there"
            decided = Decided(request_id, time.monotonic(), Mechanism.PLACEMENT, choice.saved_s, why)
            self._streams[request_id].timings.apply(decided)
        for send in actions.sends:
            self._send(self._streams[send.request_id], send.replica)
        for request_id in actions.failed:
            log.warning("request failed: its adapter could not be loaded", engine_request=request_id, reason=reason)
            self._moves.forget(request_id)
            self._streams.finish(
                self._streams[request_id],
                FinishReason.ERROR,
                "its adapter could not be loaded by any replica; the server's log says why",
            )
        self._files.end_retired()

    def _send(self, handle: RequestHandle, replica_id: ReplicaId) -> None:
        request = self._files.with_folder(handle.next_attempt(), replica_id)
        if handle.left:
            with_kv = " with its KV" if request.request_id in self._moves.carried else ""
            handle.goes_on(f"{handle.left}, and {replica_id} got the request{with_kv}")
        handle.left = f"it was moved from {replica_id}"
        handle.replica = replica_id
        handle.sent_s = time.monotonic()
        for message in self._moves.messages(request):
            self._replicas[replica_id].supervisor.send(message)

    def _abort(self, handle: RequestHandle, is_complete: bool) -> None:
        request_id = handle.request.request_id
        if request_id in self._streams and self._streams[request_id] is handle:
            if handle.replica is not None:
                self._replicas[handle.replica].supervisor.send(Abort(request_id))
            self._moves.forget(request_id)
            self._streams.finish(handle, FinishReason.ABORT)
            if is_complete:
                self._placement.answered(handle.request.digest, len(handle.token_ids))
            self._apply(self._dispatcher.ended(request_id, time.monotonic(), is_complete=is_complete))

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        self._streams.fail(failure)
        self._files.fail(failure)
        for replica in self._replicas.values():
            replica.drops.fail(failure)
