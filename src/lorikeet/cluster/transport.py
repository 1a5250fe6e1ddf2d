"""How an adapter's files come to a replica, as the owner of a dispatcher sees it."""

from typing import Protocol

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId


class TransportError(RuntimeError):
    """A copy was not made or not deleted; the message names the adapter, the replicas and the reason."""


class DestinationGone(TransportError):
    """A copy's destination is dead or was taken out. Its owner hears of that otherwise, and waits for no copy there."""


class Transport(Protocol):
    """Carries adapters between replicas. Calls may be made at the same time, also for the same adapter."""

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from one replica to another.

        Returns:
            The adapter with ``folder`` as the destination's engine has to be told.

        Raises:
            DestinationGone: see there.
            TransportError: the source has not got it or is gone, the destination cannot keep it, or it was damaged on
                its way.
        """
        ...

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from ``adapter.folder`` on this machine to a replica. Otherwise as :meth:`copy`."""
        ...

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """Delete a replica's copy; one that is not there is no error.

        Raises:
            TransportError: the replica is gone, or cannot delete it.
        """
        ...

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """Return where copies lie at a replica, those of its earlier incarnations included.

        Raises:
            TransportError: the replica is gone, or cannot read them.
        """
        ...

    async def discard(self, replica: ReplicaId) -> None:
        """Delete all that lies at a replica. Nothing goes there any more; :meth:`release` follows.

        Raises:
            TransportError: the replica is gone, or cannot delete it.
        """
        ...

    def release(self, replica: ReplicaId) -> None:
        """Hold nothing for a replica that will not be back; what lies there stays."""
        ...

    def close(self) -> None:
        """Release what it holds; the copies stay."""
        ...
