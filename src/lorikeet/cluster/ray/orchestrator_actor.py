"""The orchestrator as a Ray actor, and how a head asks it."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lorikeet.cluster.controller.persistent_orchestrator import PersistentOrchestrator, StateSaver
from lorikeet.cluster.controller.registry import ClusterRegistry
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator, OrchestratorState
from lorikeet.cluster.placement.service import OrchestratorUnavailable
from lorikeet.cluster.ray.host import environment, reason_of
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.ids import AdapterDigest, ReplicaId

_PATIENCE_S = 30.0
_TRY_AGAIN_S = 0.2

MakeOrchestrator = Callable[[float], Orchestrator]
"""Makes an orchestrator whose first period starts at a time; goes to another process, so it holds plain values."""


class PlacementReply(NamedTuple):
    """An answer of the actor.

    Attributes:
        incarnation: of the actor; another after each restart.
        table: that counts now.
    """

    incarnation: str
    table: RoutingTable


class OrchestratorActor:
    """Made a Ray actor by :class:`RayPlacement`. One call after the other, each on the last one's outcome.

    A head names the incarnation that it talks to. Another one changes nothing and says who it is: it may not know what
    the change is about, and a period that it has seen a moment of must not end with the requests of a whole one.

    Args:
        make: makes the orchestrator, at every restart anew.
        registry_url: where its state is kept.
        cluster: identity of the cluster there.
    """

    def __init__(self, make: MakeOrchestrator, registry_url: str, cluster: str) -> None:
        self._incarnation = uuid.uuid4().hex
        clock = MonotonicClock()
        saver = StateSaver(ClusterRegistry(registry_url, cluster))
        self._kept = PersistentOrchestrator(make(clock.now()), saver, clock)

    def __repr__(self) -> str:
        """Name it: Ray puts this before each line that it writes."""
        return "orchestrator"

    def begin(
        self,
        adapters: Iterable[AdapterInfo] | None,
        replicas: Sequence[ReplicaId] | None,
        table: RoutingTable | None,
    ) -> PlacementReply:
        """See ``PersistentOrchestrator``. Any incarnation does this."""
        return PlacementReply(self._incarnation, self._kept.begin(adapters, replicas, table))

    def know(self, told: str, adapters: Iterable[AdapterInfo]) -> PlacementReply:
        """See ``PersistentOrchestrator``."""
        return self._if_told(told, lambda: self._kept.know(adapters))

    def drop(self, told: str, adapter: AdapterDigest) -> PlacementReply:
        """See ``PersistentOrchestrator``."""
        return self._if_told(told, lambda: self._kept.drop(adapter))

    def set_replicas(self, told: str, replicas: Sequence[ReplicaId]) -> PlacementReply:
        """See ``PersistentOrchestrator``."""
        return self._if_told(told, lambda: self._kept.set_replicas(replicas))

    def period(self, told: str, seen: DemandReport) -> PlacementReply:
        """See ``PersistentOrchestrator``."""
        return self._if_told(told, lambda: self._kept.period(seen))

    def load(self) -> float | None:
        """See ``PersistentOrchestrator``."""
        return self._kept.load()

    def state(self) -> OrchestratorState:
        """See ``PersistentOrchestrator``."""
        return self._kept.state()

    def _if_told(self, told: str, change: Callable[[], object]) -> PlacementReply:
        if told == self._incarnation:
            change()
        return PlacementReply(self._incarnation, self._kept.table)


class RayPlacement:
    """A :class:`~lorikeet.cluster.placement.service.PlacementService` whose orchestrator is a Ray actor.

    Ray restarts the actor when it dies; it goes on from the registry. Whatever it missed, it is told by this head,
    which remembers adapters, replicas and the last table: so it makes no difference to the head whether the registry
    had all of it, or was gone. What was asked for in the period of a restart is not counted, whichever call finds the
    new incarnation. Calls are made one after the other.

    The actor runs on this head's machine: it is no use without the head, and a SQLite registry is a file here.

    Args:
        make: makes the orchestrator.
        registry_url: where its state is kept.
        cluster: identity of the cluster there.
        patience_s: how long a call is tried again while the actor does not answer.

    Attributes:
        actor: its handle.
    """

    def __init__(
        self, make: MakeOrchestrator, registry_url: str, cluster: str, patience_s: float = _PATIENCE_S
    ) -> None:
        here = ray.get_runtime_context().get_node_id()
        options = ray.remote(OrchestratorActor).options(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,  # a new incarnation is told what it missed before it is asked again
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": environment(1)},
        )
        self.actor: Any = options.remote(make, registry_url, cluster)
        self._patience_s = patience_s
        self._lock = asyncio.Lock()
        self._told = ""  # incarnation that knows all that this head does
        self._is_new = False  # it has been told that since the last period
        self._known: dict[AdapterDigest, AdapterInfo] | None = None  # nobody has said yet
        self._replicas: tuple[ReplicaId, ...] | None = None
        self._table: RoutingTable | None = None

    async def know(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """See ``PlacementService``. What an earlier head knew is dropped, unless the first call names it."""
        new = tuple(adapters)
        async with self._lock:
            if self._known is None:
                self._known, self._told = {}, ""
            self._known |= {each.adapter: each for each in new}
            return await self._call("know", new)

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            if self._known is not None:
                self._known.pop(adapter, None)
            return await self._call("drop", adapter)

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            self._replicas = tuple(replicas)
            return await self._call("set_replicas", self._replicas)

    async def period(self, seen: DemandReport) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            if self._is_new and seen.arrivals:
                self._told = ""  # its period is younger than what was seen, and begins anew
            table = await self._call("period", seen)
            self._is_new = False
            return table

    async def load(self) -> float | None:
        """See ``PlacementService``."""
        async with self._lock:
            load: float | None = await self._ask("load")
            return load

    async def state(self) -> OrchestratorState:
        """Return all that the orchestrator goes on from.

        Raises:
            OrchestratorUnavailable: it does not answer.
        """
        state: OrchestratorState = await self._ask("state")
        return state

    def close(self) -> None:
        """End the actor; what it saved stays."""
        ray.kill(self.actor)

    async def _call(self, method: str, argument: object) -> RoutingTable:
        """Ask the incarnation that was told everything; tell another. Under the lock, with the change remembered."""
        placed: PlacementReply = await self._ask(method, self._told, argument)
        if placed.incarnation != self._told:
            adapters = None if self._known is None else tuple(self._known.values())
            placed = await self._ask("begin", adapters, self._replicas, self._table)
            self._told, self._is_new = placed.incarnation, True
        before, table = self._table, placed.table
        if before is not None and (before.epoch, before.shares) == (table.epoch, table.shares):
            table = before  # not the copy that was sent: who follows tables sees that nothing has changed
        self._table = table
        return table

    async def _ask(self, method: str, *arguments: object) -> Any:
        """Call the actor, again and again while it is being restarted."""
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await getattr(self.actor, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed or time.monotonic() > until_s:
                    raise OrchestratorUnavailable(f"the orchestrator does not answer: {reason_of(error)}") from error
            await asyncio.sleep(_TRY_AGAIN_S)
