"""Steps 1 to 4 of LoRAServe's Algorithm 1: what lies together, not yet where."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.cluster.demand import AdapterDemand
from lorikeet.cluster.operating_points import OperatingPoints
from lorikeet.core.ids import AdapterDigest

_TINY = 1e-9
"""Of the target: differences below are rounding."""
_EMPTY = -1
"""Largest rank of a bin with nothing in it."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class PackingParams(msgspec.Struct, frozen=True):
    """What the paper leaves open.

    Attributes:
        slack: so far above the target a leftover may fill a bin of its own rank or a larger one.
        min_fraction: of an adapter (or of a bin, for an adapter larger than one) that is worth a copy of its own.
        group: most bins of a rank that share its adapters, so that a request has a choice between them; 1 is the paper.
        whole_below: an adapter that asks for less of a bin than this lies in one of its group alone.
        literal: leftovers go by largest rank and utilisation alone, however full that bin is.
    """

    slack: float = 0.10
    min_fraction: float = 0.01
    group: int = 8
    whole_below: float = 0.10
    literal: bool = False


class Piece(NamedTuple):
    """A part of an adapter's demand."""

    demand: AdapterDemand
    fraction: float

    @property
    def tokens_per_s(self) -> float:
        """Return the part's load."""
        return self.fraction * self.demand.tokens_per_s


class Packing:
    """Adapters in as many bins as there are replicas.

    Utilisations are tokens per second over an operating point, so 1 is as much as meets the SLO. The target and the
    budgets take every adapter at its own rank; :attr:`utilisations` takes each bin at the largest rank in it, which is
    what its kernels run at.

    Source: LoRAServe, Algorithm 1; what it leaves open is told in docs/decisions/loraserve-placement.md.

    Args:
        demands: of all adapters; their sum is positive.
        bins: number of replicas.
        points: operating points.
        params: of the packing.
    """

    def __init__(
        self, demands: Sequence[AdapterDemand], bins: int, points: OperatingPoints, params: PackingParams
    ) -> None:
        self._points = points
        self._params = params
        self._tokens_per_s: Floats = np.zeros(bins)
        self._max_rank: Ints = np.full(bins, _EMPTY)
        self._point: Floats = np.full(bins, np.inf)  # at the largest rank of each bin
        self.bins: list[dict[AdapterDigest, float]] = [{} for _ in range(bins)]
        by_rank = defaultdict[int, list[AdapterDemand]](list)
        # In one order, whatever that of the demands: sums depend on it.
        for demand in sorted(demands, key=lambda each: (-each.tokens_per_s, each.adapter)):
            by_rank[demand.rank].append(demand)
        rank_utilisation = {
            rank: sum(each.tokens_per_s for each in by_rank[rank]) / points[rank] for rank in sorted(by_rank)
        }
        self.target = sum(rank_utilisation.values()) / bins
        self.budgets = budgets({rank: each / self.target for rank, each in rank_utilisation.items()}, bins)
        leftovers: list[Piece] = []
        first = 0
        for rank in sorted(by_rank, reverse=True):
            own = range(first, first + self.budgets[rank])
            leftovers += self._fill(own, by_rank[rank])
            first += len(own)
        leftovers.sort(key=lambda piece: (-piece.demand.rank, -piece.tokens_per_s, piece.demand.adapter))
        for piece in leftovers:
            self._put(self._bin_for(piece), piece)

    @property
    def utilisations(self) -> Floats:
        """Return how full each bin is at the largest rank in it; shape (bins,)."""
        return self._tokens_per_s / self._point

    def _fill(self, own: range, of_rank: list[AdapterDemand]) -> list[Piece]:
        """Fill bins of one rank to the target, the largest demand first; return what is left (step 3).

        A group of bins is filled as if it were one.
        """
        point = self._points[of_rank[0].rank]
        leftovers = []
        remaining = groups_of(own, self._params.group)
        here = next(remaining, None)
        room = self.target * len(here or ())
        for demand in of_rank:
            utilisation = demand.tokens_per_s / point
            sliver = max(self._params.min_fraction * min(utilisation, self.target), _TINY * self.target)
            left = 1.0
            while here is not None and left * utilisation > room + sliver:
                if room > sliver:
                    self._pour(here, Piece(demand, room / utilisation))
                    left -= room / utilisation
                here = next(remaining, None)
                room = self.target * len(here or ())
            if here is None:
                leftovers.append(Piece(demand, left))
            else:
                self._pour(here, Piece(demand, left))
                room -= left * utilisation
        return leftovers

    def _pour(self, group: range, piece: Piece) -> None:
        """Put a piece in equal parts into all bins of its rank's group, or a small one into the emptiest."""
        if piece.tokens_per_s / self._points[piece.demand.rank] < self._params.whole_below * self.target:
            self._put(min(group, key=self._tokens_per_s.__getitem__), piece)
            return
        for number in group:
            self._put(number, piece._replace(fraction=piece.fraction / len(group)))

    def _bin_for(self, piece: Piece) -> int:
        """Return the bin for a leftover (step 4)."""
        rank = piece.demand.rank
        if self._params.literal:
            return self._first(np.arange(len(self.bins)), -self._max_rank, self.utilisations)
        # Points do not rise with the rank, so the smaller is that of the larger rank.
        after = (self._tokens_per_s + piece.tokens_per_s) / np.minimum(self._point, self._points[rank])
        cap = self.target * (1 + self._params.slack + _TINY)
        fits = np.flatnonzero((self._max_rank >= rank) & (after <= cap))
        if fits.size:
            return self._first(fits, -self._max_rank, self.utilisations)
        # An empty bin, if there is one: no other can be less full afterwards.
        return self._first(np.arange(len(self.bins)), after, -self._max_rank)

    def _first(self, candidates: Ints, *keys: Floats | Ints) -> int:
        """Return the candidate with the smallest first key; among equals by the next, then the lowest index."""
        for key in keys:
            values = key[candidates]
            candidates = candidates[values <= values.min() + _TINY * self.target]
        return int(candidates[0])

    def _put(self, number: int, piece: Piece) -> None:
        demand, fraction = piece
        content = self.bins[number]
        content[demand.adapter] = content.get(demand.adapter, 0.0) + fraction
        self._tokens_per_s[number] += piece.tokens_per_s
        if demand.rank > self._max_rank[number]:
            self._max_rank[number] = demand.rank
            self._point[number] = self._points[demand.rank]


def groups_of(bins: range, most: int) -> Iterator[range]:
    """Yield the bins in as few groups as there can be of at most so many, which differ by one at most."""
    count = ceil(len(bins) / most)
    borders = [len(bins) * number // count for number in range(count + 1)] if count else [0]
    return (bins[low:high] for low, high in pairwise(borders))


def budgets(shares: dict[int, float], bins: int) -> dict[int, int]:
    """Return how many bins each rank has for itself (step 2).

    Shares are rounded half up. Where that is too many bins, one at a time is taken from the rank that gained most by
    it, the smaller one among equals. Where it is too few, the others are nobody's.

    Args:
        shares: of the ranks in all bins; their sum is ``bins``.
        bins: how many there are.
    """
    rounded = {rank: floor(share + 0.5 + _TINY) for rank, share in shares.items()}
    for _ in range(sum(rounded.values()) - bins):
        gained = {rank: round((rounded[rank] - share) / _TINY) for rank, share in shares.items()}
        rounded[min(gained, key=lambda rank: (-gained[rank], rank))] -= 1
    return rounded
