"""Routes a request to where its adapter or the KV of its prefix is, unless that replica is overloaded.

:class:`Prefixes` remembers which prefixes were sent where.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from math import ceil

import numpy as np

from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.routing.fleet import Fleet, Indices
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId

MOST_KEYS = 1 << 17
"""Prefixes that are remembered by default; each takes about 170 bytes."""

_MOST_GONE = 64
"""Homes that may be gone before everything is forgotten."""

_EXACT_BITS = 4
"""The first 2^4 blocks are remembered one by one."""

Home = tuple[ReplicaId, int]
"""A replica and its incarnation; a later one knows nothing."""


class PrefixDepths:
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


class SentPrefixes:
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
        self._depths = PrefixDepths()

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


BOUND = 1.25
"""Times the mean number of requests that a replica may have and still be preferred."""
FREE_REQUESTS = 4
"""With so few requests a replica may always be preferred: sharing steps costs them little."""


def not_overloaded(candidates: Indices, fleet: Fleet, bound: float) -> Indices:
    """Return the candidates that one more request takes to at most ``bound`` times the mean of all, rounded up.

    There is always one: the least loaded has no more than the mean. Without the bound, a popular adapter would keep one
    replica overloaded; with it, as many come to hold the adapter as its load needs.

    Source: V. Mirrokni, M. Thorup and M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
    """
    requests = fleet.loads.requests[candidates]
    most = max(FREE_REQUESTS, ceil(bound * (requests.sum() + 1) / len(candidates)))
    there: Indices = candidates[requests < most]
    return there


class AdapterAffinity(Router):
    """A replica that has the adapter or is about to get it, if it is not overloaded; of these the least loaded.

    Args:
        bound: see :data:`BOUND`.
    """

    def __init__(self, bound: float = BOUND) -> None:
        self._bound = bound

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Prefer holders."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        candidates = not_overloaded(candidates, fleet, self._bound)
        return fleet.info(least_loaded(candidates, fleet, ~fleet.is_warm(asked.adapter))).replica


class KvAffinity(Router):
    """The replica that was sent the longest prefix of the prompt, if it is not overloaded; else as by the adapter.

    Args:
        bound: see :data:`BOUND`.
        most_keys: prefixes that are remembered.
    """

    wants_keys = True

    def __init__(self, bound: float = BOUND, most_keys: int = MOST_KEYS) -> None:
        self._bound = bound
        self._prefixes = SentPrefixes(most_keys)
        self._changes = 0

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Prefer whoever knows the longest prefix, then holders."""
        if self._changes != fleet.changes:
            self._forget_gone(fleet)
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        candidates = not_overloaded(candidates, fleet, self._bound)
        before = (*self._unknown_blocks(asked, fleet), ~fleet.is_warm(asked.adapter))
        info = fleet.info(least_loaded(candidates, fleet, *before))
        self._prefixes.add(asked.keys, (info.replica, info.epoch))
        return info.replica

    def _unknown_blocks(self, asked: RoutingRequest, fleet: Fleet) -> list[Indices]:
        """Return by replica minus the blocks of the prompt that it knows; no array if none knows any."""
        matched = self._prefixes.match(asked.keys)
        if not matched:
            return []
        unknown_blocks = np.zeros(len(fleet), np.intp)
        for (replica, _), blocks in matched.items():
            if replica in fleet.open_index:
                unknown_blocks[fleet.open_index[replica]] = -blocks
        return [unknown_blocks]

    def _forget_gone(self, fleet: Fleet) -> None:
        there = {(info.replica, info.epoch) for info in fleet.infos()}
        for home in self._prefixes.homes():
            if home not in there:
                self._prefixes.forget(home)
        self._changes = fleet.changes
