"""Prefetches all adapters: the upper bound that TOPPINGS calls CACHED (section 7.1)."""

from collections.abc import Iterator

import numpy as np

from lorikeet.memory.policies.base import PrefetchPolicy, is_prefetchable
from lorikeet.memory.tree import NodeKind, NodeTransfer


class AllPrefetch(PrefetchPolicy):
    """Prefetches every registered adapter, in order of registration, without evicting other nodes."""

    below_watermark_only = False

    def targets(self, now: float) -> Iterator[int]:
        """Yield the adapters that are neither on the device nor in a transfer."""
        tree = self.view.tree
        every = slice(tree.end)
        away = (tree.kind[every] == NodeKind.ADAPTER) & ~tree.on_device[every] & (tree.moving[every] == NodeTransfer.NO)
        for adapter in np.flatnonzero(away).tolist():
            if is_prefetchable(tree, adapter):
                yield adapter
