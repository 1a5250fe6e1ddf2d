"""Copies adapters between replicas of a Ray cluster, as links, over TCP from memory to memory, or as Ray objects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions
import structlog

from lorikeet.cluster.adapters.folder import PoolFolderError, read_files
from lorikeet.cluster.adapters.peer import PeerAddress, PeerError, PeerServer, PeerUnreachable
from lorikeet.cluster.adapters.replica_pool import is_in_memory
from lorikeet.cluster.adapters.transport import DestinationLost, Traffic, TransportError, copy_error
from lorikeet.cluster.ray.errors import cause_of, reason_of
from lorikeet.cluster.ray.host import RayHost
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId

log = structlog.get_logger("lorikeet")

_STORE_ATTEMPTS = 5
_RETRY_S = 1.0
"""Seconds to retry while Ray reports an actor as unavailable, which may be alive or dead."""


@dataclass
class _Shared:
    """Holds an adapter that is in Ray's object store while copies are made from it."""

    put: "asyncio.Task[Any]"
    users: int = 0


class RayTransport:
    """Copies adapters between the actors of replicas; implements ``lorikeet.cluster.adapters.transport.Transport``.

    Replicas on one node share files. Otherwise the destination fetches an adapter from the actor that has it or from
    this process. If the destination cannot connect to the source (because of a firewall, for example), Ray sends the
    files.

    Args:
        hosts: hosts of all replicas; read at every call. Released replicas are removed from the mapping.
        host: address at which actors reach this process.
        peer_key: key that the actors share.

    Attributes:
        traffic: bytes moved so far.
    """

    def __init__(self, hosts: MutableMapping[ReplicaId, RayHost], host: str, peer_key: bytes) -> None:
        self.traffic = Traffic()
        self._hosts = hosts
        self._sources: dict[AdapterDigest, Path] = {}
        self._peers = PeerServer(host, lambda digest: self._sources[digest], peer_key)
        self._unreachable: set[tuple[PeerAddress, ReplicaId]] = set()
        self._shared: dict[AdapterDigest, _Shared] = {}

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from actor to actor. The files do not pass through this process."""
        what = f"adapter {adapter.name!r} from {source} to {destination}"
        source_actor = self._actor(what, source)
        destination_actor = self._destination(what, destination)
        if self._hosts[source].node_id == self._hosts[destination].node_id:
            folder = await self._called(what, lambda: destination_actor.share.remote(adapter.digest, source))
            if folder:
                return msgspec.structs.replace(adapter, folder=folder)
        peer = self._hosts[source].peer
        if peer is not None and (placed := await self._fetch(what, adapter, peer, source, destination)) is not None:
            return placed
        size, files = source_actor.read.options(num_returns=2).remote(adapter.digest)
        try:
            await size
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {source} cannot be read: {reason_of(error)}") from error
        return await self._store(what, adapter, destination_actor, files)

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from this machine to an actor."""
        what = f"adapter {adapter.name!r} to {destination}"
        destination_actor = self._destination(what, destination)
        self._sources[adapter.digest] = Path(adapter.folder)
        if (placed := await self._fetch(what, adapter, self._peers.address, None, destination)) is not None:
            return placed
        try:
            async with self._in_object_store(adapter) as files:
                return await self._store(what, adapter, destination_actor, files)
        except (PoolFolderError, ray.exceptions.RayError) as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    async def _fetch(
        self, what: str, adapter: AdapterRef, peer: PeerAddress, source: ReplicaId | None, destination: ReplicaId
    ) -> AdapterRef | None:
        """Let a destination fetch an adapter from a replica, or from this process if ``source`` is None.

        Returns:
            The copy; None if no connection to the source at ``peer`` can be made.
        """
        if (peer, destination) in self._unreachable:
            return None
        actor = self._destination(what, destination)
        try:
            folder = await self._called(what, lambda: actor.fetch.remote(adapter.digest, peer))
        except PeerError as error:
            raise TransportError(f"{what}: {source or 'this server'} cannot be read: {error}") from error
        except PeerUnreachable as error:
            if source is not None and not await self._is_there(source):
                raise TransportError(f"{what}: {source} cannot be read: {error}") from error
            self._unreachable.add((peer, destination))
            log.warning("adapters go through Ray's object store", destination=destination, reason=str(error))
            return None
        self.traffic.peer_bytes += adapter.weight_bytes
        return self._placed(adapter, folder)

    async def _is_there(self, replica: ReplicaId) -> bool:
        """Return whether a replica's actor answers."""
        host = self._hosts.get(replica)
        if host is None:
            return False
        try:
            await host.actor.describe.remote()
        except ray.exceptions.RayError:
            return False
        return True

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """Delete the actor's copy."""
        what = f"adapter {adapter.name!r} at {replica}"
        actor = self._actor(what, replica)
        try:
            await actor.delete.remote(adapter.digest, self._hosts[replica].fence)
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """Return the folders of the actor's copies."""
        what = f"the adapters of {replica}"
        actor = self._actor(what, replica)
        try:
            held: dict[AdapterDigest, str] = await actor.held.remote()
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error
        return held

    async def discard(self, replica: ReplicaId) -> None:
        """Delete the actor's folder."""
        what = f"the adapters of {replica}"
        actor = self._actor(what, replica)
        try:
            await actor.discard.remote(self._hosts[replica].fence)
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    def release(self, replica: ReplicaId) -> None:
        """Forget the host of a replica. The owner of the host closes it."""
        self._hosts.pop(replica, None)

    def close(self) -> None:
        """Stop sending adapters of this machine. The actors belong to the hosts."""
        self._peers.close()

    def _actor(self, what: str, replica: ReplicaId) -> Any:
        host = self._hosts.get(replica)
        if host is None or host.actor is None:
            raise TransportError(f"{what}: {replica} is not there")
        return host.actor

    def _destination(self, what: str, replica: ReplicaId) -> Any:
        try:
            return self._actor(what, replica)
        except TransportError as error:
            raise DestinationLost(str(error)) from error

    async def _store(self, what: str, adapter: AdapterRef, actor: Any, files: Any) -> AdapterRef:
        return self._placed(adapter, await self._called(what, lambda: actor.store.remote(adapter.digest, files)))

    async def _called(self, what: str, call: Callable[[], Awaitable[str]]) -> str:
        """Return the folder from a destination's actor; retry while the actor does not answer."""
        left = _STORE_ATTEMPTS
        while True:
            try:
                return await call()
            except ray.exceptions.ActorDiedError as error:
                raise DestinationLost(f"{what}: {reason_of(error)}") from error
            except ray.exceptions.RayError as error:
                cause = cause_of(error)
                left = left - 1
                if isinstance(cause, PeerError | PeerUnreachable):
                    raise cause from error
                if not (left and isinstance(error, ray.exceptions.ActorUnavailableError)):
                    raise copy_error(what, cause, reason_of(error)) from error
            await asyncio.sleep(_RETRY_S)

    def _placed(self, adapter: AdapterRef, folder: str) -> AdapterRef:
        if not is_in_memory(folder):
            self.traffic.disk_bytes += adapter.weight_bytes
        return msgspec.structs.replace(adapter, folder=folder)

    @asynccontextmanager
    async def _in_object_store(self, adapter: AdapterRef) -> AsyncIterator[Any]:
        """Yield a reference to an adapter's files. The files are removed from the object store after their last use."""
        shared = self._shared.get(adapter.digest)
        if shared is None:
            shared = self._shared[adapter.digest] = _Shared(asyncio.create_task(_put(Path(adapter.folder))))
        shared.users += 1
        try:
            yield await asyncio.shield(shared.put)  # A cancelled copy must not cancel the others.
        finally:
            shared.users -= 1
            if not shared.users:
                del self._shared[adapter.digest]


async def _put(folder: Path) -> Any:
    return await asyncio.to_thread(lambda: ray.put(read_files(folder)))
