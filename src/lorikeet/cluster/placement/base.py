"""The contract of a placement policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId


class Placement(ABC):
    """Decides which replicas serve which adapters.

    Args:
        replicas: that there are; equal to each other. The owner assigns :attr:`replicas` anew when one joins or leaves,
            and then asks for a new placement.

    Raises:
        ValueError: no replica.
    """

    def __init__(self, replicas: Sequence[ReplicaId]) -> None:
        self.replicas = replicas
        self._table = RoutingTable(0, {})

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """Return the replicas to place on."""
        return self._replicas

    @replicas.setter
    def replicas(self, replicas: Sequence[ReplicaId]) -> None:
        if not replicas:
            raise ValueError("A placement needs a replica")
        self._replicas = tuple(replicas)

    @abstractmethod
    def place(self, demands: Sequence[AdapterDemand], now: float) -> RoutingTable:
        """Return where every adapter is to be served from now on.

        Args:
            demands: of all adapters, each once.
            now: seconds on the clock of whoever asks.

        Returns:
            A table of exactly these adapters and of replicas that exist; the one of the last call, with its epoch, if
            nothing changes.
        """

    def resume(self, table: RoutingTable) -> None:
        """Take a table that an earlier placement made for the one of the last call."""
        self._table = table

    def _replaced(self, shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]]) -> RoutingTable:
        """Return the table with these shares: the one of the last call, if they are the same."""
        if shares != self._table.shares:
            self._table = RoutingTable(self._table.epoch + 1, shares)
        return self._table
