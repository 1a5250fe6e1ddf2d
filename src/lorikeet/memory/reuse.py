"""Estimates the share of each adapter's KV that is reused."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.memory.tree import Nodes, Scores

_PRIOR_BLOCKS = 64.0
_PRIOR_SHARE = 0.3
"""Number of blocks that count at the start, and their reused share.

For an adapter, the share of all adapters is assumed instead.
"""
_REMEMBERED_BLOCKS = 4096.0
"""Blocks after which the counts of an adapter are halved, so that they follow its traffic."""
_FIRST_WAIT_S = 10.0
_MAX_WAIT_S = 120.0
_WAITS = 2.0
"""Seconds after which an unused block counts as not reused: the initial value, the maximum, and the value as a multiple
of the mean time to reuse. Younger blocks do not count yet, because KV of an adapter that has just become popular waits
for the next turns of its conversations.
"""
_MIN_COPIED_SHARE = 0.05
"""Reused share of an adapter's evicted KV below which its KV is not copied to the host, because the copies would only
take host memory from other KV, and requests would wait for them."""
_WEIGHT = 0.02
"""Weight of the newest request in that mean time."""


class _Share:
    """Estimates the reused share of a set of blocks, by adapter.

    Args:
        prior: share that is assumed without blocks.
    """

    def __init__(self, prior: float = _PRIOR_SHARE) -> None:
        self._prior = prior
        self._blocks = np.zeros(0)  # by node
        self._reused = np.zeros(0)
        self._all_blocks = 0.0
        self._all_reused = 0.0

    def count(self, top: int, blocks: int) -> None:
        """Count blocks that could be reused; ``top`` is the node of their adapter."""
        self._extend(top + 1)
        self._blocks[top] += blocks
        if self._blocks[top] > _REMEMBERED_BLOCKS:
            self._blocks[top] /= 2
            self._reused[top] /= 2
        self._all_blocks += blocks
        if self._all_blocks > _REMEMBERED_BLOCKS:
            self._all_blocks /= 2
            self._all_reused /= 2

    def reuse(self, top: int, blocks: int) -> None:
        """Count blocks that are reused."""
        self._extend(top + 1)
        self._reused[top] += blocks
        self._all_reused += blocks

    def of_all(self) -> float:
        """Return the expected reused share of all adapters' blocks."""
        return (self._all_reused + _PRIOR_BLOCKS * self._prior) / (self._all_blocks + _PRIOR_BLOCKS)

    def of(self, tops: Nodes) -> Scores:
        """Return the expected reused share of the blocks of each adapter."""
        self._extend(int(tops.max(initial=0)) + 1)
        reused: Scores = self._reused[tops] + _PRIOR_BLOCKS * self.of_all()
        return reused / (self._blocks[tops] + _PRIOR_BLOCKS)

    def one(self, top: int) -> float:
        """Return the expected reused share of the blocks of one adapter."""
        self._extend(top + 1)
        return (self._reused.item(top) + _PRIOR_BLOCKS * self.of_all()) / (self._blocks.item(top) + _PRIOR_BLOCKS)

    def forget(self, top: int) -> None:
        """Drop the counts of an adapter that was removed from the tree."""
        self._extend(top + 1)
        self._blocks[top] = self._reused[top] = 0.0

    def _extend(self, nodes: int) -> None:
        missing = nodes - len(self._blocks)
        if missing > 0:
            more = np.zeros(missing + len(self._blocks))
            self._blocks = np.concatenate([self._blocks, more])
            self._reused = np.concatenate([self._reused, more])


class _Pending(NamedTuple):
    """Holds blocks of an adapter that count once their reuse is decided."""

    since_s: float
    share: _Share
    top: int
    blocks: int


