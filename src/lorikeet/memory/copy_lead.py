"""Estimates how much cached KV is evicted before the next copies to the host end."""

from lorikeet.core.guard import HALF_LIFE_S

COPIED_PART = 8
"""Divisor of the cached KV that counts as evicted soon at the start, and of the host tier for the largest lead."""
_MOST_PART = 2
"""Divisor of the cached KV that is copied at a time at most, since it cannot be evicted until its copy ends."""


class CopyLead:
    """Estimates how many cached blocks of KV must have a copy because they are evicted soon.

    A fixed part of the cached KV counts as evicted soon, and as many blocks more as were evicted of late before they
    were copied, up to a part of the host tier. So the lead grows under a load that evicts in large bursts, until copies
    are in time, and shrinks again afterwards.

    Args:
        host_blocks: size of the host arena, in blocks. Copies of KV that stays on the device take room from KV that is
            nowhere else.
    """

    def __init__(self, host_blocks: int) -> None:
        self._most = host_blocks // COPIED_PART
        self._late = 0.0
        self._at_s = 0.0

    def late(self, blocks: int, now: float) -> None:
        """Record blocks that were evicted before they were copied, although a copy would have paid."""
        self._fade(now)
        self._late += blocks

    def soon(self, cached: int, now: float) -> int:
        """Return the number of cached blocks that count as evicted soon."""
        self._fade(now)
        self._late = min(self._late, cached)
        least = cached // COPIED_PART
        return min(cached, max(least, min(self._most, least + int(self._late))))

    def at_a_time(self, cached: int, now: float) -> int:
        """Return the largest number of blocks that may be in copies ahead of their eviction at a time."""
        return min(self.soon(cached, now), cached // _MOST_PART)

    def _fade(self, now: float) -> None:
        passed_s = now - self._at_s
        if passed_s > 0:
            self._late *= 0.5 ** (passed_s / HALF_LIFE_S)
            self._at_s = now
