"""How often KV is asked for again."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from lorikeet.memory.tree import Nodes, Scores

_ASSUMED, _ASSUMED_SHARE = 64.0, 0.3
"""Blocks that are assumed to have been counted at the start, and the share of them that was asked for again. Of an
adapter the share is assumed that all adapters have."""
_REMEMBERED = 4096.0
"""Blocks after which the counts of an adapter are halved, so that they follow its traffic."""


class _Share:
    """The share of some blocks that is asked for again, by adapter."""

    def __init__(self) -> None:
        self._blocks, self._asked = np.zeros(0), np.zeros(0)  # by node
        self._all_blocks = self._all_asked = 0.0

    def count(self, top: int, blocks: int) -> None:
        """Count blocks that may be asked for again; ``top`` is the node of their adapter."""
        self._extend(top + 1)
        self._blocks[top] += blocks
        if self._blocks[top] > _REMEMBERED:
            self._blocks[top] /= 2
            self._asked[top] /= 2
        self._all_blocks += blocks
        if self._all_blocks > _REMEMBERED:
            self._all_blocks /= 2
            self._all_asked /= 2

    def asked(self, top: int, blocks: int) -> None:
        """Count blocks that are asked for again."""
        self._extend(top + 1)
        self._asked[top] += blocks
        self._all_asked += blocks

    def of(self, tops: Nodes) -> Scores:
        """Return the expected share of each adapter's blocks."""
        if len(tops):
            self._extend(int(tops.max()) + 1)
        of_all = (self._all_asked + _ASSUMED * _ASSUMED_SHARE) / (self._all_blocks + _ASSUMED)
        shares: Scores = (self._asked[tops] + _ASSUMED * of_all) / (self._blocks[tops] + _ASSUMED)
        return shares

    def forget(self, top: int) -> None:
        """Drop the counts of an adapter that was removed from the tree."""
        self._extend(top + 1)
        self._blocks[top] = self._asked[top] = 0.0

    def _extend(self, nodes: int) -> None:
        missing = nodes - len(self._blocks)
        if missing > 0:
            more = np.zeros(missing + len(self._blocks))
            self._blocks, self._asked = np.concatenate([self._blocks, more]), np.concatenate([self._asked, more])


class KvReuse:
    """Estimates, for each adapter, the share of its KV that is asked for again.

    That is the lower of two shares: of all KV that its requests computed, which is known before anything was evicted,
    and of the KV that has left the device. For the second it remembers the keys of blocks that have left, whether they
    were copied to the host or not (ghost entries), so the estimate does not depend on what is copied.

    Args:
        most_keys: keys to remember; the oldest are forgotten first.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._of_computed, self._of_left = _Share(), _Share()

    def computed(self, top: int, blocks: int) -> None:
        """Record the blocks that a request has computed; ``top`` is the node of its adapter."""
        self._of_computed.count(top, blocks)

    def left(self, top: int, key: bytes) -> None:
        """Record that a block has left the device."""
        self._ghosts[key] = top
        if len(self._ghosts) > self._most_keys:
            self._ghosts.popitem(last=False)
        self._of_left.count(top, 1)

    def asked(self, top: int, found: int, keys: Sequence[bytes]) -> None:
        """Record what a request needs: blocks found on the device, and those behind them by their keys.

        The first of these that never left ends them.
        """
        self._of_computed.asked(top, found)
        for key in keys:
            left_of = self._ghosts.pop(key, None)
            if left_of is None:
                return
            self._of_left.asked(left_of, 1)
            self._of_computed.asked(left_of, 1)

    def shares(self, tops: Nodes) -> Scores:
        """Return the expected share of each adapter's KV that will be asked for again."""
        return np.minimum(self._of_computed.of(tops), self._of_left.of(tops))

    def forget(self, top: int) -> None:
        """Drop the counts of an adapter that was removed from the tree."""
        self._of_computed.forget(top)
        self._of_left.forget(top)
