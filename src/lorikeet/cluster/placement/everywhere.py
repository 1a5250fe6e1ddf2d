"""Full replication: every adapter on every replica."""

from collections.abc import Sequence

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import ReplicaId


class FullReplication(PlacementPolicy):
    """Every adapter on every replica, with equal shares; a routing policy may choose otherwise.

    Source: LoRAServe, section II-B2, on TOPPINGS.
    """

    reads_demand = False
    _everywhere: tuple[ReplicaShare, ...] = ()

    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Return a table with every adapter on every replica."""
        if tuple(replica for replica, _ in self._everywhere) != tuple(replicas):
            self._everywhere = tuple(ReplicaShare(replica, 1 / len(replicas)) for replica in replicas)
        # One tuple for all adapters and placements: equal ones would be compared replica by replica for each adapter.
        return self._replaced(dict.fromkeys((demand.adapter for demand in demands), self._everywhere))
