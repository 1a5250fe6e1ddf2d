"""Builders for fleets and for what is asked of them."""

from collections.abc import Set

from lorikeet.cluster.routing.base import AdapterPlaces, RoutingPolicy
from lorikeet.cluster.routing.fleet import Fleet, ReplicaInfo, RequestAverages
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


def fleet_of(*infos: ReplicaInfo | str, output_tokens: float = 128.0, execution_s: float = 1.0) -> Fleet:
    """A fleet of these replicas, or of replicas of these names with room for everything."""
    fleet = Fleet(RequestAverages(output_tokens, execution_s))
    for info in infos:
        fleet.join(ReplicaInfo(ReplicaId(info)) if isinstance(info, str) else info)
    return fleet


def ask(
    name: str,
    rank: int = 0,
    adapter: str | None = "",
    known_tokens: int = 100,
    expected_tokens: int = 50,
    adapter_bytes: int = 0,
    keys: tuple[bytes, ...] = (),
    generated_tokens: int = 0,
) -> RoutingRequest:
    """A request; with a rank, of an adapter of its own unless one is named."""
    named = (f"{name}'s" if rank else None) if adapter == "" else adapter
    digest = None if named is None else AdapterDigest(named)
    return RoutingRequest(
        RequestId(name), digest, rank, adapter_bytes, known_tokens, expected_tokens, keys, generated_tokens
    )


def send(fleet: Fleet, replica: str, *all_asked: RoutingRequest) -> None:
    """Send requests to a replica; they are queued there."""
    for asked in all_asked:
        fleet.dispatched(asked, ReplicaId(replica))


def run(fleet: Fleet, replica: str, *all_asked: RoutingRequest, now: float = 0.0) -> None:
    """Send requests to a replica, which admits them."""
    send(fleet, replica, *all_asked)
    for asked in all_asked:
        fleet.admitted(ReplicaId(replica), asked.request_id, now)


def several(count: int, rank: int, prefix: str = "") -> list[RoutingRequest]:
    """So many requests of one rank, each of its own adapter."""
    return [ask(f"{prefix}{rank}-{number}", rank) for number in range(count)]


def routed_to(
    policy: RoutingPolicy,
    request: RoutingRequest,
    fleet: Fleet,
    table: RoutingTable | None = None,
    holders: Set[ReplicaId] | None = None,
) -> ReplicaId | None:
    """Return the replica that a policy chooses; None if the request should wait."""
    choice = policy.route(request, fleet, AdapterPlaces(table, holders), 0.0)
    return None if choice is None else choice.replica


def table(**shares: dict[str, float]) -> RoutingTable:
    """Shares by adapter and replica."""
    return RoutingTable(
        1,
        {
            AdapterDigest(adapter): tuple(ReplicaShare(ReplicaId(r), share) for r, share in its.items())
            for adapter, its in shares.items()
        },
    )
