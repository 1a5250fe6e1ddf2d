"""Finds and claims replicas whose server is gone, and prolongs the leases of this server's replicas."""

import asyncio
import hashlib
import socket
import threading
import time
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import ray
import ray.exceptions
import structlog

from lorikeet import __version__
from lorikeet.cluster.lease import RENEW_EVERY_S, LeaseState
from lorikeet.cluster.ray.errors import reason_of
from lorikeet.cluster.ray.replica_actor import ReplicaOwner
from lorikeet.config import Settings

NAMESPACE = "lorikeet"
"""Ray's namespace of the replicas that can outlive their servers."""

_ANSWER_S = 2.0
"""Most seconds to wait for an actor that may be on a lost machine."""
_RETURN_S = 30.0
"""Most seconds to wait for a replica that another server hands back, which empties it first."""
_RETURN_POLL_S = 0.2
_END_S = 1.0

log = structlog.get_logger("lorikeet")


def group_of(settings: Settings, registry_url: str) -> str:
    """Return the name of all servers that adopt each other's replicas.

    They have the same version, the same engines and the same registry.
    """
    where = socket.gethostname() if registry_url.startswith("sqlite") else ""
    adapters = settings.adapters.enabled, settings.adapters.max_rank
    same = (__version__, settings.model, settings.engine, adapters, settings.kv_events, registry_url, where)
    return hashlib.sha256(msgspec.json.encode(same)).hexdigest()[:24]


class Claim(NamedTuple):
    """Holds a replica that this process has claimed, and must take over.

    Attributes:
        name: name of the replica's actor.
        actor: handle of the actor.
        fence: fencing token of this process.
        server: name of the server that owned it before.
        silent_s: seconds for which it had no server.
    """

    name: str
    actor: Any
    fence: int
    server: str
    silent_s: float


