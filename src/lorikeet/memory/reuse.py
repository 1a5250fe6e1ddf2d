"""How often KV that leaves the device is asked for again."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from lorikeet.memory.tree import Nodes, Scores

_ASSUMED_LEFT, _ASSUMED_SHARE = 64.0, 0.3
"""Blocks that are assumed to have left at the start, and the share of them that was asked for again. Of an adapter the
share is assumed that all adapters have."""
_REMEMBERED_LEFT = 4096.0
"""Blocks after which the counts of an adapter are halved, so that they follow its traffic."""


class KvReuse:
    """Estimates, for each adapter, the share of its KV that is asked for again after it has left the device.

    It remembers the keys of blocks that have left, whether they were copied to the host or not (ghost entries), so the
    estimate does not depend on what is copied.

    Args:
        most_keys: keys to remember; the oldest are forgotten first.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._left, self._asked = np.zeros(0), np.zeros(0)  # by node
        self._all_left = self._all_asked = 0.0

    def left(self, top: int, key: bytes) -> None:
        """Record that a block has left the device; ``top`` is the node of its adapter."""
        self._ghosts[key] = top
        if len(self._ghosts) > self._most_keys:
            self._ghosts.popitem(last=False)
        self._extend(top + 1)
        self._left[top] += 1
        if self._left[top] > _REMEMBERED_LEFT:
            self._left[top] /= 2
            self._asked[top] /= 2
        self._all_left += 1
        if self._all_left > _REMEMBERED_LEFT:
            self._all_left /= 2
            self._all_asked /= 2

    def asked(self, keys: Sequence[bytes]) -> None:
        """Record that a request needs these blocks, which are not on the device; the first that never left ends it."""
        for key in keys:
            top = self._ghosts.pop(key, None)
            if top is None:
                return
            self._asked[top] += 1
            self._all_asked += 1

    def shares(self, tops: Nodes) -> Scores:
        """Return the expected share of each adapter's KV that will be asked for again."""
        if len(tops):
            self._extend(int(tops.max()) + 1)
        of_all = (self._all_asked + _ASSUMED_LEFT * _ASSUMED_SHARE) / (self._all_left + _ASSUMED_LEFT)
        shares: Scores = (self._asked[tops] + _ASSUMED_LEFT * of_all) / (self._left[tops] + _ASSUMED_LEFT)
        return shares

    def forget(self, top: int) -> None:
        """Drop the counts of an adapter that was removed from the tree."""
        self._extend(top + 1)
        self._left[top] = self._asked[top] = 0.0

    def _extend(self, nodes: int) -> None:
        missing = nodes - len(self._left)
        if missing > 0:
            more = np.zeros(missing + len(self._left))
            self._left, self._asked = np.concatenate([self._left, more]), np.concatenate([self._asked, more])
