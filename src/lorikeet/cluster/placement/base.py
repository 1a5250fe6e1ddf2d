"""Defines the interface of a placement policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.setup import PolicySetup
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts


class PlacementPolicy(ABC):
    """Decides which replicas serve which adapters.

    Attributes:
        looks_early: whether adapters are placed again within the first period.
        extrapolates: whether an adapter's demand is extrapolated by a line through its last periods. If not, the demand
            is a share of its rank's demand (see ``DemandEstimator``).
        reads_demand: whether the policy reads the demand. If not, the demand is not computed, and is 0.
        needs: names of inputs that are expensive to prepare: ``operating_points``.
        reserved_share: share of each replica's memory that it reserves for copies of adapters under co-migration.
    """

    looks_early = True
    extrapolates = False
    reads_demand = True
    needs: ClassVar[frozenset[str]] = frozenset()
    reserved_share: ClassVar[float] = 0.0

    def __init__(self) -> None:
        self._table = RoutingTable(0, {})

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy for a cluster. Policies read everything except their parameters from ``setup``.

        Args:
            setup: the facts about the cluster.
            parameters: keyword-only arguments of the constructor that the preset sets.

        Raises:
            ConfigError: profile and options lack a value that the policy needs.
        """
        return cls(**parameters)

    @abstractmethod
    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Return the table of the replicas that serve each adapter.

        Args:
            demands: the demands of all adapters, each once.
            replicas: at least one replica to place on. All replicas are equal machines.
            now: seconds on the caller's clock.

        Returns:
            A table of exactly these adapters and replicas. If nothing changes, the last table is returned.
        """

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:  # noqa: B027  # optional
        """Update the costs of a replica and the lengths of a mean request. Most policies ignore both."""

    def resume(self, table: RoutingTable) -> None:
        """Continue from the table of an earlier placement."""
        self._table = table

    def _replaced(self, shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]]) -> RoutingTable:
        """Return a table with these shares. If they have not changed, return the last table."""
        if shares != self._table.shares:
            self._table = RoutingTable(self._table.epoch + 1, shares)
        return self._table
