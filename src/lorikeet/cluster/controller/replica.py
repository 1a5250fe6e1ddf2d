"""Holds the controller's state of a replica in a live cluster."""

from lorikeet.client.client import PendingDrops
from lorikeet.client.supervisor import EngineSupervisor
from lorikeet.cluster.routing.fleet import ReplicaInfo
from lorikeet.config import EngineSettings
from lorikeet.core.events import AdapterEvent, AdapterEvicted
from lorikeet.core.ids import AdapterDigest


class LiveReplica:
    """Tracks a replica from its first start until it is removed.

    Args:
        supervisor: supervisor of its engine.
        adopted_from: name of the lost server from which the replica was adopted; empty if it was started here.

    Attributes:
        supervisor, adopted_from: the arguments.
        epoch: incarnation of the engine; rises with every start.
        is_joined: whether the dispatcher routes requests to the replica.
        is_leaving: whether the replica is being removed.
        drops: adapters that the engine is dropping.
    """

    def __init__(self, supervisor: EngineSupervisor, adopted_from: str = "") -> None:
        self.supervisor = supervisor
        self.adopted_from = adopted_from
        self.epoch = 0
        self.is_joined = False
        self.is_leaving = False
        self.drops = PendingDrops()

    def info(self, engine: EngineSettings) -> ReplicaInfo:
        """Return the replica's sizes for the fleet; ``engine`` holds its settings."""
        engine_info = self.supervisor.engine_info
        return ReplicaInfo(
            replica=self.supervisor.replica,
            epoch=self.epoch,
            total_tokens=engine_info.total_blocks * engine_info.block_size,
            max_batch=engine.max_num_seqs,
            kv_token_bytes=engine.memory_ranks * engine_info.block_bytes / engine_info.block_size,
        )

    def on_adapter_event(self, event: AdapterEvent) -> None:
        """Record from an engine's event that a drop has ended."""
        if isinstance(event, AdapterEvicted) and event.dropped:
            self.drops.end(event.digest, event.freed_bytes)

    async def drop(self, adapter: AdapterDigest) -> int:
        """Drop an unused adapter from the engine, and return the number of bytes freed; 0 if the engine is down."""
        if not self.supervisor.is_connected:
            return 0
        freed = self.drops.begin(adapter)
        self.supervisor.drop_adapter(adapter)
        return await freed
