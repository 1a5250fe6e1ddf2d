"""Where adapters should be, and where they are.

The routing table is the desired state and is replaced as a whole; the adapter table is the actual one and changes with
every copy. They disagree between a new placement and the first request that makes it real.

Source: LoRAServe, sections IV-A and IV-B.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import isclose
from typing import NamedTuple

from lorikeet.core.ids import AdapterDigest, ReplicaId

SUM_TOLERANCE = 1e-9
"""The shares of an adapter add up to 1, with so much for rounding."""


class ReplicaShare(NamedTuple):
    """A replica's part in serving an adapter.

    Attributes:
        replica: where.
        share: probability that a request of the adapter goes there (the paper's phi), in (0, 1].
    """

    replica: ReplicaId
    share: float


class RoutingTable:
    """For every adapter the replicas that serve it. Never changes; a new placement is a new table.

    Args:
        epoch: number of the placement; a later one has a larger number.
        shares: of each adapter, which add up to 1.

    Raises:
        ValueError: shares of an adapter that do not add up to 1, are not positive, or name a replica twice.
    """

    def __init__(self, epoch: int, shares: Mapping[AdapterDigest, tuple[ReplicaShare, ...]]) -> None:
        self.epoch = epoch
        self.shares = shares
        # Full replication gives all adapters one and the same tuple: it is looked at once.
        different = {id(of_one): (adapter, of_one) for adapter, of_one in shares.items()}
        for adapter, of_one in different.values():
            _check(adapter, of_one)

    def draw(self, adapter: AdapterDigest, u: float) -> ReplicaId:
        """Return the replica for one request.

        Args:
            adapter: whose.
            u: uniform in [0, 1). Replicas own half-open intervals in the table's order, each as long as its share.

        Raises:
            KeyError: an adapter that is not in the table.
        """
        shares = self.shares[adapter]
        for replica, share in shares:
            u -= share
            if u < 0:
                return replica
        return shares[-1].replica  # the shares add up to a little less than 1

    def replicas(self, adapter: AdapterDigest) -> set[ReplicaId]:
        """Return to whom requests of an adapter may be sent; nobody if it is not in the table."""
        return {replica for replica, _ in self.shares.get(adapter, ())}

    def pairs(self) -> Iterator[tuple[AdapterDigest, ReplicaId]]:
        """Yield every adapter with each of its replicas."""
        return ((adapter, replica) for adapter, shares in self.shares.items() for replica, _ in shares)

    @cached_property
    def shown(self) -> dict[AdapterDigest, dict[ReplicaId, float]]:
        """By adapter and replica the shares, as people see them; to read."""
        return {adapter: dict(shares) for adapter, shares in self.shares.items()}


def _check(adapter: AdapterDigest, shares: tuple[ReplicaShare, ...]) -> None:
    replicas = {replica for replica, _ in shares}
    parts = [part for _, part in shares]
    if not isclose(sum(parts), 1, abs_tol=SUM_TOLERANCE) or len(replicas) < len(shares) or min(parts) <= 0:
        raise ValueError(f"Shares of adapter {adapter}: {shares}")


class AdapterTable:
    """Who holds which adapter, in its host memory or on its device."""

    def __init__(self) -> None:
        self._holders: dict[AdapterDigest, set[ReplicaId]] = {}

    def __iter__(self) -> Iterator[AdapterDigest]:
        """Yield every adapter that somebody holds."""
        return iter(self._holders)

    def holders(self, adapter: AdapterDigest) -> frozenset[ReplicaId]:
        """Return who holds an adapter; nobody if it is unknown or was lost."""
        return frozenset(self._holders.get(adapter, ()))

    def holds(self, replica: ReplicaId, adapter: AdapterDigest) -> bool:
        """Whether a replica holds an adapter."""
        return replica in self._holders.get(adapter, ())

    def held_by(self, replica: ReplicaId) -> set[AdapterDigest]:
        """Return what a replica holds."""
        return {adapter for adapter, holders in self._holders.items() if replica in holders}

    def add(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Note a copy."""
        self._holders.setdefault(adapter, set()).add(replica)

    def remove(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Note that a copy is deleted.

        Raises:
            ValueError: it is the only one.
        """
        if self._holders[adapter] == {replica}:
            raise ValueError(f"The last copy of adapter {adapter} is at {replica}")
        self._holders[adapter].remove(replica)

    def forget(self, adapter: AdapterDigest) -> frozenset[ReplicaId]:
        """Drop an adapter that nobody wants any longer; return who held it."""
        return frozenset(self._holders.pop(adapter, ()))

    def leave(self, replica: ReplicaId) -> list[AdapterDigest]:
        """Drop a replica with all its copies; return the adapters that nobody holds now."""
        lost = []
        for adapter in self.held_by(replica):
            self._holders[adapter].remove(replica)
            if not self._holders[adapter]:
                del self._holders[adapter]
                lost.append(adapter)
        return sorted(lost)