class RayAdoption:
    """Prolongs the leases of this process's replicas on a thread, and claims replicas that have no server.

    Args:
        group: name of the servers that adopt each other's replicas; see :func:`group_of`.
        owner: this process.
        peer_key: key with which other processes fetch adapters from this server's replicas.

    Attributes:
        owner: the argument.
        wanted: names of the actors that other servers ask for.
    """

    def __init__(self, group: str, owner: ReplicaOwner, peer_key: bytes) -> None:
        self.owner = owner
        self.wanted: frozenset[str] = frozenset()
        self._prefix = f"{group}:"
        self._peer_key = peer_key
        self._kept: dict[str, tuple[Any, int]] = {}
        self._ending: list[Any] = []
        self._searches = 0
        self._closed = threading.Event()
        threading.Thread(target=self._renew, name="replica-leases", daemon=True).start()

    def new_name(self) -> str:
        """Return a name for a new actor."""
        return f"{self._prefix}{uuid.uuid4().hex}"

    def keep(self, name: str, actor: Any, fence: int) -> None:
        """Prolong the lease of an actor from now on."""
        self._kept[name] = actor, fence

    def leave(self, name: str, actor: Any, fence: int) -> None:
        """Prolong the lease of an actor no more, unless this process has claimed it again."""
        if self._kept.get(name) == (actor, fence):
            del self._kept[name]

    def end(self, name: str, actor: Any, fence: int) -> None:
        """Begin to end an actor, unless another server has claimed it."""
        self.leave(name, actor, fence)
        self._ending = [*_unfinished(self._ending), actor.end.remote(fence)]

    async def find(self) -> Claim | None:
        """Claim a replica that has no server, or one that another server has to spare; None if there is none."""
        self._searches += 1
        try:
            if (claim := await self._settled()) is not None:
                return claim
            for name, actor, state in await self._others():
                if state.is_spare and (claim := await self._handed_back(name, actor, state)) is not None:
                    return claim
            return None
        finally:
            self._searches -= 1

    async def claim(self) -> Claim | None:
        """Claim one replica that has no server beside the own ones, which is spare; None if there is none.

        While :meth:`find` looks for a replica of this server's own number, it goes first.
        """
        for name, actor, state in await self._others():
            if self._searches:
                return None
            if state.is_free and (claim := await self._claim(name, actor, state, is_spare=True)) is not None:
                return claim
        return None

    async def _settled(self) -> Claim | None:
        """Claim a replica as soon as its lease has run out; None once every other lease has been renewed.

        A server that restarts after a crash finds its replicas before their leases have run out.
        """
        began_s = time.monotonic()
        while True:
            is_settled = True
            for name, actor, state in await self._others():
                if state.is_free and (claim := await self._claim(name, actor, state, is_spare=False)) is not None:
                    return claim
                is_settled = is_settled and (state.is_free or state.silent_s < time.monotonic() - began_s)
            if is_settled:
                return None
            await asyncio.sleep(_RETURN_POLL_S)

    def close(self) -> None:
        """Wait for actors that end, and end the thread. Other leases run out."""
        self._closed.set()
        if self._ending:
            ray.wait(self._ending, num_returns=len(self._ending), timeout=_END_S)

    async def _handed_back(self, name: str, actor: Any, state: LeaseState) -> Claim | None:
        """Ask for an adopted replica until its owner has handed it back; None if the owner does not."""
        until_s = time.monotonic() + _RETURN_S
        is_asked = False
        while time.monotonic() < until_s:
            try:
                if not await _answer(actor.want.remote(self.owner.process)):
                    return None
            except (ray.exceptions.RayError, TimeoutError):
                return None
            if not is_asked:
                log.info("asking another server for a replica", server=state.server)
                is_asked = True
            if (claim := await self._claim(name, actor, state, is_spare=False)) is not None:
                return claim
            await asyncio.sleep(_RETURN_POLL_S)
        return None

    async def _claim(self, name: str, actor: Any, state: LeaseState, *, is_spare: bool) -> Claim | None:
        me = self.owner
        try:
            fence = await _answer(actor.claim.remote(me.process, me.server, self._peer_key, is_spare))
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("a replica without a server does not answer", server=state.server, reason=reason_of(error))
            return None
        if fence is None:
            return None
        self.keep(name, actor, fence)
        return Claim(name, actor, fence, state.server, state.silent_s)

    async def _others(self) -> list[tuple[str, Any, LeaseState]]:
        """Return the actors of the group that this process does not own, with their leases."""
        found = await asyncio.to_thread(self._named)

        async def with_state(name: str, actor: Any) -> tuple[str, Any, LeaseState] | None:
            with suppress(ray.exceptions.RayError, TimeoutError):
                state: LeaseState = await _answer(actor.lease.remote())
                return None if state.owner == self.owner.process and not state.is_free else (name, actor, state)
            return None

        described = await asyncio.gather(*(with_state(name, actor) for name, actor in found))
        return [each for each in described if each is not None]

    def _named(self) -> list[tuple[str, Any]]:
        found = []
        try:
            listed = ray.util.list_named_actors(all_namespaces=True)
        except ray.exceptions.RayError as error:
            log.warning("cannot look for replicas of other servers", reason=reason_of(error))
            return []
        for each in listed:
            name = each["name"]
            if each["namespace"] == NAMESPACE and name.startswith(self._prefix) and name not in self._kept:
                with suppress(ValueError):  # It has just ended.
                    found.append((name, ray.get_actor(name, NAMESPACE)))
        return found

    def _renew(self) -> None:
        while not self._closed.wait(RENEW_EVERY_S):
            try:
                self._renew_once()
            except Exception as error:  # Without this thread, other servers would claim all replicas.
                log.warning("cannot prolong the leases of replicas", reason=reason_of(error))

    def _renew_once(self) -> None:
        asked = {actor.renew.remote(fence): (name, actor, fence) for name, (actor, fence) in list(self._kept.items())}
        if not asked:
            self.wanted = frozenset()
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        wanted = set()
        for answer in ready:
            name, actor, fence = asked[answer]
            with suppress(ray.exceptions.RayError):  # The supervisor notices an actor that has died.
                renewal = ray.get(answer)
                if renewal.is_wanted:
                    wanted.add(name)
                elif not renewal.is_owner and self._kept.get(name) == (actor, fence):
                    self.leave(name, actor, fence)
                    log.warning("another server has claimed a replica of this one", actor=name)
        self.wanted = frozenset(wanted)


async def _answer(reference: Any) -> Any:
    async with asyncio.timeout(_ANSWER_S):
        return await reference


def _unfinished(references: list[Any]) -> list[Any]:
    return ray.wait(references, num_returns=len(references), timeout=0)[1] if references else []
