"""Runs the orchestrator as a Ray actor, and implements its client in the controller."""

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
from lorikeet.cluster.ray.errors import reason_of
from lorikeet.cluster.ray.host import environment
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
    """Holds a response of the actor.

    Attributes:
        incarnation: incarnation of the actor, which changes with every restart.
        table: the current routing table.
    """

    incarnation: str
    table: RoutingTable


class OrchestratorActor:
    """Runs an orchestrator; :class:`RayPlacement` makes it a Ray actor. Calls run one after the other.

    The controller names the incarnation that it calls. If the actor has another incarnation, the call changes nothing
    and returns the actor's incarnation. A restarted actor may lack the adapters of the change, and may have seen only
    the end of a period, which must not count as a whole period.

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
        """Replace the state by the controller's state; see ``PersistentOrchestrator``.

        Any incarnation accepts this call.
        """
        return PlacementReply(self._incarnation, self._orchestrator.begin(adapters, replicas, table))

    def register(self, incarnation: str, adapters: Iterable[AdapterInfo]) -> PlacementReply:
        """Place new adapters."""
        return self._if_current(incarnation, lambda: self._orchestrator.register(adapters))

    def drop(self, incarnation: str, adapter: AdapterDigest) -> PlacementReply:
        """Remove an adapter."""
        return self._if_current(incarnation, lambda: self._orchestrator.drop(adapter))

    def set_replicas(self, incarnation: str, replicas: Sequence[ReplicaId]) -> PlacementReply:
        """Replace the list of replicas, and place adapters again."""
        return self._if_current(incarnation, lambda: self._orchestrator.set_replicas(replicas))

    def period(self, incarnation: str, report: DemandReport) -> PlacementReply:
        """Count a demand report, and place adapters again."""
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
    """Calls an orchestrator that is a Ray actor; implements ``lorikeet.cluster.placement.service.PlacementService``.

    Ray restarts the actor when it dies, and the actor continues from the registry. This client remembers the adapters,
    the replicas and the last table, and sends everything that the actor missed. So the state is complete even if the
    registry was unavailable. The demand of the period in which the actor restarts is not counted. Calls are made one
    after the other.

    The actor runs on the controller's machine, because only the controller uses it, and a SQLite registry is a file on
    this machine.

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
            max_task_retries=0,  # A new incarnation must receive the state before the call is repeated.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": environment(1)},
        )
        self.actor: Any = options.remote(make, registry_url, cluster)
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._synced = ""  # incarnation that has received the whole state
        self._is_new = False  # whether that incarnation received the state after the last period
        self._known: dict[AdapterDigest, AdapterInfo] | None = None  # None until the first call
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
        """Remove an adapter."""
        async with self._lock:
            if self._known is not None:
                self._known.pop(adapter, None)
            return await self._call("drop", adapter)

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Replace the list of replicas, and place adapters again."""
        async with self._lock:
            self._replicas = tuple(replicas)
            return await self._call("set_replicas", self._replicas)

    async def period(self, report: DemandReport) -> RoutingTable:
        """Count a demand report, and place adapters again."""
        async with self._lock:
            if self._is_new and report.arrivals:
                self._synced = ""  # The new incarnation's period is shorter than the report's.
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
        """Call the actor; if it has a new incarnation, send the whole state.

        The caller holds the lock and has recorded the change.
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
            table = before  # An identical object shows that nothing has changed.
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
