"""Where a head asks for placements: an orchestrator in its own process, or one elsewhere."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from lorikeet.cluster.orchestrator import Known, Orchestrator, Seen
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId


class OrchestratorGone(RuntimeError):
    """The orchestrator does not answer. Heads go on by the table that they have."""


class PlacementService(Protocol):
    """An orchestrator, wherever it is. Every call returns the table that counts then, the same until it changes.

    Raises:
        OrchestratorGone: by every call, if it does not answer for a while.
    """

    async def know(self, adapters: Iterable[Known]) -> RoutingTable:
        """Place adapters that are new."""
        ...

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Forget an adapter."""
        ...

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Take the replicas that there are from now on."""
        ...

    async def period(self, seen: Seen) -> RoutingTable:
        """Count what a head has seen in a period, and place anew; see ``Orchestrator``."""
        ...

    async def load(self) -> float | None:
        """Return, instead of a table, how many replicas the demand fills; see ``Orchestrator``."""
        ...


class InProcess:
    """An orchestrator in this process; it places on another thread, one call after the other."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lock = asyncio.Lock()

    async def know(self, adapters: Iterable[Known]) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.know, tuple(adapters), time.monotonic())

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.drop, adapter, time.monotonic())

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.set_replicas, replicas, time.monotonic())

    async def period(self, seen: Seen) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.period, seen, time.monotonic())

    async def load(self) -> float | None:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.load, time.monotonic())
