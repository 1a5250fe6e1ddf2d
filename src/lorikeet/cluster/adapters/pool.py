"""The distributed adapter pool: copies are made when first asked for and deleted when nobody is sent there.

Here is decided what is fetched from whom and what is deleted; how bytes travel is somebody else's. Every call returns
what is to be done because of it.

Source: LoRAServe, section IV-B; the rules that it leaves open are told in docs/decisions/loraserve-placement.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

from lorikeet.cluster.tables import AdapterTable, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class Fetch(NamedTuple):
    """A copy to make.

    Attributes:
        number: names it; its end is reported with it.
        adapter: what.
        source: who has it.
        destination: who wants it.
    """

    number: int
    adapter: AdapterDigest
    source: ReplicaId
    destination: ReplicaId


class PoolActions(NamedTuple):
    """What follows from an event.

    Attributes:
        ready: requests whose adapter is there now; they may be sent, or go on.
        failed: requests whose adapter could be had from nobody; they are forgotten here.
        fetches: to be started.
        deletes: copies to delete; the table no longer has them.
    """

    ready: tuple[RequestId, ...] = ()
    failed: tuple[RequestId, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    deletes: tuple[tuple[AdapterDigest, ReplicaId], ...] = ()


NOTHING = PoolActions()


class _Inbound:
    """A fetch under way, with those who wait for it."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.waiting: list[RequestId] = []
        self.tried = {fetch.source}


