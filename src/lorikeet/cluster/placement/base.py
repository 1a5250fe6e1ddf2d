"""The interface of a placement policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts


class Placement(ABC):
    """Decides which replicas serve which adapters.

    Args:
        replicas: all replicas, which are equal to each other. When one joins or leaves, the owner assigns
            :attr:`replicas` and then requests a new placement.

    Attributes:
        looks_early: whether it wants to place again within the first period.
        extrapolates: whether the demand of an adapter is expected to follow the line through its last periods; if not,
            it is a share of its rank's demand (see ``DemandEstimator``).
        reads_demand: whether the demand matters; if not, it is not computed and given as 0.

    Raises:
        ValueError: no replica.
    """

    looks_early = True
    extrapolates = False
    reads_demand = True

    def __init__(self, replicas: Sequence[ReplicaId]) -> None:
        self.replicas = replicas
        self._table = RoutingTable(0, {})

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """The replicas to place on."""
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: Sequence[ReplicaId]) -> None:
        if not replicas:
            raise ValueError("A placement needs a replica")
        self._replicas = tuple(replicas)

    @abstractmethod
    def place(self, demands: Sequence[AdapterDemand], now: float) -> RoutingTable:
        """Return where every adapter is served from now on.

        Args:
            demands: of all adapters, each once.
            now: seconds on the caller's clock.

        Returns:
            A table of exactly these adapters and of existing replicas. If nothing changes it is the last table, with
            its
            epoch.
        """

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:  # noqa: B027  # optional
        """Place by other costs of a replica and other mean requests from now on, if they matter."""

    def resume(self, table: RoutingTable) -> None:
        """Continue from the table of an earlier placement."""
        self._table = table

    def _replaced(self, shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]]) -> RoutingTable:
        """Return a table with these shares; the last one, if they are the same."""
        if shares != self._table.shares:
            self._table = RoutingTable(self._table.epoch + 1, shares)
        return self._table
