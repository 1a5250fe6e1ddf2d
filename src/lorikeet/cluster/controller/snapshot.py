"""Builds the snapshot of a live cluster for ``/v1/cluster`` and the metrics."""

from collections.abc import Mapping

import msgspec

from lorikeet.client.state import ClusterState, ReplicaState, replica_state
from lorikeet.cluster.controller.adapter_files import AdapterCopier
from lorikeet.cluster.controller.dispatcher import Dispatcher
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.controller.request_moves import RequestMoves
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import ReplicaId


def cluster_state(
    replicas: Mapping[ReplicaId, LiveReplica],
    dispatcher: Dispatcher,
    copier: AdapterCopier,
    table: RoutingTable,
    moves: RequestMoves,
    wanted: int | None,
) -> ClusterState:
    """Return a snapshot of the cluster: replicas, routing table, copies and moved requests."""

    def state(replica_id: ReplicaId, replica: LiveReplica) -> ReplicaState:
        held = copier.placed_at(replica_id)
        shown = replica_state(
            replica_id,
            replica.supervisor,
            is_open=replica_id in dispatcher.fleet.open_index,
            held=len(held),
            held_bytes=sum(ref.weight_bytes for ref in held),
        )
        return msgspec.structs.replace(shown, adopted_from=replica.adopted_from)

    return ClusterState(
        replicas=tuple(state(replica_id, replica) for replica_id, replica in replicas.items()),
        unrouted=dispatcher.waiting,
        epoch=table.epoch,
        shares=table.shown,
        copies=copier.counts,
        moves=moves.count,
        moves_with_kv=moves.with_kv,
        wanted=wanted,
    )
