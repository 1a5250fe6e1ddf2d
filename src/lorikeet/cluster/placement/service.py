"""How a controller asks for placements.

:class:`PlacementService` is an orchestrator in this process or elsewhere. :class:`PlacementClient` reports arrivals and
answers to it and follows the routing tables that come back; while the service is gone, the last table counts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog

from lorikeet.cluster.placement.demand import LOOKS
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId


class OrchestratorUnavailable(RuntimeError):
    """The orchestrator does not answer. Heads go on by the table that they have."""


class PlacementService(Protocol):
    """An orchestrator, wherever it is. Every call returns the table that counts then, the same until it changes.

    Raises:
        OrchestratorUnavailable: by every call, if it does not answer for a while.
    """

    async def know(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """Place adapters that are new."""
        ...

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Forget an adapter."""
        ...

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Take the replicas that there are from now on."""
        ...

    async def period(self, seen: DemandReport) -> RoutingTable:
        """Count what a head has seen in a period, and place anew; see ``Orchestrator``."""
        ...

    async def load(self) -> float | None:
        """Return, instead of a table, how many replicas the demand fills; see ``Orchestrator``."""
        ...


class LocalPlacementService:
    """An orchestrator in this process; it places on another thread, one call after the other."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lock = asyncio.Lock()

    async def know(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
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

    async def period(self, seen: DemandReport) -> RoutingTable:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.period, seen, time.monotonic())

    async def load(self) -> float | None:
        """See ``PlacementService``."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.load, time.monotonic())


log = structlog.get_logger("lorikeet")

_Call = Callable[[], Awaitable[RoutingTable]]


class PlacementClient:
    """See the module. While the orchestrator is gone, the last table counts.

    What it has missed it is told before anything newer: of two calls about one adapter the later must have the last
    word. Of what was asked for meanwhile it is told one period beside the newest: it may have been started anew, and
    then takes all that it is told for what one period asks.

    Args:
        service: the orchestrator.
        period_s: time between two placements, but for looks at the first period.
        on_table: called with every table, in the order in which they were made.

    Attributes:
        table: the last one.
    """

    def __init__(self, service: PlacementService, period_s: float, on_table: Callable[[RoutingTable], None]) -> None:
        self.table = RoutingTable(0, {})
        self._service = service
        self._period_s = period_s
        self._on_table = on_table
        self._lock = asyncio.Lock()
        self._missed: list[_Call] = []
        self._arrivals: list[tuple[AdapterDigest | None, int]] = []
        self._answers: list[tuple[AdapterDigest | None, int]] = []
        self._untold = DemandReport()  # what the last call that failed told anew
        self._ended = asyncio.Event()
        self._asked = asyncio.Event()

    def arrived(self, adapter: AdapterDigest | None, prompt_tokens: int) -> None:
        """A request has come; None: for the base model."""
        self._arrivals.append((adapter, prompt_tokens))
        self._asked.set()

    def answered(self, adapter: AdapterDigest | None, output_tokens: int) -> None:
        """A request has got its whole answer."""
        self._answers.append((adapter, output_tokens))

    async def know(self, adapters: Sequence[AdapterInfo]) -> None:
        """Have new adapters placed."""
        await self._ask(partial(self._service.know, adapters))

    async def drop(self, adapter: AdapterDigest) -> None:
        """Have an adapter placed no longer."""
        await self._ask(partial(self._service.drop, adapter))

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> None:
        """Have everything placed on these replicas."""
        await self._ask(partial(self._service.set_replicas, replicas))

    async def period(self) -> None:
        """Wait until the next period has ended, and the orchestrator knows what was seen in it."""
        await self._ended.wait()

    async def run(self) -> None:
        """Tell of every period, for ever. The first request begins one, of which it tells before its end, too."""
        began_s = await self._first_asked_s()
        for part in LOOKS:
            await asyncio.sleep(began_s + part * self._period_s - time.monotonic())
            await self._tell(self._seen(is_over=False))
        await asyncio.sleep(began_s + self._period_s - time.monotonic())
        while True:
            await self._tell(self._seen(is_over=True))
            await asyncio.sleep(self._period_s)

    async def _first_asked_s(self) -> float:
        """Wait for the first request, end the period before it, and return when it came."""
        while not self._asked.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._asked.wait()
            if not self._asked.is_set():
                await self._tell(DemandReport())
        began_s = time.monotonic()
        await self._tell(DemandReport())
        return began_s

    def _seen(self, is_over: bool) -> DemandReport:
        arrivals, self._arrivals = self._arrivals, []
        answers, self._answers = self._answers, []
        return DemandReport(tuple(arrivals), tuple(answers), is_over)

    async def _tell(self, seen: DemandReport) -> None:
        """Tell of a period, or its beginning. What fails is logged, and what was seen in it may count or not."""
        before, self._untold = self._untold, DemandReport()
        told = DemandReport(before.arrivals + seen.arrivals, before.answers + seen.answers, seen.is_over)
        try:
            async with self._lock:
                if not (await self._catch_up() and await self._follow(partial(self._service.period, told))):
                    self._untold = seen
                elif seen.is_over:
                    self._ended.set()  # wakes all who wait now; whoever comes later waits for the next one
                    self._ended.clear()
        except Exception:
            log.exception("a period of placement has failed")

    async def _ask(self, call: _Call) -> None:
        async with self._lock:
            if not (await self._catch_up() and await self._follow(call)):
                self._missed.append(call)

    async def _catch_up(self) -> bool:
        """Make the calls that were missed, in their order; False if the orchestrator is still gone."""
        while self._missed:
            try:
                if not await self._follow(self._missed[0]):
                    return False
            except Exception:
                log.exception("the orchestrator cannot be told what it has missed")
            del self._missed[0]
        return True

    async def _follow(self, call: _Call) -> bool:
        """Follow the table that a call returns; False if the orchestrator is gone. Under the lock."""
        try:
            self.table = await call()
        except OrchestratorUnavailable as error:
            log.warning("requests go on by the last placement", reason=str(error))
            return False
        self._on_table(self.table)
        return True
