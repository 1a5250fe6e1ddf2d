"""Adapters between replicas of a Ray cluster: through its object store, from machine to machine."""

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
from lorikeet.cluster.adapters.transport import DestinationLost, TransportError
from lorikeet.cluster.ray.host import RayHost, reason_of
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId

_STORE_ATTEMPTS = 5
_TRY_AGAIN_S = 1.0
"""Ray calls an actor unavailable before it knows whether that is dead."""


@dataclass
class _Shared:
    """An adapter of this machine that is in the object store as long as anybody copies it from there."""

    put: "asyncio.Task[Any]"
    users: int = 0


class RayTransport:
    """A :class:`~lorikeet.cluster.adapters.transport.Transport` between the actors of replicas.

    Args:
        hosts: of all replicas; read at every call, and taken out when they are released.
    """

    def __init__(self, hosts: MutableMapping[ReplicaId, RayHost]) -> None:
        self._hosts = hosts
        self._shared: dict[AdapterDigest, _Shared] = {}

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """See ``Transport``. The files do not come to this process: it only says where to get them."""
        what = f"adapter {adapter.name!r} from {source} to {destination}"
        giver, taker = self._actor(what, source), self._taker(what, destination)
        size, files = giver.read.options(num_returns=2).remote(adapter.digest)
        try:
            await size
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {source} cannot be read: {reason_of(error)}") from error
        return await self._store(what, adapter, taker, files)

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """See ``Transport``. Copies of one adapter at the same time are read from its files once."""
        what = f"adapter {adapter.name!r} to {destination}"
        taker = self._taker(what, destination)
        try:
            async with self._in_object_store(adapter) as files:
                return await self._store(what, adapter, taker, files)
        except (PoolFolderError, ray.exceptions.RayError) as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """See ``Transport``."""
        what = f"adapter {adapter.name!r} at {replica}"
        actor = self._actor(what, replica)
        try:
            await actor.delete.remote(adapter.digest)
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """See ``Transport``."""
        what = f"the adapters of {replica}"
        actor = self._actor(what, replica)
        try:
            held: dict[AdapterDigest, str] = await actor.held.remote()
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error
        return held

    async def discard(self, replica: ReplicaId) -> None:
        """See ``Transport``."""
        what = f"the adapters of {replica}"
        actor = self._actor(what, replica)
        try:
            await actor.discard.remote()
        except ray.exceptions.RayError as error:
            raise TransportError(f"{what}: {reason_of(error)}") from error

    def release(self, replica: ReplicaId) -> None:
        """See ``Transport``. Its owner closes the host."""
        self._hosts.pop(replica, None)

    def close(self) -> None:
        """See ``Transport``. Actors are owned by their hosts."""

    def _actor(self, what: str, replica: ReplicaId) -> Any:
        host = self._hosts.get(replica)
        if host is None or host.actor is None:
            raise TransportError(f"{what}: {replica} is not there")
        return host.actor

    def _taker(self, what: str, replica: ReplicaId) -> Any:
        try:
            return self._actor(what, replica)
        except TransportError as error:
            raise DestinationLost(str(error)) from error

    async def _store(self, what: str, adapter: AdapterRef, taker: Any, files: Any) -> AdapterRef:
        left = _STORE_ATTEMPTS
        while True:
            try:
                folder: str = await taker.store.remote(adapter.digest, files)
                return msgspec.structs.replace(adapter, folder=folder)
            except ray.exceptions.ActorDiedError as error:
                raise DestinationLost(f"{what}: {reason_of(error)}") from error
            except ray.exceptions.RayError as error:
                left -= 1
                if not (left and isinstance(error, ray.exceptions.ActorUnavailableError)):
                    raise TransportError(f"{what}: {reason_of(error)}") from error
            await asyncio.sleep(_TRY_AGAIN_S)

    @asynccontextmanager
    async def _in_object_store(self, adapter: AdapterRef) -> AsyncIterator[Any]:
        """Yield a reference to an adapter's files, which are dropped when nobody uses it any longer."""
        shared = self._shared.get(adapter.digest)
        if shared is None:
            shared = self._shared[adapter.digest] = _Shared(asyncio.create_task(_put(Path(adapter.folder))))
        shared.users += 1
        try:
            yield await asyncio.shield(shared.put)  # one that is given up must not take it from the others
        finally:
            shared.users -= 1
            if not shared.users:
                del self._shared[adapter.digest]


async def _put(folder: Path) -> Any:
    return await asyncio.to_thread(lambda: ray.put(read_files(folder)))
