"""Moves requests between replicas, one by one or all requests of a removed replica, with KV where that is faster."""

import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from lorikeet.client.client import RequestHandle, Streams
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.migration.problem import MoveTimes
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import Abort, ExportedKv, ExportRequest, ImportKv, Submit
from lorikeet.core.request import Request

_PRIOR_BYTES = 64 * 2**20
_PRIOR_BYTES_PER_S = 1e9


class KvBandwidth:
    """Estimates the speed of KV transfers between replicas from the transfers so far.

    The initial estimate weighs as much as a transfer of 64 MiB.

    Attributes:
        transferred_bytes: KV bytes transferred so far.
    """

    def __init__(self) -> None:
        self.transferred_bytes = 0
        self._seconds = _PRIOR_BYTES / _PRIOR_BYTES_PER_S

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second from one replica's device to another replica's host tier."""
        return (_PRIOR_BYTES + self.transferred_bytes) / self._seconds

    def add(self, size_bytes: int, half_s: float) -> None:
        """Count exported KV. The import at the target is assumed to take as long as the export (``half_s``)."""
        self.transferred_bytes += size_bytes
        self._seconds += 2 * half_s


class _PendingExport(NamedTuple):
    target: ReplicaId | None
    begun_s: float


_CARRIED_BYTES = 2**30
"""Most bytes of KV in transit while a replica is emptied, because they pass through this process."""


class HandOver:
    """Moves the requests of a replica that is being removed, with their KV where that is faster.

    If KV cannot be moved, requests stay, because their replica finishes more requests than other replicas would
    recompute.

    Args:
        streams: streams of all requests.
        moves: the object that moves a request.
        fleet: state of the replicas.
        times: times of moves.
    """

    def __init__(self, streams: Streams, moves: "RequestMoves", fleet: Fleet, times: MoveTimes) -> None:
        self._streams = streams
        self._moves = moves
        self._fleet = fleet
        self._times = times

    def advance(self, replica: ReplicaId) -> bool:
        """Start as many moves as may run now. Return whether KV of this replica is moving or waits to be moved."""
        if not (self._times.can_move_kv and self._fleet.open_index):
            return False
        carried_bytes = sum(map(self._kv_bytes, self._moves.carried))
        must_wait = False
        for handle in self._streams.at(replica):
            request_id = handle.request.request_id
            tokens = handle.known_tokens
            if request_id in self._moves.exporting:
                continue
            entry = self._fleet.entry(request_id)
            has_kv = entry is not None and entry.admitted_s is not None
            with_kv = has_kv and self._times.transfers_kv(tokens)
            if with_kv and carried_bytes and carried_bytes + self._kv_bytes(request_id) > _CARRIED_BYTES:
                must_wait = True
            elif self._moves.begin(request_id, None, with_kv=with_kv) and with_kv:
                carried_bytes += self._kv_bytes(request_id)
        return must_wait or any(self._streams[request_id].replica == replica for request_id in self._moves.exporting)

    def _kv_bytes(self, request_id: RequestId) -> float:
        return self._times.kv_token_bytes * self._streams[request_id].known_tokens


class RequestMoves:
    """Moves requests between replicas.

    To move a request with its KV, its replica exports it: the replica runs the request until the export message
    arrives, then sends the KV to this process. The KV is sent with the request to the request's next replica.

    Args:
        streams: streams of all requests.
        replicas: replicas by their ids.
        redispatch: sends a request that has no replica to the given replica. If the given replica has left or is None,
            the routing policy chooses another.
        bandwidth: estimate of the KV bandwidth, updated by every transfer.

    Attributes:
        count: number of requests that have moved.
        with_kv: number of moves with KV.
    """

    def __init__(
        self,
        streams: Streams,
        replicas: Mapping[ReplicaId, LiveReplica],
        redispatch: Callable[[RequestHandle, ReplicaId | None], None],
        bandwidth: KvBandwidth,
    ) -> None:
        self.count = self.with_kv = 0
        self._streams = streams
        self._replicas = replicas
        self._redispatch = redispatch
        self._bandwidth = bandwidth
        self._exporting: dict[RequestId, _PendingExport] = {}
        self._exported: dict[RequestId, ExportedKv] = {}
        self._exported_s: dict[ReplicaId | None, float] = {}

    @property
    def exporting(self) -> Set[RequestId]:
        """Ids of requests whose replica will export them."""
        return self._exporting.keys()

    @property
    def carried(self) -> Set[RequestId]:
        """Ids of requests whose KV is being exported, or is held in this process until the requests are sent."""
        return self._exporting.keys() | self._exported.keys()

    def begin(self, request_id: RequestId, target: ReplicaId | None, *, with_kv: bool) -> bool:
        """Begin to move a request. Return False if it cannot be moved now. See ``ClusterClient.move``.

        Without a target, the routing policy chooses a replica when the request has left its old one.
        """
        if request_id not in self._streams:
            return False
        if target is not None and (target not in self._replicas or not self._replicas[target].is_joined):
            return False
        handle = self._streams[request_id]
        if handle.replica is None or handle.replica == target or request_id in self._exporting:
            return False
        source = self._replicas[handle.replica].supervisor
        if with_kv:
            self._exporting[request_id] = _PendingExport(target, time.monotonic())
            source.send(ExportRequest(request_id))
        else:
            source.send(Abort(request_id))
            self._continue_at(handle, target)
        return True

    def on_exported(self, exported: ExportedKv) -> None:
        """Continue a request that its replica has exported."""
        pending = self._exporting.pop(exported.request_id, None)
        if pending is None:
            return  # The request may have ended during the export.
        if exported.blocks:
            self._exported[exported.request_id] = exported
            # A replica exports one request after the other, so each export is timed from the end of the previous one.
            source = self._streams[exported.request_id].replica
            now = time.monotonic()
            begun_s = max(pending.begun_s, self._exported_s.get(source, 0.0))
            self._bandwidth.add(sum(map(len, exported.blocks)), now - begun_s)
            self._exported_s[source] = now
            self.with_kv += 1
        self._continue_at(self._streams[exported.request_id], pending.target)

    def messages(self, request: Request) -> Iterator[ImportKv | Submit]:
        """Yield the messages that submit a request to a replica, its exported KV first."""
        if (exported := self._exported.pop(request.request_id, None)) is not None:
            yield ImportKv(request.adapter, exported.keys, exported.blocks)
        yield Submit(request)

    def forget(self, request_id: RequestId) -> None:
        """Remove the move of a request that has ended, or whose replica has died."""
        self._exporting.pop(request_id, None)
        self._exported.pop(request_id, None)

    def _continue_at(self, handle: RequestHandle, target: ReplicaId | None) -> None:
        self.count += 1
        handle.replica = None
        self._redispatch(handle, target)
