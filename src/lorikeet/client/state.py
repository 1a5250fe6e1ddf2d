"""Describes the state of the engines, for ``/v1/cluster`` and the metrics."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import EngineReady, EngineStats, RouteStats


class ReplicaView(Protocol):
    """Reads the state of one replica from its supervisor."""

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of the engine."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest gauges; None before the first."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine is ready."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether the engine was put to sleep."""
        ...

    @property
    def restarts(self) -> int:
        """The number of restarts of the engine."""
        ...

    @property
    def trouble(self) -> str:
        """The reason why the engine is not ready. It has no meaning while the engine is ready."""
        ...

    @property
    def process_id(self) -> int | None:
        """The process id of the engine on its machine; None while there is none."""
        ...

    @property
    def address(self) -> str:
        """The name or network address of the engine's machine."""
        ...


class ReplicaState(msgspec.Struct, frozen=True):
    """The state of one replica for ``/v1/cluster``.

    Attributes:
        id: id of the replica.
        pid, address: process id of the engine, and address of the engine's machine.
        alive: whether the engine is ready.
        is_open: whether the replica gets new requests.
        restarts: number of restarts of the engine.
        running, waiting: number of requests by the engine's count.
        resident: digests of the adapters on the device.
        held, held_bytes: number of adapters whose files the replica has, and the size of these files in bytes.
        memory_used: used share of the device memory; None if unknown.
        links: transfers between tiers since the engine's start, by route such as ``host-device``.
        trouble: the reason why the engine is not ready; empty if it is ready or the reason is unknown.
        adopted_from: name of the lost server from which the replica was adopted; empty if it was started here.
    """

    id: ReplicaId
    pid: int | None
    address: str
    alive: bool
    is_open: bool
    restarts: int
    running: int
    waiting: int
    resident: tuple[AdapterDigest, ...]
    held: int
    held_bytes: int
    memory_used: float | None
    links: dict[str, RouteStats] = {}
    trouble: str = ""
    adopted_from: str = ""


class CopyCounts(msgspec.Struct):
    """Counts of adapter copies between machines since the start.

    Attributes:
        fetches, fetched_bytes: copies from one replica to another.
        provisions, provided_bytes: copies from an adapter's own files to a replica.
        peer_bytes: bytes of both kinds that went directly from the memory of one process to another's.
        disk_bytes: bytes of both kinds that were written to a disk.
        failed: failed copies of both kinds.
        deletes: copies deleted.
        under_way: number of copies in progress.
    """

    fetches: int = 0
    fetched_bytes: int = 0
    provisions: int = 0
    provided_bytes: int = 0
    peer_bytes: int = 0
    disk_bytes: int = 0
    failed: int = 0
    deletes: int = 0
    under_way: int = 0


class AdoptionCounts(msgspec.Struct):
    """Counts of replicas that changed their server since the start.

    Attributes:
        adopted: replicas taken over from servers that were gone.
        handed_back: replicas handed back to servers that started.
        resumed: requests that went on at an adopted replica, when their clients came back.
    """

    adopted: int = 0
    handed_back: int = 0
    resumed: int = 0


class ClusterState(msgspec.Struct, frozen=True):
    """The state of all replicas, and the placement of adapters on them.

    Attributes:
        replicas: replicas in the order of their start.
        unrouted: number of requests that are not at a replica yet.
        epoch: number of the placement.
        shares: digest → replica → share of the adapter's requests; empty with one replica.
        copies: copies of adapters since the start.
        moves: requests moved between replicas since the start.
        moves_with_kv: number of moves with KV; the other requests recomputed it.
        wanted: number of replicas that the autoscaler wants; None without an autoscaler.
        adoptions: replicas taken over from other servers since the start.
    """

    replicas: tuple[ReplicaState, ...]
    unrouted: int = 0
    epoch: int = 0
    shares: dict[AdapterDigest, dict[ReplicaId, float]] = {}
    copies: CopyCounts = msgspec.field(default_factory=CopyCounts)
    moves: int = 0
    moves_with_kv: int = 0
    wanted: int | None = None
    adoptions: AdoptionCounts = msgspec.field(default_factory=AdoptionCounts)

    def shown(self, names: Mapping[AdapterDigest, str]) -> dict[str, Any]:
        """Return the body of ``/v1/cluster``.

        Args:
            names: names of adapters by digest. An adapter without a name is shown by its digest.
        """
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for replica in shown["replicas"]:
            replica["resident"] = [names.get(digest, digest) for digest in replica["resident"]]
        shown["shares"] = {names.get(digest, digest): shares for digest, shares in self.shares.items()}
        return {"object": "cluster", **shown}


def replica_state(
    replica: ReplicaId, view: ReplicaView, *, is_open: bool = True, held: int = 0, held_bytes: int = 0
) -> ReplicaState:
    """Return the :class:`ReplicaState` of a replica; ``is_open``, ``held`` and ``held_bytes`` are the cluster's."""
    stats = view.stats
    return ReplicaState(
        id=replica,
        pid=view.process_id,
        address=view.address,
        alive=view.alive,
        is_open=is_open and view.alive,
        restarts=view.restarts,
        running=0 if stats is None else stats.running,
        waiting=0 if stats is None else stats.waiting,
        resident=() if stats is None else tuple(sorted(stats.resident_adapters)),
        held=held,
        held_bytes=held_bytes,
        memory_used=0.0 if stats is None else 1 - stats.free_blocks / stats.total_blocks,
        links={} if stats is None else stats.memory.transfers,
        trouble="" if view.alive else view.trouble,
    )
