"""A gateway's backends as people see them."""

from lorikeet.engine.views import ClusterState, CopyCounts, ReplicaState
from lorikeet.gateway.backends import Backend
from lorikeet.gateway.head import Head


def describe(head: Head) -> ClusterState:
    """Return backends, and where adapters belong. Requests of other clients count as running."""
    fleet, table = head.dispatcher.fleet, head.dispatcher.router.table
    index = {info.replica: at for at, info in enumerate(fleet.infos())}

    def state(backend: Backend) -> ReplicaState:
        at = index.get(backend.replica)
        return ReplicaState(
            id=backend.replica,
            pid=None,
            address=backend.url,
            alive=backend.is_up,
            is_open=backend.is_open,
            restarts=max(0, backend.epoch),
            running=0 if at is None else int(fleet.loads.requests[at] - fleet.loads.queued[at]),
            waiting=0 if at is None else int(fleet.loads.queued[at]),
            resident=tuple(backend.adapters[name] for name in sorted(backend.adapters)),
            held=len(backend.adapters),
            held_bytes=sum(head.versions[digest].size_bytes for digest in backend.adapters.values()),
            memory_used=None,
        )

    backends = head.backends.values()
    return ClusterState(
        replicas=tuple(state(backend) for backend in backends),
        unrouted=head.dispatcher.waiting,
        epoch=0 if table is None else table.epoch,
        shares={} if table is None else table.shown,
        copies=CopyCounts(
            provisions=sum(backend.loads for backend in backends),
            failed=sum(backend.refusals for backend in backends),
            deletes=sum(backend.unloads for backend in backends),
        ),
    )
