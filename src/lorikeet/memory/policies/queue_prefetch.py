"""Prefetch by the queue (Chameleon §4.1, after S-LoRA): what waiting requests want, in their order."""

from collections.abc import Iterator

import numpy as np

from lorikeet.memory.policies.base import PrefetchPolicy
from lorikeet.memory.tree import NodeTransfer


class QueuePrefetch(PrefetchPolicy):
    """Names the adapters of waiting requests that are not on the device.

    Room for them is made by evicting adapters that no queued request wants, where the eviction policy tells those
    apart; never others.
    """

    fills = False
    follows_queue = True

    def targets(self, now: float) -> Iterator[int]:
        """Yield them in the order of the queue."""
        tree, wanted = self.view.tree, np.fromiter(self.view.waiting, np.int64)
        yield from wanted[~tree.on_device[wanted] & (tree.moving[wanted] == NodeTransfer.NO)].tolist()

    def evicts_below(self, node: int) -> float:
        """Return what the eviction policy says."""
        return self.eviction.dispensable_below
