"""Defines the tables of the replicas that should have adapters, and of the replicas that have them.

The routing table is the desired placement and is replaced as a whole. The adapter table is the actual placement and
changes with every copy. The tables differ until all copies of a new placement are made.

Source: LoRAServe, sections IV-A and IV-B.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from math import isclose
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, ReplicaId

SUM_TOLERANCE = 1e-9
"""Rounding error of the sum of an adapter's shares, which is 1."""


_NOBODY: frozenset[ReplicaId] = frozenset()


class ReplicaShare(NamedTuple):
    """Holds a replica's share of an adapter's requests.

    Attributes:
        replica: id of the replica.
        share: probability that a request for the adapter goes to the replica (the paper's phi), in (0, 1].
    """

    replica: ReplicaId
    share: float


class RoutingTable:
    """Maps each adapter to the replicas that serve it. Immutable; every new placement is a new table.

    Args:
        epoch: number of the placement; a later one has a larger number.
        shares: shares of each adapter, which add up to 1.

    Raises:
        ValueError: shares of an adapter do not add up to 1, are not positive, or name a replica twice.
    """

    def __init__(self, epoch: int, shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]]) -> None:
        self.epoch = epoch
        self.shares = shares
        # Under full replication all adapters share one tuple, which is checked once.
        distinct = {id(its_shares): (adapter, its_shares) for adapter, its_shares in shares.items()}
        for adapter, its_shares in distinct.values():
            _check(adapter, its_shares)
        self._replicas: dict[int, frozenset[ReplicaId]] = {}  # keyed by the id of a tuple in ``shares``

    def draw(self, adapter: AdapterDigest, u: float) -> ReplicaId:
        """Draw the replica for one request.

        Args:
            adapter: adapter of the request.
            u: random number, uniform in [0, 1). Replicas own half-open intervals in the table's order, each as long as
                the replica's share.

        Raises:
            KeyError: the adapter is not in the table.
        """
        shares = self.shares[adapter]
        for replica, share in shares:
            u -= share
            if u < 0:
                return replica
        return shares[-1].replica  # Rounding may make the shares add up to a little less than 1.

    def replicas(self, adapter: AdapterDigest) -> frozenset[ReplicaId]:
        """Return the replicas that serve an adapter; empty if it is not in the table."""
        shares = self.shares.get(adapter, ())
        if (found := self._replicas.get(id(shares))) is None:
            found = self._replicas[id(shares)] = frozenset(replica for replica, _ in shares)
        return found

    def adapters_by_replica(self) -> Counter[ReplicaId]:
        """Return how many adapters each replica serves."""
        counts = Counter[ReplicaId]()
        for shares, adapters in _distinct(self.shares):
            for replica, _ in shares:
                counts[replica] += adapters
        return counts

    def bytes_by_replica(self, sizes_bytes: Mapping[AdapterDigest, int]) -> Counter[ReplicaId]:
        """Return the bytes of the adapters that each replica serves, by the bytes of each adapter."""
        of_shares = Counter[int]()  # many adapters have the same object as their shares
        for adapter, shares in self.shares.items():
            of_shares[id(shares)] += sizes_bytes[adapter]
        found = Counter[ReplicaId]()
        for shares, _ in _distinct(self.shares):
            for replica, _ in shares:
                found[replica] += of_shares[id(shares)]
        return found

    def pairs(self) -> Iterator[tuple[AdapterDigest, ReplicaId]]:
        """Yield every adapter with each of its replicas."""
        return ((adapter, replica) for adapter, shares in self.shares.items() for replica, _ in shares)

    @cached_property
    def shown(self) -> dict[AdapterDigest, dict[ReplicaId, float]]:
        """Shares by adapter and replica, as the API shows them; read-only."""
        return {adapter: dict(shares) for adapter, shares in self.shares.items()}


def _distinct(
    shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]],
) -> Iterator[tuple[tuple[ReplicaShare, ...], int]]:
    """Yield each tuple once, with the number of adapters that have it."""
    counts = Counter(map(id, shares.values()))
    tuples = {id(each): each for each in shares.values()}
    return ((tuples[number], count) for number, count in counts.items())


def _check(adapter: AdapterDigest, shares: tuple[ReplicaShare, ...]) -> None:
    replicas = {replica for replica, _ in shares}
    parts = [part for _, part in shares]
    if not isclose(sum(parts), 1, abs_tol=SUM_TOLERANCE) or len(replicas) < len(shares) or min(parts) <= 0:
        raise ValueError(
            f"Shares of adapter {adapter} must be positive, name each replica once and add up to 1: {shares}"
        )


class AdapterTable:
    """Tracks the replicas that hold each adapter, in host memory or on a device."""

    def __init__(self) -> None:
        self._holders: dict[AdapterDigest, set[ReplicaId]] = {}

    def __iter__(self) -> Iterator[AdapterDigest]:
        """Yield every adapter that a replica holds."""
        return iter(self._holders)

    def holders(self, adapter: AdapterDigest) -> Set[ReplicaId]:
        """Return the replicas that hold an adapter; empty if it is unknown or was lost.

        The returned set changes with the table.
        """
        return self._holders.get(adapter, _NOBODY)

    def holds(self, replica: ReplicaId, adapter: AdapterDigest) -> bool:
        """Return whether a replica holds an adapter."""
        return replica in self._holders.get(adapter, ())

    def held_by(self, replica: ReplicaId) -> set[AdapterDigest]:
        """Return the adapters that a replica holds."""
        return {adapter for adapter, holders in self._holders.items() if replica in holders}

    def add(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Record a copy."""
        self._holders.setdefault(adapter, set()).add(replica)

    def remove(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Record that a copy is deleted.

        Raises:
            ValueError: it is the last copy.
        """
        if self._holders[adapter] == {replica}:
            raise ValueError(f"The last copy of adapter {adapter} is at {replica}")
        self._holders[adapter].remove(replica)

    def forget(self, adapter: AdapterDigest) -> frozenset[ReplicaId]:
        """Remove an adapter, and return the replicas that held a copy."""
        return frozenset(self._holders.pop(adapter, ()))

    def leave(self, replica: ReplicaId) -> list[AdapterDigest]:
        """Remove a replica with its copies, and return the adapters that no replica holds any more."""
        lost = []
        for adapter in self.held_by(replica):
            self._holders[adapter].remove(replica)
            if not self._holders[adapter]:
                del self._holders[adapter]
                lost.append(adapter)
        return sorted(lost)
