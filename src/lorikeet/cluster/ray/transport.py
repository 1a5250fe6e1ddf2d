"""Copies adapters between replicas of a Ray cluster, through Ray's object store."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions

from lorikeet.cluster.adapters.folder import PoolFolderError, read_files
from lorikeet.cluster.adapters.transport import DestinationLost, TransportError, copy_error
from lorikeet.cluster.ray.host import RayHost, cause_of, reason_of
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId

_STORE_ATTEMPTS = 5
_RETRY_S = 1.0
"""Ray reports an actor as unavailable before it knows whether the actor is dead."""


@dataclass
class _Shared:
    """An adapter of this machine that is in the object store while copies are made from it."""

    put: "asyncio.Task[Any]"
    users: int = 0


class RayTransport:
    """A :class:`~lorikeet.cluster.adapters.transport.Transport` between the actors of replicas.

    Args:
        hosts: of all replicas; read at every call. Released replicas are removed from it.
    """

    def __init__(self, hosts: MutableMapping[ReplicaId, RayHost]) -> None:
        self._hosts = hosts
        self._shared: dict[AdapterDigest, _Shared] = {}

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from actor to actor. The files do not pass through this process."""
        what = f"adapter {adapter.name!r} from {source} to {destination}"
        source_actor, destination_actor = self._actor(what, source), self._destination(what, destination)
        size, files = source_actor.read.options(num_returns=2).remote(adapter.digest)
        try:
            await size
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {source} cannot be read: {reason_of(error)}") from error
        return await self._store(what, adapter, destination_actor, files)

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from this machine to an actor. Concurrent copies of it read its files once."""
        what = f"adapter {adapter.name!r} to {destination}"
        destination_actor = self._destination(what, destination)
        try:
            async with self._in_object_store(adapter) as files:
                return await self._store(what, adapter, destination_actor, files)
        except (PoolFolderError, ray.exceptions.RayError) as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """Delete the actor's copy."""
        what = f"adapter {adapter.name!r} at {replica}"
        actor = self._actor(what, replica)
        try:
            await actor.delete.remote(adapter.digest)
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
            await actor.discard.remote()
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    def release(self, replica: ReplicaId) -> None:
        """Forget the host of a replica. The owner of the host closes it."""
        self._hosts.pop(replica, None)

    def close(self) -> None:
        """Do nothing: hosts own the actors."""

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
        left = _STORE_ATTEMPTS
        while True:
            try:
                folder: str = await actor.store.remote(adapter.digest, files)
                return msgspec.structs.replace(adapter, folder=folder)
            except ray.exceptions.ActorDiedError as error:
                raise DestinationLost(f"{what}: {reason_of(error)}") from error
            except ray.exceptions.RayError as error:
                left -= 1
                if not (left and isinstance(error, ray.exceptions.ActorUnavailableError)):
                    raise copy_error(what, cause_of(error), reason_of(error)) from error
            await asyncio.sleep(_RETRY_S)

    @asynccontextmanager
    async def _in_object_store(self, adapter: AdapterRef) -> AsyncIterator[Any]:
        """Yield a reference to an adapter's files. They are dropped when their last user is done."""
        shared = self._shared.get(adapter.digest)
        if shared is None:
            shared = self._shared[adapter.digest] = _Shared(asyncio.create_task(_put(Path(adapter.folder))))
        shared.users += 1
        try:
            yield await asyncio.shield(shared.put)  # cancelling one copy must not cancel the others
        finally:
            shared.users -= 1
            if not shared.users:
                del self._shared[adapter.digest]


async def _put(folder: Path) -> Any:
    return await asyncio.to_thread(lambda: ray.put(read_files(folder)))
