"""The owner of placement: it hears what is asked for, and says which replicas serve which adapters.

Source: LoRAServe, section IV (its cluster orchestrator).
"""

from collections.abc import Iterable, Sequence

import msgspec

from lorikeet.cluster.placement.base import Placement
from lorikeet.cluster.placement.demand import DemandEstimator, DemandState
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.placement.scaling import load_of
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId

_BASE = AdapterDigest("")
"""Stands for the base model where its demand is counted, which no placement sees."""


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter as placement sees it.

    Attributes:
        adapter: its version.
        rank: its largest.
        size_bytes: of its weights.
    """

    adapter: AdapterDigest
    rank: int
    size_bytes: int


class DemandReport(msgspec.Struct, frozen=True):
    """What a head has seen since it told last.

    Attributes:
        arrivals: adapter (None: the base model) and prompt tokens of each request that came.
        answers: the same and tokens of each complete answer.
        is_over: the period is; else it goes on, and this is a look at its beginning (see ``LOOKS``).
    """

    arrivals: tuple[tuple[AdapterDigest | None, int], ...] = ()
    answers: tuple[tuple[AdapterDigest | None, int], ...] = ()
    is_over: bool = True


class OrchestratorState(msgspec.Struct, frozen=True):
    """What an orchestrator goes on from after a restart.

    Attributes:
        epoch, shares: of its table.
        demand: what it had counted.
        policy: name of the placement that made the table.
        writer: who stored it; empty before that.
    """

    epoch: int
    shares: dict[AdapterDigest, tuple[tuple[ReplicaId, float], ...]]
    demand: DemandState
    policy: str = ""
    writer: str = ""


class Orchestrator:
    """See the module. It decides when it is told something: by the end of a period, and when replicas come or go.

    Args:
        placement: the policy.
        now: start of the first period, seconds.
        points: of a replica; None if nobody asks for the load.
        policy: name of the placement: one of another name does not go on from its table.

    Attributes:
        table: the placement that counts.
    """

    def __init__(
        self, placement: Placement, now: float, points: OperatingPoints | None = None, policy: str = ""
    ) -> None:
        self.table = RoutingTable(0, {})
        self._placement = placement
        self._points = points
        self._policy = policy
        self._demand = DemandEstimator(now)
        self._begin_base(now)

    def know(self, adapters: Iterable[AdapterInfo], now: float) -> RoutingTable:
        """Place adapters that are new; those that are known already change nothing."""
        for known in adapters:
            self._demand.know(known.adapter, known.rank, known.size_bytes)
        return self._place(now)

    def drop(self, adapter: AdapterDigest, now: float) -> RoutingTable:
        """Forget an adapter; one that is not known changes nothing."""
        if adapter in self._demand:
            self._demand.drop(adapter)
        return self._place(now)

    def set_replicas(self, replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Take the replicas that there are from now on, and place anew.

        Raises:
            ValueError: there is none.
        """
        self._placement.replicas = replicas
        return self._place(now)

    def tell(self, seen: DemandReport) -> None:
        """Count what a head has seen."""
        for adapter, prompt_tokens in seen.arrivals:
            if adapter is None:
                self._base.arrived(_BASE, prompt_tokens)
            elif adapter in self._demand:  # else it was dropped while this was on its way
                self._demand.arrived(adapter, prompt_tokens)
        for adapter, output_tokens in seen.answers:
            if adapter is None:
                self._base.finished(_BASE, output_tokens)
            else:
                self._demand.finished(adapter, output_tokens)

    def period(self, seen: DemandReport, now: float) -> RoutingTable:
        """Count what a head has seen, and place anew: for the next period, or by what is known so far of this one."""
        self.tell(seen)
        return self.close_period(now) if seen.is_over else self._place(now)

    def close_period(self, now: float) -> RoutingTable:
        """End a period of demand, and place for the next.

        Raises:
            ValueError: no time has passed since the last one.
        """
        self._demand.close(now)
        self._base.close(now)
        self._has_closed = True
        return self._place(now)

    def load(self, now: float) -> float | None:
        """Return how many replicas the demand fills; None without operating points, or before a period has ended."""
        if self._points is None or not self._has_closed:
            return None
        return load_of((*self._demand.demands(now), *self._base.demands(now)), self._points)

    def state(self) -> OrchestratorState:
        """Return what another orchestrator needs to go on from here."""
        shares = {
            adapter: tuple((each.replica, each.share) for each in of_one)
            for adapter, of_one in self.table.shares.items()
        }
        return OrchestratorState(self.table.epoch, shares, self._demand.state(), self._policy)

    def resume(self, state: OrchestratorState, now: float, replicas: Sequence[ReplicaId] | None = None) -> RoutingTable:
        """Go on from where an earlier one was, which may have had other replicas than those that there are now.

        The table of another policy is not gone on from: one that lets adapters stay where they are would keep it.
        """
        if replicas is not None:
            self._placement.replicas = replicas
        kept = state.shares if state.policy == self._policy else {}
        shares = {adapter: tuple(ReplicaShare(*each) for each in of_one) for adapter, of_one in kept.items()}
        self._placement.resume(RoutingTable(state.epoch, shares))
        self._demand.resume(state.demand, now)
        self._begin_base(now)
        return self._place(now)

    def _begin_base(self, now: float) -> None:
        """Count the base model's demand anew, which is not kept: after a restart it is back with the next period."""
        self._base = DemandEstimator(now)
        self._base.know(_BASE, rank=0, size_bytes=0)
        self._has_closed = False

    def _place(self, now: float) -> RoutingTable:
        self.table = self._placement.place(self._demand.demands(now), now)
        return self.table
