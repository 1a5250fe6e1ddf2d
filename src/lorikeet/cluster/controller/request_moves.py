"""Moves requests from one replica to another, with their KV where that is worth it."""

import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from lorikeet.client.streams import RequestHandle, Streams
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import Abort, ExportedKv, ExportRequest, ImportKv, Submit
from lorikeet.core.request import Request

_GUESS_BYTES, _GUESS_BYTES_PER_S = 64 * 2**20, 1e9


class KvBandwidth:
    """How fast KV travels between replicas, by what has travelled.

    Before any has, it is a guess, which counts like 64 MiB at that speed.

    Attributes:
        travelled_bytes: so far.
    """

    def __init__(self) -> None:
        self.travelled_bytes = 0
        self._seconds = _GUESS_BYTES / _GUESS_BYTES_PER_S

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second, from one replica's device to another's host."""
        return (_GUESS_BYTES + self.travelled_bytes) / self._seconds

    def note(self, size_bytes: int, half_s: float) -> None:
        """KV has come from a replica; the second half of its way, to another, is taken to be as long."""
        self.travelled_bytes += size_bytes
        self._seconds += 2 * half_s


class _UnderWay(NamedTuple):
    target: ReplicaId
    begun_s: float


class RequestMoves:
    """See the module.

    A request that takes its KV along is let go by its replica, which goes on with it until it hears of that. Its KV
    comes here, and goes with the request to the replica that it is handed to in the end.

    Args:
        streams: of all requests.
        replicas: by their ids.
        hand_on: has a request that is nowhere go on at a replica, or elsewhere if that has left.
        speed: learns from what travels.

    Attributes:
        count: requests that have moved.
        with_kv: those that have brought KV.
    """

    def __init__(
        self,
        streams: Streams,
        replicas: Mapping[ReplicaId, LiveReplica],
        hand_on: Callable[[RequestHandle, ReplicaId], None],
        speed: KvBandwidth,
    ) -> None:
        self.count = self.with_kv = 0
        self._streams = streams
        self._replicas = replicas
        self._hand_on = hand_on
        self._speed = speed
        self._under_way: dict[RequestId, _UnderWay] = {}
        self._parcels: dict[RequestId, ExportedKv] = {}

    @property
    def under_way(self) -> Set[RequestId]:
        """Requests that their replica has been told to let go."""
        return self._under_way.keys()

    def begin(self, request_id: RequestId, target: ReplicaId, *, with_kv: bool) -> bool:
        """See ``ClusterClient.move``."""
        if request_id not in self._streams or target not in self._replicas or not self._replicas[target].is_joined:
            return False
        handle = self._streams[request_id]
        if handle.replica in (None, target) or request_id in self._under_way:
            return False
        assert handle.replica is not None
        source = self._replicas[handle.replica].supervisor
        if with_kv:
            self._under_way[request_id] = _UnderWay(target, time.monotonic())
            source.send(ExportRequest(request_id))
        else:
            source.send(Abort(request_id))
            self._go_on(handle, target)
        return True

    def exported_kv(self, exported_kv: ExportedKv) -> None:
        """A replica has let a request go."""
        under_way = self._under_way.pop(exported_kv.request_id, None)
        if under_way is None:
            return  # it has ended meanwhile
        if exported_kv.blocks:
            self._parcels[exported_kv.request_id] = exported_kv
            self._speed.note(sum(map(len, exported_kv.blocks)), time.monotonic() - under_way.begun_s)
            self.with_kv += 1
        self._go_on(self._streams[exported_kv.request_id], under_way.target)

    def messages(self, request: Request) -> Iterator[ImportKv | Submit]:
        """Yield what hands a request to a replica: its KV goes first, if it brings any."""
        if (brought := self._parcels.pop(request.request_id, None)) is not None:
            yield ImportKv(request.adapter, brought.keys, brought.blocks)
        yield Submit(request)

    def forget(self, request_id: RequestId) -> None:
        """A request has ended, or its replica has: it moves no longer."""
        self._under_way.pop(request_id, None)
        self._parcels.pop(request_id, None)

    def _go_on(self, handle: RequestHandle, target: ReplicaId) -> None:
        self.count += 1
        handle.replica = None
        self._hand_on(handle, target)
