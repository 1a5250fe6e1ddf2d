"""What can be read of the serving engines: their state, as ``/v1/cluster`` and the metrics show it."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import EngineReady, EngineStats, RouteStats


class ReplicaView(Protocol):
    """One replica."""

    @property
    def engine_info(self) -> EngineReady:
        """Its sizes."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """Its newest gauges, None before the first."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it is ready right now."""
        ...

    @property
    def restarts(self) -> int:
        """How often it had to be started again."""
        ...

    @property
    def process_id(self) -> int | None:
        """Process id of its engine on its machine, None while there is none."""
        ...

    @property
    def address(self) -> str:
        """Its machine."""
        ...


class ReplicaState(msgspec.Struct, frozen=True):
    """One replica, as ``/v1/cluster`` shows it.

    Attributes:
        id: its name.
        pid, address: of its engine's process, and of the machine on which it runs.
        alive: whether it is ready right now.
        is_open: it gets new requests.
        restarts: how often its engine had to be started again.
        running, waiting: requests, as its engine counts them.
        resident: digests of the adapters on its device.
        held, held_bytes: adapters whose files it has, and their bytes.
        memory_used: share of its device memory that is not free; None if it does not tell.
        links: what went between its tiers since its engine's start, by route such as ``host-device``.
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


class CopyCounts(msgspec.Struct):
    """Copies of adapters so far.

    Attributes:
        fetches, fetched_bytes: from one replica to another.
        provisions, provided_bytes: from adapters' own files.
        failed: of both.
        deletes: copies deleted.
        under_way: copies that have begun and not ended.
    """

    fetches: int = 0
    fetched_bytes: int = 0
    provisions: int = 0
    provided_bytes: int = 0
    failed: int = 0
    deletes: int = 0
    under_way: int = 0


class ClusterState(msgspec.Struct, frozen=True):
    """All replicas, and which adapters they are to serve.

    Attributes:
        replicas: in the order of their start.
        unrouted: requests that no replica has taken.
        epoch: of the placement.
        shares: digest → replica → share of the adapter's requests; empty with one replica.
        copies: so far.
        moves: requests moved between replicas so far.
        moves_with_kv: those of them whose KV went along; that of others was computed anew.
        wanted: replicas that there should be by the load; None where their number does not follow it.
    """

    replicas: tuple[ReplicaState, ...]
    unrouted: int = 0
    epoch: int = 0
    shares: dict[AdapterDigest, dict[ReplicaId, float]] = {}
    copies: CopyCounts = msgspec.field(default_factory=CopyCounts)
    moves: int = 0
    moves_with_kv: int = 0
    wanted: int | None = None

    def shown(self, names: Mapping[AdapterDigest, str]) -> dict[str, Any]:
        """Return it as ``/v1/cluster`` answers; adapters have names where they have one."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for replica in shown["replicas"]:
            replica["resident"] = [names.get(digest, digest) for digest in replica["resident"]]
        shown["shares"] = {names.get(digest, digest): shares for digest, shares in self.shares.items()}
        return {"object": "cluster", **shown}


def replica_state(
    replica: ReplicaId, view: ReplicaView, *, is_open: bool = True, held: int = 0, held_bytes: int = 0
) -> ReplicaState:
    """Return what is to be shown of a replica; see :class:`ReplicaState`."""
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
    )
