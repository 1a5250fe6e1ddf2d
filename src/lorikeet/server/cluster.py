"""Routes that show the replicas behind a server, and let them come and go."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from lorikeet.core.ids import ReplicaId
from lorikeet.engine.connection import EngineError
from lorikeet.server.dependencies import Parts
from lorikeet.server.errors import ApiError

router = APIRouter()


@router.get("/v1/cluster")
async def show_cluster(parts: Parts) -> dict[str, Any]:
    """Replicas, which adapters they are to serve, and what was copied. Adapters have names where they have one."""
    state = parts.client.describe()
    digests = {*state.shares, *(digest for replica in state.replicas for digest in replica.resident)}
    known = parts.adapters_by_digest(digests)
    return state.shown({digest: known[digest][0].name for digest in digests if known.get(digest)})


@router.post("/v1/cluster/replicas", status_code=201)
async def add_replica(parts: Parts) -> dict[str, Any]:
    """Start one more replica; answered when it gets requests."""
    try:
        replica = await parts.client.add_replica()
    except EngineError as error:
        raise ApiError(409, f"The replica could not be started: {error}.") from error
    return {"object": "replica", "id": replica}


@router.delete("/v1/cluster/replicas/{replica}")
async def remove_replica(replica: str, parts: Parts, drain_s: Annotated[float, Query(ge=0)] = 0.0) -> dict[str, Any]:
    """Take a replica out; requests that have not ended after ``drain_s`` go on at others."""
    try:
        await parts.client.remove_replica(ReplicaId(replica), drain_s)
    except KeyError:
        raise ApiError(404, f"There is no replica {replica!r}.") from None
    except EngineError as error:
        raise ApiError(409, f"The replica cannot be removed: {error}.") from error
    return {"object": "replica", "id": replica, "deleted": True}
