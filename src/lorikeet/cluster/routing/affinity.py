"""Routes a request to a replica that holds its adapter or the KV of its prefix, unless that replica is overloaded.

:class:`SentPrefixes` remembers the replicas to which prefixes were sent.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from math import ceil

import numpy as np
import numpy.typing as npt

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least
from lorikeet.cluster.routing.fleet import Fleet, Indices, ReplicaInfo
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId

MAX_PREFIXES = 1 << 17
"""Default number of remembered prefixes. Each prefix takes about 170 bytes."""

_MAX_STALE = 64
"""Number of forgotten replicas after which all prefixes are forgotten."""

_EXACT_BITS = 4
"""Exponent of 2: prefixes of up to that many blocks are remembered block by block."""

Home = tuple[ReplicaId, int]
"""A replica and its incarnation. A later incarnation has lost the KV."""


class PrefixDepths:
    """Lists the prefix lengths to remember, in blocks.

    From 16 blocks on, each length is at most an eighth longer than the last.

    This limits their number: a prompt of 100,000 tokens has thousands of blocks, and its routing must stay fast.
    """

    def __init__(self) -> None:
        self._depths: list[int] = []
        self._upto = 0

    def of(self, blocks: int) -> list[int]:
        """Return the lengths for a prompt in ascending order, given its number of whole blocks."""
        for depth in range(self._upto + 1, blocks + 1):
            if depth % (1 << max(0, depth.bit_length() - _EXACT_BITS)) == 0:
                self._depths.append(depth)
        self._upto = max(self._upto, blocks)
        return self._depths[: bisect_right(self._depths, blocks)]


class SentPrefixes:
    """Remembers the replicas to which requests with a prefix were sent, for the most recently used prefixes.

    A prefix is identified by the key of its last block, which depends on the adapter version and all tokens before. A
    replica that has a prefix also has all shorter prefixes, and a prompt's longest prefixes are forgotten first.
    Replicas do not report their KV, so a replica may have evicted a prefix that is remembered here.

    Args:
        max_prefixes: largest number of remembered prefixes.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # bit of each replica incarnation
        self._bits: dict[Home, int] = {}
        self._homes: dict[int, Home] = {}  # by bit
        self._stale_bits = 0  # bits of forgotten replicas, which masks may still contain
        self._depths = PrefixDepths()

    def __len__(self) -> int:
        """Return the number of remembered prefixes."""
        return len(self._masks)

    def homes(self) -> list[Home]:
        """Return the remembered replicas."""
        return list(self._bits)

    def match(self, keys: Sequence[bytes]) -> dict[Home, int]:
        """Return the number of a prompt's leading blocks that were sent to each replica.

        Replicas without a block are left out.

        Args:
            keys: keys of the prompt's whole blocks.
        """
        mask = ~self._stale_bits
        matched = 0
        lengths: dict[Home, int] = {}
        for depth in self._depths.of(len(keys)):
            longer = mask & self._masks.get(keys[depth - 1], 0)
            if matched and longer != mask:
                lengths.update(dict.fromkeys(self._homes_of(mask & ~longer), matched))
            mask = longer
            matched = depth
            if not mask:
                return lengths
        return lengths | dict.fromkeys(self._homes_of(mask), matched) if matched else lengths

    def add(self, keys: Sequence[bytes], home: Home) -> None:
        """Remember that a request with these block keys was sent to a replica."""
        masks = self._masks
        bit = 1 << self._bit(home)
        for depth in reversed(self._depths.of(len(keys))):  # In reverse, so that the shortest prefix is used last.
            key = keys[depth - 1]
            mask = masks.get(key)
            if mask is None:  # A new key is already the last one.
                masks[key] = bit
                continue
            if not mask & bit:
                masks[key] = mask | bit
            masks.move_to_end(key)
        for _ in range(len(masks) - self._max_prefixes):
            masks.popitem(last=False)

    def forget(self, home: Home) -> None:
        """Forget everything that was sent to a replica.

        The replica's bit is masked out, because removing it from every prefix would take a tenth of a second. When many
        bits are masked out, all prefixes are forgotten and all bits become free again.
        """
        bit = self._bits.pop(home)
        del self._homes[bit]
        self._stale_bits |= 1 << bit
        if self._stale_bits.bit_count() >= _MAX_STALE:
            self._masks.clear()
            self._stale_bits = 0

    def forget_gone(self, fleet: Fleet) -> None:
        """Forget everything that was sent to replicas, or incarnations, that have left."""
        there = {(info.replica, info.epoch) for info in fleet.infos()}
        for home in self.homes():
            if home not in there:
                self.forget(home)

    def _bit(self, home: Home) -> int:
        if home not in self._bits:
            free = (bit for bit in count() if bit not in self._homes and not self._stale_bits >> bit & 1)
            self._bits[home] = next(free)
            self._homes[self._bits[home]] = home
        return self._bits[home]

    def _homes_of(self, mask: int) -> Iterator[Home]:
        while mask:
            lowest = mask & -mask
            yield self._homes[lowest.bit_length() - 1]
            mask ^= lowest


