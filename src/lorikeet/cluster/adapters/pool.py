"""Tracks the distributed adapter pool and decides which adapters are copied and deleted.

A replica gets a copy when a request first needs the adapter there. The copy is deleted when the table routes no
requests to it.

The pool decides which copies are fetched and deleted. It moves no bytes: every call returns actions that the caller
carries out.

Source: LoRAServe, section IV-B; docs/decisions/loraserve-placement.md has the rules that the paper leaves open.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count
from math import inf
from typing import NamedTuple

from lorikeet.cluster.tables import AdapterTable, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId


class Fetch(NamedTuple):
    """Holds the adapter, source and destination of a copy between replicas.

    Attributes:
        number: number of the fetch, by which the caller reports the outcome.
        adapter: version to copy.
        source: replica that holds it.
        destination: replica that needs it.
    """

    number: int
    adapter: AdapterDigest
    source: ReplicaId
    destination: ReplicaId


class PoolActions(NamedTuple):
    """The actions that follow from a call.

    Attributes:
        ready: requests whose adapter is available now, so that they can be sent.
        failed: requests whose adapter no replica could send. The pool no longer tracks these requests.
        fetches: copies to start.
        deletes: copies to delete, which the adapter table no longer lists.
    """

    ready: tuple[RequestId, ...] = ()
    failed: tuple[RequestId, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    deletes: tuple[tuple[AdapterDigest, ReplicaId], ...] = ()


NOTHING = PoolActions()


class _Inbound:
    """Holds a running fetch and the requests that wait for it."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.waiting: list[RequestId] = []
        self.tried = {fetch.source}