class AdapterPool:
    """Who holds what, who uses it, and what is on its way.

    A request is counted from the moment at which it is routed, so a copy that it will need is not deleted, even though
    a later table sends nobody there. Two requests for one adapter at one replica share one fetch.

    Never deleted: a copy in use (by a request, or as the source of a fetch), one at a replica to which the adapter is
    routed, and the last.

    Args:
        routing: the desired state.
        prefetch: fetch what a new table asks for at once, instead of with the first request (not in the paper).
        is_there: whether a replica is; a table may name one that has left. Nothing is fetched unasked to others.
    """

    def __init__(
        self,
        routing: RoutingTable,
        prefetch: bool = False,
        is_there: Callable[[ReplicaId], bool] = lambda replica: True,
    ) -> None:
        self.table = AdapterTable()
        """The actual state; only the pool writes in it."""
        self._routing = routing
        self._prefetch = prefetch
        self._is_there = is_there
        self._uses = Counter[tuple[AdapterDigest, ReplicaId]]()  # by requests, and as a source
        self._requests: dict[RequestId, tuple[AdapterDigest, ReplicaId]] = {}
        self._inbound: dict[tuple[AdapterDigest, ReplicaId], _Inbound] = {}
        self._outbound = Counter[ReplicaId]()
        self._retired: set[AdapterDigest] = set()
        self._found: set[AdapterDigest] = set()  # since the last table, and perhaps where they are not routed to
        self._numbers = count()

    def seed(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Note a copy that came from outside the pool: read from the adapter's files, or found after a restart."""
        self._retired.discard(adapter)
        self._found.add(adapter)
        self.table.add(adapter, replica)

    def begin(self, request: RequestId, adapter: AdapterDigest, replica: ReplicaId) -> PoolActions:
        """Take in a request that is routed to a replica; it is ready at once if the adapter is there.

        Raises:
            ValueError: the request is known already.
        """
        if request in self._requests:
            raise ValueError(f"Request {request} has begun before")
        self._requests[request] = (adapter, replica)
        self._uses[adapter, replica] += 1
        if self.table.holds(replica, adapter):
            return PoolActions(ready=(request,))
        if inbound := self._inbound.get((adapter, replica)):
            inbound.waiting.append(request)
            return NOTHING
        fetches = self._start(adapter, replica)
        if not fetches:
            self._forget(request)
            return PoolActions(failed=(request,))
        self._inbound[adapter, replica].waiting.append(request)
        return PoolActions(fetches=fetches)

    def end(self, request: RequestId) -> PoolActions:
        """A request has finished, or will not be run; a fetch that it waits for goes on."""
        adapter, replica = self._requests[request]
        inbound = self._inbound.get((adapter, replica))
        if inbound and request in inbound.waiting:
            inbound.waiting.remove(request)
        self._forget(request)
        return PoolActions(deletes=self._collect([adapter]))

    def fetched(self, fetch: Fetch) -> PoolActions:
        """A fetch has ended well: the destination has a copy."""
        inbound = self._ended(fetch)
        if inbound is None:
            return NOTHING
        del self._inbound[fetch.adapter, fetch.destination]
        self.table.add(fetch.adapter, fetch.destination)
        return PoolActions(ready=tuple(inbound.waiting), deletes=self._collect([fetch.adapter]))

    def fetch_failed(self, fetch: Fetch) -> PoolActions:
        """A fetch has ended badly: the next holder is tried, and if there is none, those who wait have failed."""
        inbound = self._ended(fetch)
        if inbound is None:
            return NOTHING
        fetches, failed = self._retry(inbound)
        return PoolActions(failed=failed, fetches=fetches, deletes=self._collect([fetch.adapter]))

    def swap(self, routing: RoutingTable) -> PoolActions:
        """Take a table. Requests stay where they were routed. By the one that counts already less is to be done."""
        changed = sorted(self._found) if routing is self._routing else list(self.table)
        self._routing = routing
        self._found.clear()
        fetches = [fetch for adapter in routing.shares for fetch in self._missing(adapter)] if self._prefetch else []
        return PoolActions(fetches=tuple(fetches), deletes=self._collect(changed))

    def fill(self, adapter: AdapterDigest) -> PoolActions:
        """Fetch an adapter to all replicas that serve it, if copies are made unasked: somebody has it by now."""
        return PoolActions(fetches=tuple(self._missing(adapter)) if self._prefetch else ())

    def _missing(self, adapter: AdapterDigest) -> Iterator[Fetch]:
        """Begin to fetch an adapter to those to whom it is routed and who have it neither now nor soon."""
        for replica in filter(self._is_there, sorted(self._routing.replicas(adapter))):
            if not self.table.holds(replica, adapter) and (adapter, replica) not in self._inbound:
                yield from self._start(adapter, replica)

    def retire(self, adapter: AdapterDigest) -> PoolActions:
        """An adapter is not wanted any longer: all its copies are deleted as soon as no request uses it."""
        self._retired.add(adapter)
        return PoolActions(deletes=self._collect([adapter]))

    def keep(self, adapter: AdapterDigest) -> None:
        """An adapter is wanted, perhaps again after it was retired."""
        self._retired.discard(adapter)

    def leave(self, replica: ReplicaId) -> tuple[PoolActions, list[AdapterDigest]]:
        """A replica is gone with its copies and its requests, which whoever lost them routes again.

        Returns:
            What is to be done, and the adapters of which it had the last copy. They must be read from their files
            and seeded before requests of theirs, those that have failed by this included, begin again.
        """
        gone = [request for request, (_, where) in self._requests.items() if where == replica]
        for inbound in [each for each in self._inbound.values() if each.fetch.destination == replica]:
            self._ended(inbound.fetch)
            del self._inbound[inbound.fetch.adapter, replica]
        for request in gone:
            self._forget(request)
        lost = self.table.leave(replica)
        fetches: list[Fetch] = []
        failed: list[RequestId] = []
        for inbound in [each for each in self._inbound.values() if each.fetch.source == replica]:
            self._ended(inbound.fetch)
            again, given_up = self._retry(inbound)
            fetches += again
            failed += given_up
        return PoolActions((), tuple(failed), tuple(fetches), self._collect(list(self.table))), lost

    def _start(self, adapter: AdapterDigest, replica: ReplicaId) -> tuple[Fetch, ...]:
        """Begin a fetch, if somebody has the adapter."""
        source = self._source(adapter, frozenset())
        if source is None:
            return ()
        fetch = self._fetch(adapter, source, replica)
        self._inbound[adapter, replica] = _Inbound(fetch)
        return (fetch,)

    def _retry(self, inbound: _Inbound) -> tuple[tuple[Fetch, ...], tuple[RequestId, ...]]:
        """Begin again with another holder; else give up. Return what to start, and who has failed."""
        _, adapter, _, destination = inbound.fetch
        source = self._source(adapter, inbound.tried)
        if source is None:
            del self._inbound[adapter, destination]
            for request in inbound.waiting:
                self._forget(request)
            return (), tuple(inbound.waiting)
        inbound.tried.add(source)
        inbound.fetch = self._fetch(adapter, source, destination)
        return (inbound.fetch,), ()

    def _fetch(self, adapter: AdapterDigest, source: ReplicaId, destination: ReplicaId) -> Fetch:
        self._outbound[source] += 1
        self._uses[adapter, source] += 1
        return Fetch(next(self._numbers), adapter, source, destination)

    def _source(self, adapter: AdapterDigest, tried: Iterable[ReplicaId]) -> ReplicaId | None:
        """Return whom to fetch from: one that stays routed, with the fewest transfers, with the lowest id."""
        holders = self.table.holders(adapter).difference(tried)
        routed = self._routing.replicas(adapter)
        return min(holders, key=lambda each: (each not in routed, self._outbound[each], each), default=None)

    def _ended(self, fetch: Fetch) -> _Inbound | None:
        """Note that a fetch no longer occupies its source; return it if it is still wanted.

        One of a replica that has left was given up then, and may be reported afterwards.
        """
        inbound = self._inbound.get((fetch.adapter, fetch.destination))
        if inbound is None or inbound.fetch != fetch:
            return None
        self._outbound[fetch.source] -= 1
        self._unuse(fetch.adapter, fetch.source)
        return inbound

    def _forget(self, request: RequestId) -> None:
        self._unuse(*self._requests.pop(request))

    def _unuse(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        self._uses[adapter, replica] -= 1
        if not self._uses[adapter, replica]:
            del self._uses[adapter, replica]

    def _collect(self, adapters: Iterable[AdapterDigest]) -> tuple[tuple[AdapterDigest, ReplicaId], ...]:
        """Delete the copies that may be deleted; return them."""
        deletes: list[tuple[AdapterDigest, ReplicaId]] = []
        for adapter in adapters:
            holders = self.table.holders(adapter)
            wanted = set() if adapter in self._retired else self._routing.replicas(adapter)
            idle = [replica for replica in sorted(holders - wanted) if (adapter, replica) not in self._uses]
            if len(idle) == len(holders) and adapter in self._retired:
                self.table.forget(adapter)
                self._retired.remove(adapter)
            else:
                if len(idle) == len(holders):
                    idle = idle[1:]  # somebody keeps it
                for replica in idle:
                    self.table.remove(adapter, replica)
            deletes += [(adapter, replica) for replica in idle]
        return tuple(deletes)
