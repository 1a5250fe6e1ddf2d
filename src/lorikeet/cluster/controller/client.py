"""The API process's side of a cluster: supervises engines, sends requests, owns the clients' streams.

It has the same interface as the client of one engine. A request whose replica dies continues on another one, from the
tokens that have arrived here. A request that is migrated does the same, while its old replica goes on with others.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import count
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from lorikeet.client.state import ClusterState, ReplicaState, ReplicaView, replica_state
from lorikeet.client.streams import RequestHandle, Streams
from lorikeet.client.supervisor import EngineError, EngineHost, EngineSupervisor
from lorikeet.cluster.adapters.transport import Transport, TransportError
from lorikeet.cluster.controller.adapter_files import AdapterCopier, AdapterFiles
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.controller.request_moves import KvBandwidth, RequestMoves
from lorikeet.cluster.placement.orchestrator import AdapterInfo
from lorikeet.cluster.placement.service import PlacementClient, PlacementService
from lorikeet.cluster.routing.base import Router
from lorikeet.cluster.routing.fleet import Fleet, replica_gauges
from lorikeet.cluster.routing.request import RoutingRequest, routing_request
from lorikeet.cluster.tables import RoutingTable
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, FinishReason
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import Abort, EngineReady, EngineStats, Progress, StepOutputs
from lorikeet.core.request import Request

_AGAIN_S = 1.0

log = structlog.get_logger("lorikeet")


class ReplicaJoiner:
    """See the module.

    Args:
        dispatcher: hears of those that are there.
        files: knows what lies at each.
        engine: settings of theirs.
        do: carries out what the dispatcher then wants.
    """

    def __init__(
        self, dispatcher: Dispatcher, files: AdapterFiles, engine: EngineSettings, do: Callable[[Actions], None]
    ) -> None:
        self._dispatcher = dispatcher
        self._files = files
        self._engine = engine
        self._do = do

    async def keep(self, replica: LiveReplica) -> None:
        """Send a replica requests again that was to leave."""
        replica.is_leaving = False
        if replica.is_joined:
            self._do(self._dispatcher.reopen(replica.supervisor.replica, time.monotonic()))
        else:
            await self.join(replica)

    async def join(self, replica: LiveReplica) -> None:
        """Send a replica requests from now on; one that dies meanwhile joins when its engine is back."""
        while not (replica.is_joined or replica.is_leaving):
            try:
                await self._try(replica)
            except TransportError as error:
                if not replica.supervisor.alive:
                    return
                log.warning(
                    "a replica's adapters cannot be listed", replica=replica.supervisor.replica, reason=str(error)
                )
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def _try(self, replica: LiveReplica) -> None:
        supervisor, carrier = replica.supervisor, self._files.carrier
        replica.epoch += 1
        epoch = replica.epoch
        held = await carrier.find(supervisor.replica)
        if not supervisor.alive or replica.epoch != epoch or replica.is_leaving:
            return
        supervisor.register_adapters(carrier.placed_at(supervisor.replica))
        replica.is_joined = True
        self._do(self._dispatcher.join(replica.info(self._engine), time.monotonic(), held))


def cluster_state(
    replicas: Mapping[ReplicaId, LiveReplica],
    dispatcher: Dispatcher,
    carrier: AdapterCopier,
    table: RoutingTable,
    moves: RequestMoves,
    wanted: int | None,
) -> ClusterState:
    """Return what there is: replicas, the placement, what was copied, how many requests were moved."""

    def state(replica_id: ReplicaId, replica: LiveReplica) -> ReplicaState:
        held = carrier.placed_at(replica_id)
        return replica_state(
            replica_id,
            replica.supervisor,
            is_open=replica_id in dispatcher.fleet.open_index,
            held=len(held),
            held_bytes=sum(ref.weight_bytes for ref in held),
        )

    return ClusterState(
        replicas=tuple(state(replica_id, replica) for replica_id, replica in replicas.items()),
        unrouted=dispatcher.waiting,
        epoch=table.epoch,
        shares=table.shown,
        copies=carrier.counts,
        moves=moves.count,
        moves_with_kv=moves.with_kv,
        wanted=wanted,
    )


_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
_DRAIN_CHECK_S = 0.05


class ClusterClient:
    """Many engines; see ``lorikeet.client.client.Engines``.

    Args:
        settings: of every replica.
        hosts: makes the place where a replica's engines run.
        transport: moves adapters between replicas.
        placement: says where adapters are to be served.
        router: chooses replicas.
        period_s: time between two placements.
        prefetch: replicas fetch what a new placement gives them at once.
        kv_speed: learns how fast KV travels.

    Attributes:
        wanted: replicas that there should be by the load; None if nobody counts it.
    """

    _hello: EngineReady

    def __init__(
        self,
        settings: Settings,
        hosts: Callable[[ReplicaId], EngineHost],
        transport: Transport,
        placement: PlacementService,
        router: Router,
        period_s: float,
        prefetch: bool = False,
        kv_speed: KvBandwidth | None = None,
    ) -> None:
        self.wanted: int | None = None
        self._settings = settings
        self._hosts = hosts
        self._context = zmq.asyncio.Context()
        self._replicas: dict[ReplicaId, LiveReplica] = {}
        self._numbers = count()
        self._streams = Streams()
        self._dispatcher = Dispatcher(router, prefetch=prefetch)
        self._placer = PlacementClient(placement, period_s, self._follow)
        self._files = AdapterFiles(transport, self._dispatcher, self._replicas, self._do)
        self._joining = ReplicaJoiner(self._dispatcher, self._files, settings.engine, self._do)
        self._moves = RequestMoves(self._streams, self._replicas, self._hand_on, kv_speed or KvBandwidth())
        self._failure: EngineError | None = None
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []
        self._on_stats: list[Callable[[ReplicaId, EngineStats], None]] = []
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = [self._placer.run]
        self._tasks = BackgroundTasks()

    # --- the face of an engine's client --------------------------------------------------------------

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of one replica; they are the same on all."""
        return self._hello

    @property
    def alive(self) -> bool:
        """Whether any replica is ready right now."""
        return any(replica.supervisor.alive for replica in self._replicas.values())

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """Every replica by its id, once it has started."""
        return {replica_id: replica.supervisor for replica_id, replica in self._replicas.items() if replica.epoch}

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """See ``Engines``: all replicas that the settings ask for, side by side; the progress shown is the first's."""
        try:
            async with asyncio.TaskGroup() as starts:
                starts.create_task(self._start_replica(on_progress))
                for _ in range(1, self._settings.cluster.replicas):
                    starts.create_task(self._start_replica(lambda progress: None))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        await self._place()  # once for all: the first alone would be given what an earlier head had placed on others
        for work in self._beside:
            self._tasks.run(work())
        return self.engine_info

    def submit(self, request: Request) -> RequestHandle:
        """See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        handle = self._streams.open(request, self._abort)
        self._placer.arrived(request.digest, len(request.prompt_token_ids))
        self._do(self._arrive(handle))
        return handle

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """See ``Engines``; they come to a replica when they are first asked for there."""
        new = tuple(refs)
        self._files.know(new)
        known = [AdapterInfo(ref.digest, ref.max_rank, ref.weight_bytes) for ref in new]
        self._tasks.run(self._placer.know(known))

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """See ``Engines``: from all replicas."""
        if self._failure is not None:
            raise self._failure
        freed = self._files.begin_drop(digest)
        await self._placer.drop(digest)
        if not freed.done():  # else it was loaded again meanwhile, or is gone
            self._do(self._dispatcher.retire(digest))
        return await freed

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """See ``Engines``."""
        self._on_adapter_event.append(callback)

    def on_stats(self, callback: Callable[[ReplicaId, EngineStats], None]) -> None:
        """See ``Engines``."""
        self._on_stats.append(callback)

    def describe(self) -> ClusterState:
        """See ``Engines``."""
        table = self._placer.table
        return cluster_state(self._replicas, self._dispatcher, self._files.carrier, table, self._moves, self.wanted)

    async def close(self) -> None:
        """See ``Engines``."""
        await self._tasks.close()
        self._give_up(EngineError("the server is shutting down"))
        is_temporary = not self._settings.cluster.pool_dir  # also on machines that this one cannot clean
        await asyncio.gather(*(self._files.end(each, discard=is_temporary) for each in list(self._replicas.values())))
        await self._files.carrier.close()
        self._context.destroy(linger=0)

    # --- for those who watch over the cluster --------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """What routing knows of the replicas; to read."""
        return self._dispatcher.fleet

    @property
    def size(self) -> int:
        """Replicas, those included that are being started, without those that are leaving."""
        return sum(not replica.is_leaving for replica in self._replicas.values())

    @property
    def staying(self) -> list[ReplicaId]:
        """Replicas that have started and are not leaving, in the order of their start."""
        return [name for name, replica in self._replicas.items() if replica.epoch and not replica.is_leaving]

    def sent_s(self) -> dict[RequestId, float]:
        """Return when each request was handed to the replica where it is, without those that wait here or move."""
        there = [handle for handle in self._streams if handle.replica is not None]
        moving = self._moves.under_way
        return {each.request.request_id: each.sent_s for each in there if each.request.request_id not in moving}

    def copies(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return which adapters are at which replicas; the same set until something changes."""
        return self._files.carrier.pairs()

    def beside(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something run from the start to the end of this client; to be called before."""
        self._beside.append(work)

    async def period(self) -> None:
        """Wait until the next period of placement has ended."""
        await self._placer.period()

    # --- replicas come and go ------------------------------------------------------------------------

    async def add_replica(self) -> ReplicaId:
        """See ``Engines``."""
        replica_id = await self._start_replica(lambda progress: None)
        await self._place()
        return replica_id

    async def _start_replica(self, on_progress: Callable[[Progress], None]) -> ReplicaId:
        replica_id = ReplicaId(f"replica-{next(self._numbers)}")
        encoded = msgspec.json.encode(self._settings)
        supervisor = EngineSupervisor(replica_id, self._hosts(replica_id), self._context, encoded, self)
        replica = self._replicas[replica_id] = LiveReplica(supervisor)
        try:
            self._hello = await supervisor.start(on_progress)
        except BaseException:
            self._replicas.pop(replica_id, None)
            self._files.lost(replica_id)
            supervisor.host.close()
            if not self._replicas:  # those that were there when this one began are lost
                self._give_up(EngineError(f"{replica_id} could not be started, and no other replica is there"))
            raise
        await self._joining.join(replica)
        return replica_id

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """See ``Engines``."""
        replica = self._replicas[replica_id]
        if not self._has_others(replica):
            raise EngineError(f"replica {replica_id} is the only one")
        if not replica.epoch:
            raise EngineError(f"replica {replica_id} is still being started")
        replica.is_leaving = True
        until_s = time.monotonic() + drain_s
        if replica.is_joined:
            self._dispatcher.drain(replica_id)
            self._tasks.run(self._place())  # others fetch from it while it is there
        while time.monotonic() < until_s and self._has_others(replica) and self._streams.any_at(replica_id):
            await asyncio.sleep(_DRAIN_CHECK_S)
        if replica_id in self._replicas and not self._has_others(replica):
            self._tasks.run(self._joining.keep(replica))
            self._tasks.run(self._place())
            raise EngineError(f"replica {replica_id} stays: it is the only one now that the others are lost")
        self._replicas.pop(replica_id, None)  # it may have been lost meanwhile
        self._leave(replica)
        await self._files.end(replica, discard=True)
        await self._place()

    def _has_others(self, replica: LiveReplica) -> bool:
        """Whether a replica may leave: another has started, which does not leave."""
        return any(self._replicas[other] is not replica for other in self.staying)

    async def _place(self) -> None:
        """Place on the replicas that there are: also on those whose engine is being started again."""
        if there := self.staying:
            await self._placer.set_replicas(there)

    def _leave(self, replica: LiveReplica, *, died: bool = False, code: int | None = None) -> None:
        """Let a replica's requests go on elsewhere; in its death they had a part, perhaps."""
        for digest in replica.drops:
            replica.drops.end(digest, 0)
        if not replica.is_joined:
            return
        replica.is_joined = False
        actions, homeless = self._dispatcher.leave(replica.supervisor.replica)
        todo = [actions]
        for handle in [self._streams[request_id] for request_id in homeless if request_id in self._streams]:
            was_there, handle.replica = handle.replica is not None, None
            self._moves.forget(handle.request.request_id)
            if not (died and was_there) or self._streams.count_death(handle, code):
                todo.append(self._arrive(handle))
        for actions in todo:  # not before: an adapter that is being dropped seems unused while its requests are nowhere
            self._do(actions)

    # --- what supervisors tell ---------------------------------------------------------------------------

    def on_outputs(self, supervisor: EngineSupervisor, outputs: StepOutputs) -> None:
        """Hand tokens and events on, and learn from them."""
        replica_id, now = supervisor.replica, time.monotonic()
        replica = self._replicas.get(replica_id)
        if replica is None or self._failure is not None:
            return  # it was removed, or all are, and says its last words
        outputs = self._streams.without_stale(replica_id, outputs)
        for handle, finished in self._streams.apply(outputs):
            self._moves.forget(handle.request.request_id)
            if finished.reason in _COMPLETE:
                self._placer.answered(handle.request.digest, len(handle.token_ids))
        for event in outputs.adapter_events:
            replica.on_adapter_event(event)
            for on_event in self._on_adapter_event:
                on_event(event)
        if replica.is_joined:
            self._do(self._dispatcher.apply_outputs(replica_id, outputs, now))
            if outputs.stats is not None:
                told = replica_gauges(replica_id, replica.epoch, outputs.stats, supervisor.engine_info.block_size)
                self._do(self._dispatcher.gauges(told, now))
        for exported_kv in outputs.exported_kv:
            self._moves.exported_kv(exported_kv)
        if outputs.stats is not None:
            for on_stats in self._on_stats:
                on_stats(replica_id, outputs.stats)

    def on_exit(self, supervisor: EngineSupervisor, code: int | None) -> None:
        """Let its requests go on elsewhere, or wait if there is nowhere."""
        if (replica := self._replicas.get(supervisor.replica)) is not None:
            self._leave(replica, died=True, code=code)

    def on_restart(self, supervisor: EngineSupervisor) -> int:
        """Route requests to the replica again; its former requests have gone on at other replicas or wait for one."""
        if (replica := self._replicas.get(supervisor.replica)) is not None:
            self._tasks.run(self._joining.join(replica))
        return 0

    def on_failed(self, supervisor: EngineSupervisor, failure: EngineError) -> None:
        """Go on without it; if it was the last, nobody will answer any more."""
        replica = self._replicas.pop(supervisor.replica, None)
        if replica is None:
            return
        self._leave(replica)
        self._files.lost(supervisor.replica)
        self._tasks.run(supervisor.close())  # from a task of its own: the supervisor waits for whoever tells this
        if self._replicas:
            self._tasks.run(self._place())
        else:
            self._give_up(failure)

    def _follow(self, table: RoutingTable) -> None:
        self._do(self._dispatcher.swap(table, time.monotonic()))

    # --- requests ------------------------------------------------------------------------------------

    def move(self, request_id: RequestId, target: ReplicaId, *, with_kv: bool = False) -> bool:
        """Let a request go on at another replica; its client sees no gap. Return False if it cannot be moved now.

        Its tokens travel. So does its KV if asked for, and as far as there is room in the host tiers of both replicas;
        the rest is computed anew at the target.
        """
        return self._moves.begin(request_id, target, with_kv=with_kv)

    def _hand_on(self, handle: RequestHandle, target: ReplicaId) -> None:
        self._do(self._dispatcher.move(self._asked(handle), target, time.monotonic()))

    def _arrive(self, handle: RequestHandle) -> Actions:
        """Have a request routed that is nowhere. It may be the first that names its adapter here."""
        if handle.request.adapter is not None:
            self._files.accept(handle.request.adapter)
        return self._dispatcher.arrive(self._asked(handle), time.monotonic())

    def _asked(self, handle: RequestHandle) -> RoutingRequest:
        request = msgspec.structs.replace(handle.request, output_token_ids=handle.token_ids)
        return routing_request(request, self.engine_info.block_size if self._dispatcher.router.wants_keys else None)

    def _do(self, actions: Actions, reason: str = "") -> None:
        """Carry out what the dispatcher wants; ``reason`` is why requests failed, if any did."""
        self._files.carry_out(actions)
        for send in actions.sends:
            self._send(self._streams[send.request_id], send.replica)
        for request_id in actions.failed:
            self._moves.forget(request_id)
            self._streams.finish(self._streams[request_id], FinishReason.ERROR, f"its adapter cannot be had: {reason}")
        self._files.end_retired()

    def _send(self, handle: RequestHandle, replica_id: ReplicaId) -> None:
        request = self._files.with_folder(handle.next_attempt(), replica_id)
        handle.replica, handle.sent_s = replica_id, time.monotonic()
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
                self._placer.answered(handle.request.digest, len(handle.token_ids))
            self._do(self._dispatcher.ended(request_id, time.monotonic(), is_complete=is_complete))

    def _give_up(self, failure: EngineError) -> None:
        self._failure = failure
        self._streams.fail(failure)
        self._files.fail(failure)
        for replica in self._replicas.values():
            replica.drops.fail(failure)
