"""Shows, adds and removes the replicas behind a server."""

from typing import Annotated, Any

from fastapi import Query

from lorikeet.api.dependencies import ServiceDep
from lorikeet.client.supervisor import EngineError
from lorikeet.core.ids import ReplicaId
from lorikeet.http.errors import ApiError, hide_paths
from lorikeet.http.routes import Callers, Route, Routes

ROUTES = Routes(note="see [cluster.md](cluster.md#running-one)")


@ROUTES.add(Route("GET /v1/cluster", Callers.ADMINS))
async def show_cluster(service: ServiceDep) -> dict[str, Any]:
    """Return the replicas, the placement of adapters by name or digest, the copies made, and the pauses."""
    state = service.client.describe()
    digests = {*state.shares, *(digest for replica in state.replicas for digest in replica.resident)}
    known = service.adapters_by_digest(digests)
    shown = state.shown({digest: known[digest][0].name for digest in digests if known.get(digest)})
    return shown | {"paused": service.resolver.pauses.shown()}


@ROUTES.add(Route("POST /v1/cluster/replicas", Callers.ADMINS), status_code=201)
async def add_replica(service: ServiceDep) -> dict[str, Any]:
    """Start one more replica; answer when it takes requests."""
    try:
        replica = await service.client.add_replica()
    except EngineError as error:
        raise ApiError(409, f"The replica could not be started: {hide_paths(str(error))}.") from error
    return {"object": "replica", "id": replica}


@ROUTES.add(Route("DELETE /v1/cluster/replicas/{replica}", Callers.ADMINS))
async def remove_replica(
    replica: str, service: ServiceDep, drain_s: Annotated[float, Query(ge=0)] = 0.0
) -> dict[str, Any]:
    """Remove a replica and move its requests; requests whose KV cannot move get up to ``drain_s`` seconds."""
    try:
        await service.client.remove_replica(ReplicaId(replica), drain_s)
    except KeyError:
        raise ApiError(404, f"The replica {replica!r} does not exist.") from None
    except EngineError as error:
        raise ApiError(409, f"The replica cannot be removed: {hide_paths(str(error))}.") from error
    return {"object": "replica", "id": replica, "deleted": True}
