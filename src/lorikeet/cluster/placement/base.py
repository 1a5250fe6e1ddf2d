"""The interface of a placement policy."""

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
        looks_early: whether it wants to place again within the first period.
        extrapolates: whether the demand of an adapter is expected to follow the line through its last periods; if not,
            it is a share of its rank's demand (see ``DemandEstimator``).
        reads_demand: whether the demand matters; if not, it is not computed and given as 0.
        needs: names of what is expensive to prepare: ``operating_points``.
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
        """Create the policy for a cluster. Policies that need more than their parameters take it from ``setup``.

        Args:
            setup: the facts about the cluster.
            parameters: keyword-only arguments of the constructor that the preset sets.

        Raises:
            ConfigError: profile and options lack something that the policy needs.
        """
        return cls(**parameters)

    @abstractmethod
    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Return the replicas that serve each adapter from now on.

        Args:
            demands: the demands of all adapters, each once.
            replicas: the replicas to place on, at least one; they are equal to each other.
            now: seconds on the caller's clock.

        Returns:
            A table of exactly these adapters and replicas; if nothing changes, the last table with its epoch.
        """

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:  # noqa: B027  # optional
        """Use other costs of a replica and other lengths of a mean request from now on. Most policies ignore them."""

    def resume(self, table: RoutingTable) -> None:
        """Continue from the table of an earlier placement."""
        self._table = table

    def _replaced(self, shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]]) -> RoutingTable:
        """Return a table with these shares; the last one, if they are the same."""
        if shares != self._table.shares:
            self._table = RoutingTable(self._table.epoch + 1, shares)
        return self._table