class KvReuse:
    """Estimates the share of each adapter's KV that is reused.

    There are two estimates. KV on the device is expected to be reused like all KV that the adapter's requests computed.
    KV that leaves the device is expected to be reused like the KV that was evicted before, but not more than on the
    device: conversations that have ended fill most of it. For that, the keys of evicted blocks are remembered (ghost
    entries), with or without a copy on the host. So the estimate does not depend on the choice of the copied blocks. A
    block that was prefetched and then evicted without a use counts once.

    Args:
        most_keys: largest number of remembered keys; the oldest are forgotten first.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._of_computed = _Share()
        self._of_evicted = _Share()
        self._of_lost = _Share(prior=0.0)
        self._pending: deque[_Pending] = deque()
        self._wait_s = _FIRST_WAIT_S
        self._now_s = 0.0

    def computed(self, top: int, blocks: int, now: float) -> None:
        """Record the blocks that a request has computed; ``top`` is the node of its adapter."""
        self._pending.append(_Pending(now, self._of_computed, top, blocks))

    def evicted(self, top: int, keys: Sequence[bytes], now: float) -> None:
        """Record that blocks of an adapter are evicted from the device."""
        ghosts = self._ghosts
        new = [key for key in keys if key not in ghosts]
        if new:
            ghosts.update(dict.fromkeys(new, top))
            self._pending.append(_Pending(now, self._of_evicted, top, len(new)))
        for _ in range(len(ghosts) - self._most_keys):
            ghosts.popitem(last=False)

    def lost(self, top: int, blocks: int) -> None:
        """Record that blocks of an adapter leave their last tier."""
        self._pending.append(_Pending(self._now_s, self._of_lost, top, blocks))

    def requested(
        self, top: int, keys: Sequence[bytes], on_device: int, found: int, unused_s: float, now: float
    ) -> None:
        """Record the blocks that a request needs.

        Args:
            top: the node of its adapter.
            keys: keys of the request's blocks. Only the blocks before the first unknown block count; a block is unknown
                if it is neither on the device nor remembered as evicted.
            on_device: number of the request's blocks on the device.
            found: number of the request's blocks on any tier.
            unused_s: seconds since the last use of the request's blocks.
            now: the time.
        """
        self._now_s = now
        self._of_computed.reuse(top, on_device)
        reused = on_device
        for place, key in enumerate(keys):
            evicted_of = self._ghosts.pop(key, None)
            if evicted_of is not None:
                self._of_evicted.reuse(evicted_of, 1)
            if place >= on_device:
                if evicted_of is None:
                    break
                self._of_computed.reuse(evicted_of, 1)
                reused += 1
            if place >= found and evicted_of is not None:
                self._of_lost.reuse(evicted_of, 1)
        if reused:
            wait_s = self._wait_s + _WEIGHT * (_WAITS * unused_s - self._wait_s)
            self._wait_s = min(_MAX_WAIT_S, wait_s)
        while self._pending and self._pending[0].since_s <= now - self._wait_s:
            _, share, adapter, blocks = self._pending.popleft()
            share.count(adapter, blocks)

    def shares_on_device(self, tops: Nodes) -> Scores:
        """Return the expected share of each adapter's KV that will be reused if it stays on the device."""
        return self._of_computed.of(tops)

    def shares(self, tops: Nodes) -> Scores:
        """Return the expected share of each adapter's KV that will be reused after it was evicted from the device.

        The share is at most that of KV on the device.
        """
        shares: Scores = np.minimum(self._of_computed.of(tops), self._of_evicted.of(tops))
        return shares

    def are_copied(self, tops: Nodes) -> npt.NDArray[np.bool_]:
        """Return whether each adapter's KV is reused often enough to be copied to the host."""
        return self.shares(tops) >= _MIN_COPIED_SHARE

    def is_copied(self, top: int) -> bool:
        """Return whether one adapter's KV is reused often enough to be copied to the host."""
        return self.share(top) >= _MIN_COPIED_SHARE

    def lost_share(self) -> float:
        """Return the share of KV that was requested again after it had left its last tier; 0 before any."""
        return self._of_lost.of_all()

    def share_on_device(self, top: int) -> float:
        """Return the share of one adapter's KV; see :meth:`shares_on_device`."""
        return self._of_computed.one(top)

    def share(self, top: int) -> float:
        """Return the share of one adapter's KV; see :meth:`shares`."""
        return min(self._of_computed.one(top), self._of_evicted.one(top))

    def forget(self, top: int) -> None:
        """Drop the counts of an adapter that was removed from the tree."""
        self._of_lost.forget(top)
        self._of_computed.forget(top)
        self._of_evicted.forget(top)
        self._pending = deque(each for each in self._pending if each.top != top)