class AdapterPool:
    """Tracks which replica holds which adapter, which requests use it, and which copies are in flight.

    The pool counts a request as soon as the request is routed. So a copy that the request will need is not deleted,
    even if a later table routes no requests to the copy. Two requests for one adapter at one replica share one fetch.

    A copy is never deleted while a request or a fetch uses it, while the table routes the adapter to its replica, or if
    it is the last copy.

    Args:
        routing: the desired placement.
        prefetch: whether a new table starts its fetches immediately, instead of at the first request. The paper has no
            prefetch.
        is_there: returns whether a replica exists and accepts copies. A table may name a replica that has left, and
            nothing is prefetched to such a replica.
        most_bytes: returns the limit of the total size of all copies. Above the limit, the copies that were unused for
            longest are deleted, even if the table names them, but never an adapter's last copy.

    Attributes:
        total_bytes: size of all adapters, each counted once.
    """

    def __init__(
        self,
        routing: RoutingTable,
        prefetch: bool = False,
        is_there: Callable[[ReplicaId], bool] = lambda replica: True,
        most_bytes: Callable[[], float] = lambda: inf,
    ) -> None:
        self.table = AdapterTable()
        """The adapter table, which only the pool changes."""
        self._most_bytes = most_bytes
        self._sizes: dict[AdapterDigest, int] = {}
        self._held_bytes = self.total_bytes = 0
        self._replicated = OrderedDict[
            AdapterDigest, None
        ]()  # adapters with several copies, in the order of their last use
        self._routing = routing
        self._prefetch = prefetch
        self._is_there = is_there
        self._uses = Counter[tuple[AdapterDigest, ReplicaId]]()  # uses by requests, and as the source of a fetch
        self._requests: dict[RequestId, tuple[AdapterDigest, ReplicaId]] = {}
        self._inbound: dict[tuple[AdapterDigest, ReplicaId], _Inbound] = {}
        self._outbound = Counter[ReplicaId]()
        self._retired: set[AdapterDigest] = set()
        self._found: set[AdapterDigest] = (
            set()
        )  # Adapters seeded since the last table, perhaps at replicas that do not serve them.
        self._numbers = count()

    def seed(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Record a copy that was read from the adapter's source files, or that was found after a restart."""
        self._retired.discard(adapter)
        self._found.add(adapter)
        self._add(adapter, replica)

    def size(self, adapter: AdapterDigest, size_bytes: int) -> None:
        """Set the size of an adapter. Until this call, the size counts as 0."""
        self.total_bytes += size_bytes - self._sizes.get(adapter, 0)
        self._held_bytes += len(self.table.holders(adapter)) * (size_bytes - self._sizes.get(adapter, 0))
        self._sizes[adapter] = size_bytes

    @property
    def held_bytes(self) -> int:
        """The size of all copies."""
        return self._held_bytes

    def is_source(self, replica: ReplicaId) -> bool:
        """Return whether a copy is being made from a replica."""
        return self._outbound[replica] > 0

    def begin(self, request: RequestId, adapter: AdapterDigest, replica: ReplicaId) -> PoolActions:
        """Count a request that is routed to a replica.

        The request is ready immediately if the replica holds the adapter.

        Raises:
            ValueError: the request was begun before.
        """
        if request in self._requests:
            raise ValueError(f"Request {request} has begun before")
        self._requests[request] = (adapter, replica)
        self._uses[adapter, replica] += 1
        if adapter in self._replicated:
            self._replicated.move_to_end(adapter)
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
        """Stop counting a request that has finished or will not run. A fetch for the request continues."""
        adapter, replica = self._requests[request]
        inbound = self._inbound.get((adapter, replica))
        if inbound and request in inbound.waiting:
            inbound.waiting.remove(request)
        self._forget(request)
        return PoolActions(deletes=self._collect([adapter]))

    def fetched(self, fetch: Fetch) -> PoolActions:
        """Record that a fetch has succeeded: the destination has a copy."""
        inbound = self._ended(fetch)
        if inbound is None:
            return NOTHING
        del self._inbound[fetch.adapter, fetch.destination]
        self._add(fetch.adapter, fetch.destination)
        return PoolActions(ready=tuple(inbound.waiting), deletes=self._collect([fetch.adapter]))

    def fetch_failed(self, fetch: Fetch, *, may_retry: bool = True) -> PoolActions:
        """Record that a fetch has failed. Fetch from the next holder; if there is none, fail the waiting requests.

        Args:
            fetch: the failed fetch.
            may_retry: whether another holder is tried. False if the destination is at fault.
        """
        inbound = self._ended(fetch)
        if inbound is None:
            return NOTHING
        fetches, failed = self._retry(inbound) if may_retry else ((), self._give_up(inbound))
        return PoolActions(failed=failed, fetches=fetches, deletes=self._collect([fetch.adapter]))

    def swap(self, routing: RoutingTable) -> PoolActions:
        """Replace the routing table. Requests stay where they were routed. Passing the current table again is cheap."""
        changed = sorted(self._found) if routing is self._routing else list(self.table)
        self._routing = routing
        self._found.clear()
        fetches = (
            [fetch for adapter in routing.shares for fetch in self._start_missing(adapter)] if self._prefetch else []
        )
        return PoolActions(fetches=tuple(fetches), deletes=self._collect(changed))

    def fetch_missing(self, adapter: AdapterDigest) -> PoolActions:
        """If prefetching, fetch an adapter, which has at least one copy, to all replicas that serve it."""
        return PoolActions(fetches=tuple(self._start_missing(adapter)) if self._prefetch else ())

    def _start_missing(self, adapter: AdapterDigest) -> Iterator[Fetch]:
        """Start fetching an adapter to every replica that should serve it and has no copy and no running fetch."""
        for replica in filter(self._is_there, sorted(self._routing.replicas(adapter))):
            if not self.table.holds(replica, adapter) and (adapter, replica) not in self._inbound:
                yield from self._start(adapter, replica)

    def retire(self, adapter: AdapterDigest) -> PoolActions:
        """Delete all copies of an adapter as soon as no request uses it."""
        self._retired.add(adapter)
        return PoolActions(deletes=self._collect([adapter]))

    def keep(self, adapter: AdapterDigest) -> None:
        """Undo :meth:`retire` for an adapter."""
        self._retired.discard(adapter)

    def leave(self, replica: ReplicaId) -> tuple[PoolActions, list[AdapterDigest]]:
        """Remove a replica with its copies and requests. The caller routes the requests again.

        Returns:
            The actions, and the adapters whose last copy was on the replica. The caller must read these adapters from
            their source files and seed them before it begins requests for them again, including the requests that this
            call failed.
        """
        gone = [request for request, (_, where) in self._requests.items() if where == replica]
        for inbound in [each for each in self._inbound.values() if each.fetch.destination == replica]:
            self._ended(inbound.fetch)
            del self._inbound[inbound.fetch.adapter, replica]
        for request in gone:
            self._forget(request)
        self._held_bytes -= sum(self._sizes.get(each, 0) for each in self.table.held_by(replica))
        lost = self.table.leave(replica)
        for adapter in [each for each in self._replicated if len(self.table.holders(each)) < 2]:
            del self._replicated[adapter]
        fetches: list[Fetch] = []
        failed: list[RequestId] = []
        for inbound in [each for each in self._inbound.values() if each.fetch.source == replica]:
            self._ended(inbound.fetch)
            again, given_up = self._retry(inbound)
            fetches += again
            failed += given_up
        return PoolActions((), tuple(failed), tuple(fetches), self._collect(list(self.table))), lost

    def _start(self, adapter: AdapterDigest, replica: ReplicaId) -> tuple[Fetch, ...]:
        """Start a fetch, if any replica holds the adapter."""
        source = self._source(adapter, frozenset())
        if source is None:
            return ()
        fetch = self._fetch(adapter, source, replica)
        self._inbound[adapter, replica] = _Inbound(fetch)
        return (fetch,)

    def _retry(self, inbound: _Inbound) -> tuple[tuple[Fetch, ...], tuple[RequestId, ...]]:
        """Fetch from another holder, or give up. Return the fetches to start and the requests that have failed."""
        _, adapter, _, destination = inbound.fetch
        source = self._source(adapter, inbound.tried)
        if source is None:
            return (), self._give_up(inbound)
        inbound.tried.add(source)
        inbound.fetch = self._fetch(adapter, source, destination)
        return (inbound.fetch,), ()

    def _give_up(self, inbound: _Inbound) -> tuple[RequestId, ...]:
        """End a fetch that has failed. Return the requests that waited for it."""
        del self._inbound[inbound.fetch.adapter, inbound.fetch.destination]
        for request in inbound.waiting:
            self._forget(request)
        return tuple(inbound.waiting)

    def _fetch(self, adapter: AdapterDigest, source: ReplicaId, destination: ReplicaId) -> Fetch:
        self._outbound[source] += 1
        self._uses[adapter, source] += 1
        return Fetch(next(self._numbers), adapter, source, destination)

    def _source(self, adapter: AdapterDigest, tried: Collection[ReplicaId]) -> ReplicaId | None:
        """Return the replica to fetch from.

        Replicas to which the adapter stays routed come first, then those with the fewest transfers, then the lowest id.
        """
        holders = (each for each in self.table.holders(adapter) if each not in tried)
        routed = self._routing.replicas(adapter)
        return min(holders, key=lambda each: (each not in routed, self._outbound[each], each), default=None)

    def _ended(self, fetch: Fetch) -> _Inbound | None:
        """Release the source of a fetch, and return the fetch; None if the fetch was cancelled.

        A fetch is cancelled when its source or destination leaves. Its outcome may be reported afterwards.
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
        """Delete the copies that may be deleted, and return them."""
        deletes: list[tuple[AdapterDigest, ReplicaId]] = []
        for adapter in adapters:
            holders = self.table.holders(adapter)
            wanted = frozenset[ReplicaId]() if adapter in self._retired else self._routing.replicas(adapter)
            idle = [replica for replica in sorted(holders - wanted) if (adapter, replica) not in self._uses]
            if len(idle) == len(holders) and adapter in self._retired:
                self.table.forget(adapter)
                self._retired.remove(adapter)
                self._replicated.pop(adapter, None)
                size_bytes = self._sizes.pop(adapter, 0)
                self._held_bytes -= len(holders) * size_bytes
                self.total_bytes -= size_bytes
            else:
                if len(idle) == len(holders):
                    idle = idle[1:]  # Keep the last copy.
                for replica in idle:
                    self._remove(adapter, replica)
            deletes += [(adapter, replica) for replica in idle]
        return (*deletes, *self._shrink())

    def _shrink(self) -> list[tuple[AdapterDigest, ReplicaId]]:
        """Delete copies until the total size is within the limit, and return the deleted copies.

        The copies that were unused for longest are deleted first.
        """
        surplus_bytes = self._held_bytes - self._most_bytes() if self._replicated else 0
        deletes: list[tuple[AdapterDigest, ReplicaId]] = []
        for adapter in self._replicated:
            if surplus_bytes <= 0:
                break
            idle = [each for each in sorted(self.table.holders(adapter)) if (adapter, each) not in self._uses]
            if len(idle) == len(self.table.holders(adapter)):
                idle.pop()  # The last copy stays.
            for replica in idle:
                if surplus_bytes > 0:
                    deletes.append((adapter, replica))
                    surplus_bytes -= self._sizes.get(adapter, 0)
        for adapter, replica in deletes:
            self._remove(adapter, replica)
        return deletes

    def _add(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        if self.table.holds(replica, adapter):
            return
        self.table.add(adapter, replica)
        self._held_bytes += self._sizes.get(adapter, 0)
        if len(self.table.holders(adapter)) > 1:
            self._replicated[adapter] = None

    def _remove(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        self.table.remove(adapter, replica)
        self._held_bytes -= self._sizes.get(adapter, 0)
        if len(self.table.holders(adapter)) < 2:
            self._replicated.pop(adapter, None)
