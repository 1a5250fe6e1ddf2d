"""A replica of a live cluster, as its head knows it."""

from lorikeet.cluster.entries import ReplicaInfo
from lorikeet.config import EngineSettings
from lorikeet.core.events import AdapterEvent, AdapterEvicted
from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.drops import Drops
from lorikeet.engine.keeper import EngineKeeper


class Replica:
    """A replica from its first start to its last end.

    Attributes:
        keeper: of its engine.
        epoch: incarnation of the engine; rises with every start.
        is_joined: the dispatcher knows it.
        is_leaving: it is being taken out.
        drops: adapters that its engine was told to drop.
    """

    def __init__(self, keeper: EngineKeeper) -> None:
        self.keeper = keeper
        self.epoch = 0
        self.is_joined = False
        self.is_leaving = False
        self.drops = Drops()

    def info(self, engine: EngineSettings) -> ReplicaInfo:
        """Return what the fleet must know of it; ``engine`` has its settings."""
        hello = self.keeper.hello
        return ReplicaInfo(
            replica=self.keeper.replica,
            epoch=self.epoch,
            total_tokens=hello.total_blocks * hello.block_size,
            max_batch=engine.max_num_seqs,
            kv_token_bytes=engine.memory_ranks * hello.block_bytes / hello.block_size,
        )

    def hear(self, event: AdapterEvent) -> None:
        """Note the end of a drop."""
        if isinstance(event, AdapterEvicted) and event.dropped:
            self.drops.ended(event.digest, event.freed_bytes)

    async def drop(self, adapter: AdapterDigest) -> int:
        """Have its engine forget an adapter that no request uses there; return the bytes freed."""
        if not self.keeper.alive:
            return 0
        freed = self.drops.begin(adapter)
        self.keeper.drop(adapter)
        return await freed
