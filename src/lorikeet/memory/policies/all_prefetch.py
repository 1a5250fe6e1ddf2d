"""Prefetch of everything: the upper bound that TOPPINGS calls CACHED (section 7.1)."""

from collections.abc import Iterator

import numpy as np

from lorikeet.memory.policies.base import PrefetchPolicy, is_prefetchable
from lorikeet.memory.tree import NodeKind, NodeTransfer


class AllPrefetch(PrefetchPolicy):
    """Names every adapter that anybody may ask for, in the order in which they became known; nobody leaves for it."""

    fills = False

    def targets(self, now: float) -> Iterator[int]:
        """Yield the adapters that are off the device and at rest."""
        tree = self.view.tree
        every = slice(tree.end)
        away = (tree.kind[every] == NodeKind.ADAPTER) & ~tree.on_device[every] & (tree.moving[every] == NodeTransfer.NO)
        for adapter in np.flatnonzero(away).tolist():
            if is_prefetchable(tree, adapter):
                yield adapter
