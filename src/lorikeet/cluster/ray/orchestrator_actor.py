"""The orchestrator as a Ray actor, and its client in the controller."""

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

_CALL_TIMEOUT_S = 30.0
_RETRY_S = 0.2

MakeOrchestrator = Callable[[float], Orchestrator]
"""Builds an orchestrator whose first period starts at a given time.

It is sent to another process, so it holds plain values only.
"""


class PlacementReply(NamedTuple):
    """A response of the actor.

    Attributes:
        incarnation: incarnation of the actor; changes with every restart.
        table: the current routing table.
    """

    incarnation: str
    table: RoutingTable


class OrchestratorActor:
    """Runs an orchestrator; :class:`RayPlacement` makes it a Ray actor. Calls run one after the other.

    The controller names the incarnation that it calls. Another incarnation changes nothing and returns its own name: it
    may lack what the change refers to, and a period that it has only seen the end of must not be closed with the
    requests of a whole one.

    Args:
        make: builds the orchestrator after every start.
        registry_url: registry for the orchestrator's state.
        cluster: identity of the cluster in the registry.
    """

    def __init__(self, make: MakeOrchestrator, registry_url: str, cluster: str) -> None:
        self._incarnation = uuid.uuid4().hex
        clock = MonotonicClock()
        saver = StateSaver(ClusterRegistry(registry_url, cluster))
        self._orchestrator = PersistentOrchestrator(make(clock.now()), saver, clock)

    def __repr__(self) -> str:
        """Return the prefix that Ray writes before each output line of the actor."""
        return "orchestrator"

    def begin(
        self,
        adapters: Iterable[AdapterInfo] | None,
        replicas: Sequence[ReplicaId] | None,
        table: RoutingTable | None,
    ) -> PlacementReply:
        """Take over the controller's state; see ``PersistentOrchestrator``. Works for any incarnation."""
        return PlacementReply(self._incarnation, self._orchestrator.begin(adapters, replicas, table))

    def register(self, incarnation: str, adapters: Iterable[AdapterInfo]) -> PlacementReply:
        """Place new adapters."""
        return self._if_current(incarnation, lambda: self._orchestrator.register(adapters))

    def drop(self, incarnation: str, adapter: AdapterDigest) -> PlacementReply:
        """Forget an adapter."""
        return self._if_current(incarnation, lambda: self._orchestrator.drop(adapter))

    def set_replicas(self, incarnation: str, replicas: Sequence[ReplicaId]) -> PlacementReply:
        """Place adapters on these replicas from now on."""
        return self._if_current(incarnation, lambda: self._orchestrator.set_replicas(replicas))

    def period(self, incarnation: str, report: DemandReport) -> PlacementReply:
        """Count a demand report, and place again."""
        return self._if_current(incarnation, lambda: self._orchestrator.period(report))

    def load(self) -> float | None:
        """Return the number of replicas that the demand fills."""
        return self._orchestrator.load()

    def state(self) -> OrchestratorState:
        """Return the state of the orchestrator."""
        return self._orchestrator.state()

    def _if_current(self, incarnation: str, change: Callable[[], object]) -> PlacementReply:
        if incarnation == self._incarnation:
            change()
        return PlacementReply(self._incarnation, self._orchestrator.table)


class RayPlacement:
    """A :class:`~lorikeet.cluster.placement.service.PlacementService` whose orchestrator is a Ray actor.

    Ray restarts the actor when it dies, and it continues from the registry. This client sends it what it missed,
    because it remembers the adapters, the replicas and the last table. So it makes no difference whether the registry
    had saved everything, or was unavailable. The demand of the period of a restart is not counted, whichever call finds
    the new incarnation. Calls are made one after the other.

    The actor runs on this machine: it is no use without the controller, and a SQLite registry is a file here.

    Args:
        make: builds the orchestrator.
        registry_url: registry for the orchestrator's state.
        cluster: identity of the cluster in the registry.
        timeout_s: seconds for which a call is retried while the actor does not answer.

    Attributes:
        actor: handle of the actor.
    """

    def __init__(
        self, make: MakeOrchestrator, registry_url: str, cluster: str, timeout_s: float = _CALL_TIMEOUT_S
    ) -> None:
        here = ray.get_runtime_context().get_node_id()
        options = ray.remote(OrchestratorActor).options(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,  # A new incarnation must be brought in sync before the call is repeated.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": environment(1)},
        )
        self.actor: Any = options.remote(make, registry_url, cluster)
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._synced = ""  # the incarnation that has received everything
        self._is_new = False  # whether it was brought in sync after the last period
        self._known: dict[AdapterDigest, AdapterInfo] | None = None  # None before the first call
        self._replicas: tuple[ReplicaId, ...] | None = None
        self._table: RoutingTable | None = None

    async def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """Place new adapters. The first call replaces all adapters that an earlier controller registered."""
        new = tuple(adapters)
        async with self._lock:
            if self._known is None:
                self._known = {}
                self._synced = ""
            self._known |= {each.adapter: each for each in new}
            return await self._call("register", new)

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Forget an adapter."""
        async with self._lock:
            if self._known is not None:
                self._known.pop(adapter, None)
            return await self._call("drop", adapter)

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Place adapters on these replicas from now on."""
        async with self._lock:
            self._replicas = tuple(replicas)
            return await self._call("set_replicas", self._replicas)

    async def period(self, report: DemandReport) -> RoutingTable:
        """Count a demand report, and place again."""
        async with self._lock:
            if self._is_new and report.arrivals:
                self._synced = ""  # Its period is shorter than the report, so it begins again.
            table = await self._call("period", report)
            self._is_new = False
            return table

    async def load(self) -> float | None:
        """Return the number of replicas that the demand fills."""
        async with self._lock:
            load: float | None = await self._ask("load")
            return load

    async def state(self) -> OrchestratorState:
        """Return the state of the orchestrator.

        Raises:
            OrchestratorUnavailable: the actor does not answer.
        """
        state: OrchestratorState = await self._ask("state")
        return state

    def close(self) -> None:
        """Kill the actor. Its saved state stays."""
        ray.kill(self.actor)

    async def _call(self, method: str, argument: object) -> RoutingTable:
        """Call the incarnation that is in sync; bring another one in sync.

        Needs the lock, and the change remembered.
        """
        placed: PlacementReply = await self._ask(method, self._synced, argument)
        if placed.incarnation != self._synced:
            adapters = None if self._known is None else tuple(self._known.values())
            placed = await self._ask("begin", adapters, self._replicas, self._table)
            self._synced = placed.incarnation
            self._is_new = True
        before = self._table
        table = placed.table
        if before is not None and (before.epoch, before.shares) == (table.epoch, table.shares):
            table = before  # The same object means that nothing has changed.
        self._table = table
        return table

    async def _ask(self, method: str, *arguments: object) -> Any:
        """Call the actor, and retry while it is being restarted."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return await getattr(self.actor, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed or time.monotonic() > until_s:
                    raise OrchestratorUnavailable(f"the orchestrator does not answer: {reason_of(error)}") from error
            await asyncio.sleep(_RETRY_S)
