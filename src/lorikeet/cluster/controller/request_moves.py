"""Moves requests from one replica to another, with their KV where that is faster."""

import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from lorikeet.client.client import RequestHandle, Streams
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import Abort, ExportedKv, ExportRequest, ImportKv, Submit
from lorikeet.core.request import Request

_PRIOR_BYTES, _PRIOR_BYTES_PER_S = 64 * 2**20, 1e9


class KvBandwidth:
    """Estimates how fast KV is transferred between replicas, from the transfers so far.

    Before the first transfer it is a guess, which weighs like 64 MiB at that speed.

    Attributes:
        transferred_bytes: so far.
    """

    def __init__(self) -> None:
        self.transferred_bytes = 0
        self._seconds = _PRIOR_BYTES / _PRIOR_BYTES_PER_S

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second from one replica's device to another's host tier."""
        return (_PRIOR_BYTES + self.transferred_bytes) / self._seconds

    def add(self, size_bytes: int, half_s: float) -> None:
        """Count KV that a replica has exported; the import at the target is taken to last as long (``half_s``)."""
        self.transferred_bytes += size_bytes
        self._seconds += 2 * half_s


class _PendingExport(NamedTuple):
    target: ReplicaId
    begun_s: float


class RequestMoves:
    """Moves requests between replicas.

    A request that takes its KV along is exported: its replica runs it until it receives the export request, then sends
    the KV here. The KV is sent with the request to the replica that gets it in the end.

    Args:
        streams: of all requests.
        replicas: by their ids.
        redispatch: sends a request that has no replica to a replica, or elsewhere if that has left.
        bandwidth: learns from the transfers.

    Attributes:
        count: requests that have moved.
        with_kv: those that took KV along.
    """

    def __init__(
        self,
        streams: Streams,
        replicas: Mapping[ReplicaId, LiveReplica],
        redispatch: Callable[[RequestHandle, ReplicaId], None],
        bandwidth: KvBandwidth,
    ) -> None:
        self.count = self.with_kv = 0
        self._streams = streams
        self._replicas = replicas
        self._redispatch = redispatch
        self._bandwidth = bandwidth
        self._exporting: dict[RequestId, _PendingExport] = {}
        self._exported: dict[RequestId, ExportedKv] = {}

    @property
    def exporting(self) -> Set[RequestId]:
        """Requests whose replica has been told to export them."""
        return self._exporting.keys()

    def begin(self, request_id: RequestId, target: ReplicaId, *, with_kv: bool) -> bool:
        """Begin to move a request; False if it cannot be moved now. See ``ClusterClient.move``."""
        if request_id not in self._streams or target not in self._replicas or not self._replicas[target].is_joined:
            return False
        handle = self._streams[request_id]
        if handle.replica in (None, target) or request_id in self._exporting:
            return False
        assert handle.replica is not None
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
            return  # the request has ended meanwhile
        if exported.blocks:
            self._exported[exported.request_id] = exported
            self._bandwidth.add(sum(map(len, exported.blocks)), time.monotonic() - pending.begun_s)
            self.with_kv += 1
        self._continue_at(self._streams[exported.request_id], pending.target)

    def messages(self, request: Request) -> Iterator[ImportKv | Submit]:
        """Yield the messages that submit a request to a replica, its exported KV first."""
        if (exported := self._exported.pop(request.request_id, None)) is not None:
            yield ImportKv(request.adapter, exported.keys, exported.blocks)
        yield Submit(request)

    def forget(self, request_id: RequestId) -> None:
        """Forget the move of a request that has ended, or whose replica has died."""
        self._exporting.pop(request_id, None)
        self._exported.pop(request_id, None)

    def _continue_at(self, handle: RequestHandle, target: ReplicaId) -> None:
        self.count += 1
        handle.replica = None
        self._redispatch(handle, target)
