"""Prefetches the adapters of waiting requests, in queue order (Chameleon §4.1, after S-LoRA)."""

from collections.abc import Iterator

import numpy as np

from lorikeet.memory.policies.base import PrefetchPolicy
from lorikeet.memory.tree import NodeTransfer


class QueuePrefetch(PrefetchPolicy):
    """Prefetches the adapters of waiting requests that are not on the device.

    A prefetch evicts only adapters that no queued request needs, and only if the eviction policy sets
    ``evictable_below``.
    """

    below_watermark_only = False
    follows_queue = True

    def targets(self, now: float) -> Iterator[int]:
        """Yield the adapters in queue order."""
        tree = self.view.tree
        wanted = np.fromiter(self.view.waiting, np.int64)
        yield from wanted[~tree.on_device[wanted] & (tree.moving[wanted] == NodeTransfer.NO)].tolist()

    def evicts_below(self, node: int) -> float:
        """Return the eviction policy's ``evictable_below``."""
        return self.eviction.evictable_below