BOUND = 1.25
"""Multiple of the mean number of requests up to which a replica may be preferred."""
_BLOCKS = "minus the blocks of the prompt that it has"
REPORTED_TOKENS = 16
"""Tokens of a block in which reported prefixes are compared with those that were sent."""
MIN_BOUND_REQUESTS = 4
"""Number of requests below which a replica may always be preferred, because sharing steps costs them little."""


def not_overloaded(candidates: Indices, fleet: Fleet, bound: float) -> Indices:
    """Return the candidates that have at most ``bound`` times the mean number of requests after one more request.

    The limit is rounded up. At least one candidate is returned, because the least loaded replica does not exceed the
    mean. Without the bound, a popular adapter would keep one replica overloaded. With the bound, the number of replicas
    that hold the adapter grows with its load.

    Source: V. Mirrokni, M. Thorup and M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
    """
    requests = fleet.loads.requests[candidates]
    most = max(MIN_BOUND_REQUESTS, ceil(bound * (requests.sum() + 1) / len(candidates)))
    there: Indices = candidates[requests < most]
    return there


def _best(candidates: Indices, fleet: Fleet, *before: npt.NDArray[np.generic]) -> ReplicaInfo:
    """Return the least loaded candidate; among equals, the one with the fewest adapters.

    This rule spreads adapters over idle replicas, so that no replica must evict an adapter while another replica has
    free memory.

    Args:
        candidates: indices, at least one, ascending.
        fleet: state of all replicas.
        before: sort keys by replica that are compared before the load.
    """
    loads = fleet.loads
    return fleet.info(least(candidates, *before, loads.requests, loads.pending_tokens, loads.adapters))


class AdapterAffinity(RoutingPolicy):
    """Prefers the least loaded replica that holds the adapter or is loading it, unless it is overloaded.

    Args:
        bound: largest load relative to the mean; see :data:`BOUND`.
    """

    def __init__(self, bound: float = BOUND) -> None:
        self._bound = bound

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a replica, preferring holders of the adapter."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        candidates = not_overloaded(candidates, fleet, self._bound)
        return Choice(_best(candidates, fleet, ~fleet.is_warm(request.adapter)).replica)


class KvAffinity(RoutingPolicy):
    """Prefers the replica that has the longest prefix of the prompt, unless it is overloaded.

    A replica has what it reports, or else what it was sent. Among equals, holders of the adapter are preferred.

    Args:
        bound: largest load relative to the mean; see :data:`BOUND`.
        max_prefixes: largest number of remembered prefixes.
    """

    wants_keys = True

    def __init__(self, bound: float = BOUND, max_prefixes: int = MAX_PREFIXES) -> None:
        self._bound = bound
        self._prefixes = SentPrefixes(max_prefixes)
        self._changes = 0

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a replica, preferring the longest known prefix, then holders of the adapter."""
        if self._changes != fleet.changes:
            self._prefixes.forget_gone(fleet)
            self._changes = fleet.changes
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        candidates = not_overloaded(candidates, fleet, self._bound)
        blocks = self._unknown_blocks(request, fleet)
        info = _best(candidates, fleet, *blocks, ~fleet.is_warm(request.adapter))
        self._prefixes.add(request.keys, (info.replica, info.epoch))
        return Choice(info.replica, scores=blocks[0], scored_by=_BLOCKS) if blocks else Choice(info.replica)

    def _unknown_blocks(self, request: RoutingRequest, fleet: Fleet) -> list[Indices]:
        """Return the negated number of known blocks by replica as a sort key.

        Return an empty list if no block is known.
        """
        matched = self._prefixes.match(request.keys)
        reported = request.cached_tokens
        if not matched and not any(reported.values()):
            return []
        unknown_blocks = np.zeros(len(fleet), np.intp)
        for (replica, _), blocks in matched.items():
            if replica in fleet.open_index:
                unknown_blocks[fleet.open_index[replica]] = -blocks
        for replica, tokens in reported.items():
            if replica in fleet.open_index:
                unknown_blocks[fleet.open_index[replica]] = -(tokens // REPORTED_TOKENS)
        return [unknown_blocks]
