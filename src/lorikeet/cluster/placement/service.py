"""Defines the interface through which a controller requests placements.

:class:`PlacementService` is an orchestrator, in this process or elsewhere. :class:`PlacementClient` reports arrivals
and answers to the orchestrator, and passes on the routing tables that it returns.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec
import structlog

from lorikeet.cluster.placement.demand import EARLY_PLACEMENTS
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts


class OrchestratorUnavailable(RuntimeError):
    """The orchestrator does not answer. The controller keeps its last routing table."""


class PlacementService(Protocol):
    """Defines an orchestrator, in this process or elsewhere.

    Every call returns the current table, which is the same object until the table changes.

    Raises:
        OrchestratorUnavailable: the orchestrator does not answer in time. Any call can raise this error.
    """

    async def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """Place new adapters."""
        ...

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Remove an adapter."""
        ...

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Replace the list of replicas, and place adapters again."""
        ...

    async def period(self, report: DemandReport) -> RoutingTable:
        """Count a demand report, and place adapters again; see ``Orchestrator``."""
        ...

    async def load(self) -> float | None:
        """Return the number of replicas that the demand fills; see ``Orchestrator``. This call returns no table."""
        ...


class LocalPlacementService:
    """Runs an orchestrator in this process, on another thread, one call after the other."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lock = asyncio.Lock()

    async def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        """Place new adapters."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.register, tuple(adapters), time.monotonic())

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        """Remove an adapter."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.drop, adapter, time.monotonic())

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        """Replace the list of replicas, and place adapters again."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.set_replicas, replicas, time.monotonic())

    async def period(self, report: DemandReport) -> RoutingTable:
        """Count a demand report, and place adapters again."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.period, report, time.monotonic())

    async def load(self) -> float | None:
        """Return the number of replicas that the demand fills."""
        async with self._lock:
            return await asyncio.to_thread(self._orchestrator.load, time.monotonic())


log = structlog.get_logger("lorikeet")

_Call = Callable[[], Awaitable[RoutingTable]]


class PlacementClient:
    """Sends demand and changes to an orchestrator, and passes on its tables.

    While the orchestrator is unavailable, the last table stays in use. Changes that it missed are sent before newer
    changes, because of two calls for one adapter the later must win. Of the missed demand, only one period is sent with
    the newest demand, because a restarted orchestrator would count all of it as one period.

    Args:
        service: the orchestrator.
        period_s: seconds between two placements, except for early placements in the first period.
        on_table: called with every table, in order.

    Attributes:
        table: the last table.
        costs: costs of a replica for the report of the next period; None if they have not changed.
    """

    def __init__(self, service: PlacementService, period_s: float, on_table: Callable[[RoutingTable], None]) -> None:
        self.table = RoutingTable(0, {})
        self.costs: ReplicaCosts | None = None
        self._service = service
        self._period_s = period_s
        self._on_table = on_table
        self._lock = asyncio.Lock()
        self._missed: list[_Call] = []
        self._arrivals: list[tuple[AdapterDigest | None, int]] = []
        self._answers: list[tuple[AdapterDigest | None, int]] = []
        self._unreported = DemandReport()  # demand of the last report that failed
        self._ended = asyncio.Event()
        self._has_arrivals = asyncio.Event()

    def arrived(self, adapter: AdapterDigest | None, prompt_tokens: int) -> None:
        """Count a request that has arrived. ``adapter`` is None for the base model."""
        self._arrivals.append((adapter, prompt_tokens))
        self._has_arrivals.set()

    def answered(self, adapter: AdapterDigest | None, output_tokens: int) -> None:
        """Count a complete answer."""
        self._answers.append((adapter, output_tokens))

    async def register(self, adapters: Sequence[AdapterInfo]) -> None:
        """Place new adapters."""
        await self._submit(partial(self._service.register, adapters))

    async def drop(self, adapter: AdapterDigest) -> None:
        """Remove an adapter."""
        await self._submit(partial(self._service.drop, adapter))

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> None:
        """Place all adapters on these replicas."""
        await self._submit(partial(self._service.set_replicas, replicas))

    async def period(self) -> None:
        """Wait until the current period has ended and its demand has been reported."""
        await self._ended.wait()

    async def run(self) -> None:
        """Report the demand of every period. The first request begins a period, which also has early reports."""
        began_s = await self._first_arrival_s()
        for part in EARLY_PLACEMENTS:
            await asyncio.sleep(began_s + part * self._period_s - time.monotonic())
            await self._send_report(self._take_report(is_period_end=False))
        await asyncio.sleep(began_s + self._period_s - time.monotonic())
        while True:
            await self._send_report(self._take_report(is_period_end=True))
            await asyncio.sleep(self._period_s)

    async def _first_arrival_s(self) -> float:
        """Wait for the first request, end the period before it, and return the time of its arrival."""
        while not self._has_arrivals.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._has_arrivals.wait()
            if not self._has_arrivals.is_set():
                await self._send_report(DemandReport())
        began_s = time.monotonic()
        await self._send_report(DemandReport())
        return began_s

    def _take_report(self, is_period_end: bool) -> DemandReport:
        arrivals = self._arrivals
        self._arrivals = []
        answers = self._answers
        self._answers = []
        costs = self.costs
        self.costs = None
        return DemandReport(tuple(arrivals), tuple(answers), is_period_end, costs)

    async def _send_report(self, report: DemandReport) -> None:
        """Send a demand report. If the report fails, that is logged, and the demand may or may not be counted."""
        before = self._unreported
        self._unreported = DemandReport()
        combined = DemandReport(
            before.arrivals + report.arrivals,
            before.answers + report.answers,
            report.is_period_end,
            report.costs or before.costs,
        )
        try:
            async with self._lock:
                if not (await self._catch_up() and await self._follow(partial(self._service.period, combined))):
                    self._unreported = msgspec.structs.replace(report, costs=combined.costs)
                elif report.is_period_end:
                    self._ended.set()  # Wake all current waiters. Later waiters wait for the next period.
                    self._ended.clear()
        except Exception:
            log.exception("placement failed")

    async def _submit(self, call: _Call) -> None:
        async with self._lock:
            if not (await self._catch_up() and await self._follow(call)):
                self._missed.append(call)

    async def _catch_up(self) -> bool:
        """Repeat the missed calls in order. Return False if the orchestrator is still unavailable."""
        while self._missed:
            try:
                if not await self._follow(self._missed[0]):
                    return False
            except Exception:
                log.exception("a call that the orchestrator missed failed again")
            del self._missed[0]
        return True

    async def _follow(self, call: _Call) -> bool:
        """Make a call and pass on the table that it returns.

        Return False if the orchestrator is unavailable. The caller holds the lock.
        """
        try:
            self.table = await call()
        except OrchestratorUnavailable as error:
            log.warning("orchestrator unavailable: the last routing table stays in use", reason=str(error))
            return False
        self._on_table(self.table)
        return True
