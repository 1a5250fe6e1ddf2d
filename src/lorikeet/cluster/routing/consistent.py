"""Routes by a hash of the adapter, so that routers which share nothing choose the same replicas."""

from hashlib import blake2b

from lorikeet.cluster.routing.affinity import BOUND, not_overloaded
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy
from lorikeet.cluster.routing.fleet import Fleet, ReplicaInfo
from lorikeet.cluster.routing.request import RoutingRequest


class Consistent(RoutingPolicy):
    """Chooses the replica with the highest hash of adapter and replica that is not overloaded.

    The hash of a request for the base model is that of the first block of its prompt. A replica that joins or leaves
    moves only the adapters whose highest hash it has.

    Args:
        bound: largest load relative to the mean; see :data:`lorikeet.cluster.routing.affinity.BOUND`.

    Source: D. Thaler and C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM Transactions on
    Networking 6(1), 1998.
    """

    wants_keys = True

    def __init__(self, bound: float = BOUND) -> None:
        self._bound = bound

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a replica by the hash of the request's adapter or prompt."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        key = request.adapter.encode() if request.adapter is not None else b"".join(request.keys[:1])
        infos = [fleet.info(index) for index in not_overloaded(candidates, fleet, self._bound)]
        return Choice(max(infos, key=lambda info: _hash(key, info)).replica)


def _hash(key: bytes, info: ReplicaInfo) -> bytes:
    return blake2b(b"%d\n" % len(key) + key + (info.name or info.replica).encode(), digest_size=8).digest()
