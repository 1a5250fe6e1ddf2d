"""The API process's side of a cluster: it keeps the replicas' engines, sends requests, and owns the clients' streams.

The same face as one engine's client. A request whose replica dies goes on at another from the tokens that have arrived
here; one that is moved does the same while its old replica goes on with others.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import count
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from lorikeet.cluster.actions import Actions
from lorikeet.cluster.adapter_files import AdapterFiles
from lorikeet.cluster.asked import Asked, asked
from lorikeet.cluster.describe import cluster_state
from lorikeet.cluster.dispatcher import Dispatcher
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.hearing import gauges
from lorikeet.cluster.joining import Joining
from lorikeet.cluster.moves import KvSpeed, Moves
from lorikeet.cluster.orchestrator import Known
from lorikeet.cluster.placer import Placer
from lorikeet.cluster.placing import PlacementService
from lorikeet.cluster.replica import Replica
from lorikeet.cluster.routing.base import Router
from lorikeet.cluster.tables import RoutingTable
from lorikeet.cluster.tasks import Tasks
from lorikeet.cluster.transport import Transport
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, FinishReason
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import Abort, EngineStats, Hello, Progress, StepOutputs
from lorikeet.core.request import Request
from lorikeet.engine.connection import EngineError, EngineHost
from lorikeet.engine.keeper import EngineKeeper
from lorikeet.engine.streams import RequestHandle, Streams
from lorikeet.engine.views import ClusterState, EngineView

log = structlog.get_logger("lorikeet")

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
_DRAIN_CHECK_S = 0.05


class ClusterClient:
    """Many engines; see ``lorikeet.engine.client.Engines``.

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

    _hello: Hello

    def __init__(
        self,
        settings: Settings,
        hosts: Callable[[ReplicaId], EngineHost],
        transport: Transport,
        placement: PlacementService,
        router: Router,
        period_s: float,
        prefetch: bool = False,
        kv_speed: KvSpeed | None = None,
    ) -> None:
        self.wanted: int | None = None
        self._settings = settings
        self._hosts = hosts
        self._context = zmq.asyncio.Context()
        self._replicas: dict[ReplicaId, Replica] = {}
        self._numbers = count()
        self._streams = Streams()
        self._dispatcher = Dispatcher(router, prefetch=prefetch)
        self._placer = Placer(placement, period_s, self._follow)
        self._files = AdapterFiles(transport, self._dispatcher, self._replicas, self._do)
        self._joining = Joining(self._dispatcher, self._files, settings.engine, self._do)
        self._moves = Moves(self._streams, self._replicas, self._hand_on, kv_speed or KvSpeed())
        self._failure: EngineError | None = None
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []
        self._on_stats: list[Callable[[ReplicaId, EngineStats], None]] = []
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = [self._placer.run]
        self._tasks = Tasks()

    # --- the face of an engine's client --------------------------------------------------------------

    @property
    def hello(self) -> Hello:
        """Sizes of one replica; they are the same on all."""
        return self._hello

    @property
    def alive(self) -> bool:
        """Whether any replica is ready right now."""
        return any(replica.keeper.alive for replica in self._replicas.values())

    @property
    def views(self) -> Mapping[ReplicaId, EngineView]:
        """Every replica by its id, once it has started."""
        return {replica_id: replica.keeper for replica_id, replica in self._replicas.items() if replica.epoch}

    async def start(self, on_progress: Callable[[Progress], None]) -> Hello:
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
        return self.hello

    def submit(self, request: Request) -> RequestHandle:
        """See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        handle = self._streams.open(request, self._abort)
        self._placer.arrived(request.digest, len(request.prompt_token_ids))
        self._do(self._arrive(handle))
        return handle

    def know_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """See ``Engines``; they come to a replica when they are first asked for there."""
        new = tuple(refs)
        self._files.know(new)
        known = [Known(ref.digest, ref.max_rank, ref.weight_bytes) for ref in new]
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
        keeper = EngineKeeper(replica_id, self._hosts(replica_id), self._context, encoded, self)
        replica = self._replicas[replica_id] = Replica(keeper)
        try:
            self._hello = await keeper.start(on_progress)
        except BaseException:
            self._replicas.pop(replica_id, None)
            self._files.lost(replica_id)
            keeper.host.close()
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

    def _has_others(self, replica: Replica) -> bool:
        """Whether a replica may leave: another has started, which does not leave."""
        return any(self._replicas[other] is not replica for other in self.staying)

    async def _place(self) -> None:
        """Place on the replicas that there are: also on those whose engine is being started again."""
        if there := self.staying:
            await self._placer.set_replicas(there)

    def _leave(self, replica: Replica, *, died: bool = False, code: int | None = None) -> None:
        """Let a replica's requests go on elsewhere; in its death they had a part, perhaps."""
        for digest in replica.drops:
            replica.drops.ended(digest, 0)
        if not replica.is_joined:
            return
        replica.is_joined = False
        actions, homeless = self._dispatcher.leave(replica.keeper.replica)
        todo = [actions]
        for handle in [self._streams[request_id] for request_id in homeless if request_id in self._streams]:
            was_there, handle.replica = handle.replica is not None, None
            self._moves.forget(handle.request.request_id)
            if not (died and was_there) or self._streams.died(handle, code):
                todo.append(self._arrive(handle))
        for actions in todo:  # not before: an adapter that is being dropped seems unused while its requests are nowhere
            self._do(actions)

    # --- what keepers tell ---------------------------------------------------------------------------

    def engine_told(self, keeper: EngineKeeper, outputs: StepOutputs) -> None:
        """Hand tokens and events on, and learn from them."""
        replica_id, now = keeper.replica, time.monotonic()
        replica = self._replicas.get(replica_id)
        if replica is None or self._failure is not None:
            return  # it was removed, or all are, and says its last words
        outputs = self._streams.current(replica_id, outputs)
        for handle, finished in self._streams.take(outputs):
            self._moves.forget(handle.request.request_id)
            if finished.reason in _COMPLETE:
                self._placer.answered(handle.request.digest, len(handle.token_ids))
        for event in outputs.adapter_events:
            replica.hear(event)
            for on_event in self._on_adapter_event:
                on_event(event)
        if replica.is_joined:
            self._do(self._dispatcher.hear(replica_id, outputs, now))
            if outputs.stats is not None:
                told = gauges(replica_id, replica.epoch, outputs.stats, keeper.hello.block_size)
                self._do(self._dispatcher.gauges(told, now))
        for departed in outputs.departed:
            self._moves.departed(departed)
        if outputs.stats is not None:
            for on_stats in self._on_stats:
                on_stats(replica_id, outputs.stats)

    def engine_died(self, keeper: EngineKeeper, code: int | None) -> None:
        """Let its requests go on elsewhere, or wait if there is nowhere."""
        if (replica := self._replicas.get(keeper.replica)) is not None:
            log.warning("a replica died", replica=keeper.replica, code=code)
            self._leave(replica, died=True, code=code)

    def engine_back(self, keeper: EngineKeeper) -> None:
        """Send it requests again."""
        if (replica := self._replicas.get(keeper.replica)) is not None:
            self._tasks.run(self._joining.join(replica))

    def engine_lost(self, keeper: EngineKeeper, failure: EngineError) -> None:
        """Go on without it; if it was the last, nobody will answer any more."""
        replica = self._replicas.pop(keeper.replica, None)
        if replica is None:
            return
        log.error("a replica is given up", replica=keeper.replica, reason=str(failure))
        self._leave(replica)
        self._files.lost(keeper.replica)
        self._tasks.run(keeper.close())  # from a task of its own: the keeper waits for whoever tells this
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

    def _asked(self, handle: RequestHandle) -> Asked:
        request = msgspec.structs.replace(handle.request, output_token_ids=handle.token_ids)
        return asked(request, self.hello.block_size if self._dispatcher.router.wants_keys else None)

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
            self._replicas[replica_id].keeper.send(message)

    def _abort(self, handle: RequestHandle, is_complete: bool) -> None:
        request_id = handle.request.request_id
        if request_id in self._streams and self._streams[request_id] is handle:
            if handle.replica is not None:
                self._replicas[handle.replica].keeper.send(Abort(request_id))
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
