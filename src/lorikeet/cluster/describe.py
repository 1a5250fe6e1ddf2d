"""A live cluster as people see it."""

from collections.abc import Mapping

from lorikeet.cluster.carrier import Carrier
from lorikeet.cluster.dispatcher import Dispatcher
from lorikeet.cluster.moves import Moves
from lorikeet.cluster.replica import Replica
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import ReplicaId
from lorikeet.engine.views import ClusterState, ReplicaState, replica_state


def cluster_state(
    replicas: Mapping[ReplicaId, Replica],
    dispatcher: Dispatcher,
    carrier: Carrier,
    table: RoutingTable,
    moves: Moves,
    wanted: int | None,
) -> ClusterState:
    """Return what there is: replicas, the placement, what was copied, how many requests were moved."""

    def state(replica_id: ReplicaId, replica: Replica) -> ReplicaState:
        held = carrier.placed_at(replica_id)
        return replica_state(
            replica_id,
            replica.keeper,
            is_open=replica_id in dispatcher.fleet.open_index,
            held=len(held),
            held_bytes=sum(ref.weight_bytes for ref in held),
        )

    return ClusterState(
        replicas=tuple(state(replica_id, replica) for replica_id, replica in replicas.items()),
        unrouted=dispatcher.waiting,
        epoch=table.epoch,
        shares=table.shown,
        copies=carrier.counts,
        moves=moves.count,
        moves_with_kv=moves.with_kv,
        wanted=wanted,
    )
