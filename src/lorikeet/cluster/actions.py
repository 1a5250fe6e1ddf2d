"""What a dispatcher wants done."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet.cluster.pool import Fetch
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class Send(NamedTuple):
    """A request to hand to a replica; its adapter's files are there."""

    request_id: RequestId
    replica: ReplicaId


class Provision(NamedTuple):
    """A copy to make from an adapter's own files, since no replica holds it.

    Attributes:
        number: names it; its end is reported with it.
        adapter: what.
        replica: where to.
    """

    number: int
    adapter: AdapterDigest
    replica: ReplicaId


class Actions(NamedTuple):
    """What follows from a call.

    Attributes:
        sends: requests to hand over, in order.
        fetches: copies to make from one replica to another.
        provisions: copies to make from an adapter's own files.
        deletes: copies to delete.
        failed: requests whose adapter can be had from nowhere; they are forgotten here.
    """

    sends: tuple[Send, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    provisions: tuple[Provision, ...] = ()
    deletes: tuple[tuple[AdapterDigest, ReplicaId], ...] = ()
    failed: tuple[RequestId, ...] = ()


@dataclass
class Collected:
    """Actions while a call is under way."""

    sends: list[Send] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    provisions: list[Provision] = field(default_factory=list)
    deletes: list[tuple[AdapterDigest, ReplicaId]] = field(default_factory=list)
    failed: list[RequestId] = field(default_factory=list)

    def actions(self) -> Actions:
        """Return them."""
        return Actions(
            tuple(self.sends), tuple(self.fetches), tuple(self.provisions), tuple(self.deletes), tuple(self.failed)
        )
