"""Places every adapter on every replica (full replication)."""

from collections.abc import Sequence

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import ReplicaId


class FullReplication(PlacementPolicy):
    """Places every adapter on every replica with equal shares. Routing policies may ignore the shares.

    Source: LoRAServe, section II-B2, on TOPPINGS.
    """

    reads_demand = False
    _everywhere: tuple[ReplicaShare, ...] = ()

    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Return a table with every adapter on every replica."""
        if tuple(replica for replica, _ in self._everywhere) != tuple(replicas):
            self._everywhere = tuple(ReplicaShare(replica, 1 / len(replicas)) for replica in replicas)
        # All adapters and placements share one tuple. Equal but separate tuples would be compared replica by replica
        # for each adapter.
        return self._replaced(dict.fromkeys((demand.adapter for demand in demands), self._everywhere))
