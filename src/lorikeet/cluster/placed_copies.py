"""Which adapters have their files at which replicas, as whoever copies them knows it."""

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId


class PlacedCopies:
    """Adapters by replica, each with its files there."""

    def __init__(self) -> None:
        self._refs: dict[ReplicaId, dict[AdapterDigest, AdapterRef]] = {}
        self._pairs: frozenset[tuple[AdapterDigest, ReplicaId]] | None = None  # None: something has changed since

    def add(self, ref: AdapterRef, replica: ReplicaId) -> None:
        """Note a copy."""
        self._refs.setdefault(replica, {})[ref.digest] = ref
        self._pairs = None

    def get(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef:
        """Return a copy.

        Raises:
            KeyError: it is not there.
        """
        return self._refs[replica][adapter]

    def at(self, replica: ReplicaId) -> list[AdapterRef]:
        """Return all copies at a replica."""
        return list(self._refs.get(replica, {}).values())

    def pairs(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return which adapters are at which replicas; the same set until something changes."""
        if self._pairs is None:
            self._pairs = frozenset((adapter, replica) for replica, refs in self._refs.items() for adapter in refs)
        return self._pairs

    def remove(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef | None:
        """Forget a copy and return it, None if it is not there."""
        self._pairs = None
        return self._refs.get(replica, {}).pop(adapter, None)

    def clear(self, replica: ReplicaId) -> None:
        """Forget all copies at a replica."""
        self._pairs = None
        self._refs.pop(replica, None)
