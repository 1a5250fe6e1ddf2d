"""Which prefixes were sent where."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count

from lorikeet.core.ids import ReplicaId

MOST_KEYS = 1 << 17
"""Prefixes that are remembered by default; each takes about 170 bytes."""

_MOST_GONE = 64
"""Homes that may be gone before everything is forgotten."""

_EXACT_BITS = 4
"""The first 2^4 blocks are remembered one by one."""

Home = tuple[ReplicaId, int]
"""A replica and its incarnation; a later one knows nothing."""


class Depths:
    """How long the prefixes are that are remembered, in blocks: from 16 on, each at most an 8th longer than the last.

    A prompt of 100,000 tokens has thousands of blocks, and a route must stay short.
    """

    def __init__(self) -> None:
        self._depths: list[int] = []
        self._upto = 0

    def of(self, blocks: int) -> list[int]:
        """Return those of a prompt with so many whole blocks, ascending."""
        for depth in range(self._upto + 1, blocks + 1):
            if depth % (1 << max(0, depth.bit_length() - _EXACT_BITS)) == 0:
                self._depths.append(depth)
        self._upto = max(self._upto, blocks)
        return self._depths[: bisect_right(self._depths, blocks)]


class Prefixes:
    """Remembers for every prefix to which replicas a request with it was sent; the least recently used are forgotten.

    A prefix is known by the key of its last block, which depends on the adapter version and all tokens before. Whoever
    has a prefix has all shorter ones, and of a prompt the longest are forgotten first. Replicas may have forgotten a
    prefix that is known here: they say nothing about their KV.

    Args:
        most_keys: so many prefixes are remembered.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # a bit for each home
        self._bits: dict[Home, int] = {}
        self._homes: dict[int, Home] = {}  # by bit
        self._gone = 0  # bits of homes that were forgotten and may still be in masks
        self._depths = Depths()

    def __len__(self) -> int:
        """Return the number of prefixes that are remembered."""
        return len(self._masks)

    def homes(self) -> list[Home]:
        """Return those to which something was sent and that were not forgotten."""
        return list(self._bits)

    def match(self, keys: Sequence[bytes]) -> dict[Home, int]:
        """Return by home how many blocks of a prompt it knows, of those that know any.

        Args:
            keys: of the prompt's whole blocks.
        """
        mask, matched = ~self._gone, 0
        lengths: dict[Home, int] = {}
        for depth in self._depths.of(len(keys)):
            longer = mask & self._masks.get(keys[depth - 1], 0)
            if matched and longer != mask:
                lengths.update(dict.fromkeys(self._homes_of(mask & ~longer), matched))
            mask, matched = longer, depth
            if not mask:
                return lengths
        return lengths | dict.fromkeys(self._homes_of(mask), matched) if matched else lengths

    def add(self, keys: Sequence[bytes], home: Home) -> None:
        """Remember that a request with these keys was sent to a home."""
        masks, bit = self._masks, 1 << self._bit(home)
        for depth in reversed(self._depths.of(len(keys))):  # so that the shortest prefix is the last used
            key = keys[depth - 1]
            mask = masks.get(key)
            if mask is None:  # a new one comes last of itself
                masks[key] = bit
                continue
            if not mask & bit:
                masks[key] = mask | bit
            masks.move_to_end(key)
        for _ in range(len(masks) - self._most_keys):
            masks.popitem(last=False)

    def forget(self, home: Home) -> None:
        """Forget all that was sent to a home.

        Its bit is not looked at any longer. When many bits are like that everything is forgotten, and all are free:
        to look through all prefixes would take a tenth of a second.
        """
        bit = self._bits.pop(home)
        del self._homes[bit]
        self._gone |= 1 << bit
        if self._gone.bit_count() >= _MOST_GONE:
            self._masks.clear()
            self._gone = 0

    def _bit(self, home: Home) -> int:
        if home not in self._bits:
            free = (bit for bit in count() if bit not in self._homes and not self._gone >> bit & 1)
            self._bits[home] = next(free)
            self._homes[self._bits[home]] = home
        return self._bits[home]

    def _homes_of(self, mask: int) -> Iterator[Home]:
        while mask:
            lowest = mask & -mask
            yield self._homes[lowest.bit_length() - 1]
            mask ^= lowest
