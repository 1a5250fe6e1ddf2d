"""Decides from the reported demand which replicas serve which adapters.

Source: LoRAServe, section IV (its cluster orchestrator).
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import DemandEstimator, DemandState
from lorikeet.cluster.placement.operating_points import Points
from lorikeet.cluster.placement.scaling import load_of
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts

_BASE = AdapterDigest("")
"""Digest under which the demand for the base model is counted. Placement policies do not get it."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """Holds the properties of an adapter that placement needs.

    Attributes:
        adapter: version of the adapter.
        rank: largest rank of the adapter.
        size_bytes: size of the weights.
    """

    adapter: AdapterDigest
    rank: int
    size_bytes: int


class DemandReport(msgspec.Struct, frozen=True):
    """Holds the demand since the last report of a controller.

    Attributes:
        arrivals: adapter (None: the base model) and prompt tokens of each request that arrived.
        answers: adapter and tokens of each complete answer.
        is_period_end: whether the period has ended; otherwise this is an early report (see ``EARLY_PLACEMENTS``).
        costs: measured costs of a replica; None if they have not changed.
    """

    arrivals: tuple[tuple[AdapterDigest | None, int], ...] = ()
    answers: tuple[tuple[AdapterDigest | None, int], ...] = ()
    is_period_end: bool = True
    costs: ReplicaCosts | None = None


class OrchestratorState(msgspec.Struct, frozen=True):
    """Holds the state from which an orchestrator continues after a restart.

    Attributes:
        epoch, shares: content of the routing table.
        demand: counts.
        policy: name of the placement policy that made the table.
        writer: id of the process that saved the state; empty until the first save.
    """

    epoch: int
    shares: dict[AdapterDigest, tuple[tuple[ReplicaId, float], ...]]
    demand: DemandState
    policy: str = ""
    writer: str = ""


class Orchestrator:
    """Places adapters when a period ends, and when adapters or replicas come or go.

    Args:
        placement: the policy.
        replicas: the replicas to place on.
        now: start of the first period, seconds.
        points: operating points of a replica; None if the load is not needed.
        policy: name of the placement policy. A policy of another name does not continue from the table.

    Attributes:
        table: the current placement.

    Raises:
        ValueError: no replica.
    """

    def __init__(
        self,
        placement: PlacementPolicy,
        replicas: Sequence[ReplicaId],
        now: float,
        points: Points | None = None,
        policy: str = "",
    ) -> None:
        self.table = RoutingTable(0, {})
        self._placement = placement
        self._set_replicas(replicas)
        self._points = points
        self._policy = policy
        self._demand = DemandEstimator(now, by_adapter=placement.extrapolates)
        self._begin_base(now)

    def register(self, adapters: Iterable[AdapterInfo], now: float) -> RoutingTable:
        """Place new adapters. Known adapters change nothing."""
        for known in adapters:
            self._demand.register(known.adapter, known.rank, known.size_bytes)
        return self._place(now)

    def drop(self, adapter: AdapterDigest, now: float) -> RoutingTable:
        """Remove an adapter. An unknown adapter changes nothing."""
        if adapter in self._demand:
            self._demand.drop(adapter)
        return self._place(now)

    def set_replicas(self, replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Replace the list of replicas, and place adapters again.

        Raises:
            ValueError: no replica.
        """
        self._set_replicas(replicas)
        return self._place(now)

    def record(self, report: DemandReport) -> None:
        """Count the demand in a report."""
        for adapter, prompt_tokens in report.arrivals:
            if adapter is None:
                self._base.arrived(_BASE, prompt_tokens)
            elif adapter in self._demand:  # The adapter may have been dropped while the report was in flight.
                self._demand.arrived(adapter, prompt_tokens)
        for adapter, output_tokens in report.answers:
            if adapter is None:
                self._base.finished(_BASE, output_tokens)
            else:
                self._demand.finished(adapter, output_tokens)

    def period(self, report: DemandReport, now: float) -> RoutingTable:
        """Count the demand in a report and place adapters again, for the next period or early in the first period."""
        self.record(report)
        if report.costs is not None:
            self._learn(report.costs, report)
        if report.is_period_end:
            return self.close_period(now)
        return self._place(now) if self._placement.looks_early else self.table

    def _learn(self, costs: ReplicaCosts, report: DemandReport) -> None:
        """Update the policy and the operating points with the costs and requests of a report."""
        prompts = [tokens for _, tokens in report.arrivals]
        answers = [tokens for _, tokens in report.answers]
        lengths = fmean(prompts or (0,)), fmean(answers or (0,))
        self._placement.learn(costs, *lengths)
        if self._points is not None:
            self._points.learn(costs, *lengths)

    def close_period(self, now: float) -> RoutingTable:
        """End a period of demand, and place adapters for the next.

        Raises:
            ValueError: no time has passed since the last call.
        """
        self._demand.close(now)
        self._base.close(now)
        self._has_closed = True
        return self._place(now)

    def load(self, now: float) -> float | None:
        """Return the number of replicas that the demand fills; None without operating points or in the first period."""
        if self._points is None or not self._has_closed:
            return None
        return load_of((*self._demand.demands(now), *self._base.demands(now)), self._points)

    def state(self) -> OrchestratorState:
        """Return the state that another orchestrator needs to continue."""
        shares = {
            adapter: tuple((each.replica, each.share) for each in its_shares)
            for adapter, its_shares in self.table.shares.items()
        }
        return OrchestratorState(self.table.epoch, shares, self._demand.state(), self._policy)

    def resume(self, state: OrchestratorState, now: float, replicas: Sequence[ReplicaId] | None = None) -> RoutingTable:
        """Continue from the state of an earlier orchestrator, possibly with other replicas.

        A table that another policy made is discarded. A policy that keeps adapters where they are would otherwise keep
        it.
        """
        if replicas is not None:
            self._set_replicas(replicas)
        kept = state.shares if state.policy == self._policy else {}
        shares = {adapter: tuple(ReplicaShare(*each) for each in its_shares) for adapter, its_shares in kept.items()}
        self._placement.resume(RoutingTable(state.epoch, shares))
        self._demand.resume(state.demand, now)
        self._begin_base(now)
        return self._place(now)

    def _set_replicas(self, replicas: Sequence[ReplicaId]) -> None:
        if not replicas:
            raise ValueError("A placement needs a replica")
        self._replicas = tuple(replicas)

    def _begin_base(self, now: float) -> None:
        """Count the base model's demand from zero.

        This demand is not saved, so after a restart it is known after one period.
        """
        self._base = DemandEstimator(now)
        self._base.register(_BASE, rank=0, size_bytes=0)
        self._has_closed = False

    def _place(self, now: float) -> RoutingTable:
        demands = self._demand.demands(now) if self._placement.reads_demand else self._demand.adapters()
        self.table = self._placement.place(demands, self._replicas, now)
        return self.table
