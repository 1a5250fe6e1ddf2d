"""Places adapters of similar rank together, with equal load on every replica and few adapters moved.

Packing (steps 1 to 4 of Algorithm 1) decides which adapters share a replica. The permutation (step 5) assigns each
group to a replica, so that few adapters are moved.

Source: LoRAServe, section IV.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from math import ceil, floor, gcd
from statistics import fmean
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import COLD_TOKENS_PER_S, AdapterDemand
from lorikeet.cluster.placement.operating_points import Points
from lorikeet.cluster.setup import PolicySetup
from lorikeet.cluster.tables import AdapterTable, ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts

_TINY = 1e-9
"""Share of the target below which a difference is a rounding error."""
_EMPTY = -1
"""Largest rank of an empty bin."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class PackingParams(msgspec.Struct, frozen=True):
    """Parameters of the packing, which the paper leaves open.

    Attributes:
        slack: share of the target by which a leftover may overfill a bin of the same or a larger rank.
        min_fraction: smallest share of an adapter (or of a bin, for an adapter larger than a bin) that gets a separate
            copy.
        group: largest number of bins that share a rank's adapters, so that a request can choose between the bins.
        whole_below: an adapter that needs a smaller share of a bin is put into only one bin of its group.
    """

    slack: float = 0.0
    min_fraction: float = 0.0
    group: int = 1
    whole_below: float = 0.0


class AdapterPart(NamedTuple):
    """Describes a part of an adapter's demand."""

    demand: AdapterDemand
    fraction: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of this part."""
        return self.fraction * self.demand.tokens_per_s


class LoadPacking:
    """Packs adapters into bins, one bin for each replica.

    Utilisations are tokens per second over an operating point, so the SLO is met up to 1. The target and the budgets
    count every adapter at its own rank. :attr:`utilisations` counts each bin at its largest rank, because its kernels
    run at that rank.

    Source: LoRAServe, Algorithm 1; docs/decisions/loraserve-placement.md for what it leaves open.

    Args:
        demands: demands of all adapters; their sum is positive.
        bins: number of replicas.
        points: operating points.
        params: parameters of the packing.
    """

    def __init__(self, demands: Sequence[AdapterDemand], bins: int, points: Points, params: PackingParams) -> None:
        self._points = points
        self._params = params
        self._tokens_per_s: Floats = np.zeros(bins)
        self._max_rank: Ints = np.full(bins, _EMPTY)
        self._point: Floats = np.full(bins, np.inf)  # at the largest rank of each bin
        self.bins: list[dict[AdapterDigest, float]] = [{} for _ in range(bins)]
        by_rank = defaultdict[int, list[AdapterDemand]](list)
        # The demands are sorted, because floating-point sums depend on the order.
        for demand in sorted(demands, key=lambda each: (-each.tokens_per_s, each.adapter)):
            by_rank[demand.rank].append(demand)
        rank_utilisation = {
            rank: sum(each.tokens_per_s for each in by_rank[rank]) / points[rank] for rank in sorted(by_rank)
        }
        self.target = sum(rank_utilisation.values()) / bins
        self.budgets = budgets({rank: each / self.target for rank, each in rank_utilisation.items()}, bins)
        leftovers: list[AdapterPart] = []
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
        """Utilisation of each bin at its largest rank, shape (bins,)."""
        return self._tokens_per_s / self._point

    def _fill(self, own: range, of_rank: list[AdapterDemand]) -> list[AdapterPart]:
        """Fill bins of one rank to the target, the largest demand first, and return the leftovers (step 3).

        A group of bins is filled like a single bin.
        """
        point = self._points[of_rank[0].rank]
        leftovers = []
        remaining = groups_of(own, self._params.group)
        here = next(remaining, None)
        free = self.target * len(here or ())
        for demand in of_rank:
            utilisation = demand.tokens_per_s / point
            sliver = max(self._params.min_fraction * min(utilisation, self.target), _TINY * self.target)
            left = 1.0
            while here is not None and left * utilisation > free + sliver:
                if free > sliver:
                    self._pour(here, AdapterPart(demand, free / utilisation))
                    left -= free / utilisation
                here = next(remaining, None)
                free = self.target * len(here or ())
            if here is None:
                leftovers.append(AdapterPart(demand, left))
            else:
                self._pour(here, AdapterPart(demand, left))
                free -= left * utilisation
        return leftovers

    def _pour(self, group: range, piece: AdapterPart) -> None:
        """Put a part in equal shares into all bins of its rank's group.

        A small part goes only into the emptiest bin.
        """
        if piece.tokens_per_s / self._points[piece.demand.rank] < self._params.whole_below * self.target:
            self._put(min(group, key=self._tokens_per_s.__getitem__), piece)
            return
        for number in group:
            self._put(number, piece._replace(fraction=piece.fraction / len(group)))

    def _bin_for(self, piece: AdapterPart) -> int:
        """Return the bin for a leftover (step 4)."""
        rank = piece.demand.rank
        # Points do not rise with the rank, so the smaller point is that of the larger rank.
        after = (self._tokens_per_s + piece.tokens_per_s) / np.minimum(self._point, self._points[rank])
        cap = self.target * (1 + self._params.slack + _TINY)
        fits = np.flatnonzero((self._max_rank >= rank) & (after <= cap))
        if fits.size:
            return self._first(fits, -self._max_rank, self.utilisations)
        # An empty bin is best, because no other bin can be less full afterwards.
        return self._first(np.arange(len(self.bins)), after, -self._max_rank)

    def _first(self, candidates: Ints, *keys: Floats | Ints) -> int:
        """Return the candidate with the smallest first key.

        Ties are decided by the next key, then by the lowest index.
        """
        for key in keys:
            values = key[candidates]
            candidates = candidates[values <= values.min() + _TINY * self.target]
        return int(candidates[0])

    def _put(self, number: int, piece: AdapterPart) -> None:
        demand, fraction = piece
        content = self.bins[number]
        content[demand.adapter] = content.get(demand.adapter, 0.0) + fraction
        self._tokens_per_s[number] += piece.tokens_per_s
        if demand.rank > self._max_rank[number]:
            self._max_rank[number] = demand.rank
            self._point[number] = self._points[demand.rank]


def groups_of(bins: range, most: int) -> Iterator[range]:
    """Yield the fewest groups of at most ``most`` bins. The groups' sizes differ by one at most."""
    count = ceil(len(bins) / most)
    borders = [len(bins) * number // count for number in range(count + 1)] if count else [0]
    return (bins[low:high] for low, high in pairwise(borders))


def budgets(shares: dict[int, float], bins: int) -> dict[int, int]:
    """Return the number of bins that are reserved for each rank (step 2).

    Shares are rounded half up. If the sum exceeds the number of bins, bins are taken one at a time from the rank that
    gained most by rounding, the smaller rank among equals. If the sum is too small, the remaining bins have no rank.

    Args:
        shares: each rank's share of the bins; the shares add up to ``bins``.
        bins: number of bins.
    """
    rounded = {rank: floor(share + 0.5 + _TINY) for rank, share in shares.items()}
    for _ in range(sum(rounded.values()) - bins):
        gained = {rank: round((rounded[rank] - share) / _TINY) for rank, share in shares.items()}
        rounded[min(gained, key=lambda rank: (-gained[rank], rank))] -= 1
    return rounded


Bin = Mapping[AdapterDigest, float]
"""Content of one replica: its adapters, with the share of each."""


def least_movement(
    bins: Sequence[Bin],
    replicas: Sequence[ReplicaId],
    held_by: Callable[[AdapterDigest], Collection[ReplicaId]],
    routed: Mapping[AdapterDigest, tuple[ReplicaShare, ...]],
    sizes_bytes: Mapping[AdapterDigest, int],
) -> list[ReplicaId]:
    """Assign a replica to each bin, so that the fewest bytes of adapters are copied.

    Among equal assignments, the one that keeps the most requests at their replicas is chosen. The solver decides
    further ties; bins whose adapters are equally present at all replicas keep their order.

    Source: LoRAServe, Algorithm 1, step 5; an assignment of least cost is our reading of "least deviation".

    Args:
        bins: contents of each bin, one bin for each replica. The replicas are equal machines.
        replicas: all replicas.
        held_by: returns the replicas that had an adapter before, which may include replicas that have left.
        routed: the shares of the last table.
        sizes_bytes: sizes of all adapters.
    """
    place = {replica: index for index, replica in enumerate(replicas)}
    stays_bytes = np.zeros((len(bins), len(replicas)))
    stays_share = np.zeros_like(stays_bytes)
    for number, content in enumerate(bins):
        for adapter, part in content.items():
            for replica in held_by(adapter):
                if replica in place:
                    stays_bytes[number, place[replica]] += sizes_bytes[adapter]
            for replica, share in routed.get(adapter, ()):
                if replica in place:
                    stays_share[number, place[replica]] += min(part, share)
    from scipy.optimize import linear_sum_assignment  # a package of the extra `cluster`

    # One matrix expresses both aims: bytes are counted in their largest common unit, so that all shares together weigh
    # less than one unit.
    unit_bytes = gcd(*sizes_bytes.values()) or 1
    gain = stays_bytes / unit_bytes + stays_share / (2 * len(sizes_bytes) + 1)
    numbers, places = linear_sum_assignment(gain, maximize=True)
    assert np.array_equal(numbers, np.arange(len(bins)))
    return [replicas[index] for index in places]


class RankPlacementParams(msgspec.Struct, frozen=True):
    """The parameters of the placement by rank.

    Attributes:
        demand_floor: smallest demand of an adapter, as a share of the mean, so that adapters without requests are
            spread over the replicas.
        hysteresis: largest excess of the old placement's fullest replica over the new placement's at which the old
            placement is kept, if the replicas are the same. New adapters are added to it. None if the old placement is
            never kept.
        packing: see ``PackingParams``.
        looks_early, extrapolates: see ``PlacementPolicy``.
    """

    demand_floor: float = 0.0
    hysteresis: float | None = None
    packing: PackingParams = PackingParams()
    looks_early: bool = False
    extrapolates: bool = True


RANK_GROUPS = RankPlacementParams(
    demand_floor=0.05,
    hysteresis=0.10,
    packing=PackingParams(slack=0.10, min_fraction=0.01, group=8, whole_below=0.10),
    looks_early=True,
    extrapolates=False,
)
"""Parameters of :class:`RankGroups`."""


class PlacementByRank(PlacementPolicy):
    """Packs adapters of similar rank onto replicas in proportion to their demand.

    Source: LoRAServe, Algorithm 1, which the default parameters follow. Algorithm 1 packs from scratch every time, and
    the paper does not print its extrapolation.

    Args:
        points: operating points.
        params: parameters of the placement; None for the paper's.
        held: returns the replicas that hold an adapter. If given, the fewest bytes are copied to replicas that lack the
            adapters. If None, copies are counted against the last table, as in the paper.
    """

    needs = frozenset({"operating_points"})

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy with the operating points of a replica."""
        return cls(setup.points(), **parameters)

    def __init__(
        self,
        points: Points,
        params: RankPlacementParams | None = None,
        held: AdapterTable | None = None,
    ) -> None:
        super().__init__()
        self._points = points
        self._params = params or RankPlacementParams()
        self.looks_early = self._params.looks_early
        self.extrapolates = self._params.extrapolates
        self._held = held
        self._placed_on: Set[ReplicaId] = frozenset()
        self.packing: LoadPacking | None = None
        """The packing of the last call, even if it did not become the table."""

    def learn(self, costs: ReplicaCosts, prompt_tokens: float, output_tokens: float) -> None:
        """Update estimated operating points with the costs of a replica."""
        self._points.learn(costs, prompt_tokens, output_tokens)

    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Return the new placement; the old one if there is no demand, or if it is about as good.

        An adapter that is added or removed does not move the others.
        """
        margin = self._params.hysteresis
        if not any(demand.tokens_per_s for demand in demands):
            if self._covers(demands, replicas):
                return self._table
            demands = [demand._replace(tokens_per_s=COLD_TOKENS_PER_S) for demand in demands]
        if not demands:
            return self._replaced({})
        demands = floored(demands, self._params.demand_floor)
        packing = self.packing = LoadPacking(demands, len(replicas), self._points, self._params.packing)
        is_same = {*replicas} == self._placed_on
        self._placed_on = {*replicas}
        if is_same and margin is not None and self._table.shares:
            before = RoutingTable(self._table.epoch, extended(self._table, demands, replicas, self._points))
            if max(utilisations(before, demands, self._points).values()) <= packing.utilisations.max() * (1 + margin):
                return self._replaced(before.shares)
        return self._replaced(self._shares(packing, demands, replicas))

    def resume(self, table: RoutingTable) -> None:
        """Continue from the table of an earlier placement. The replicas are assumed to match the table."""
        super().resume(table)
        self._placed_on = {replica for _, replica in table.pairs()}

    def _covers(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId]) -> bool:
        """Return whether the last table contains exactly these adapters, all on existing replicas."""
        adapters = {demand.adapter for demand in demands}
        return adapters == self._table.shares.keys() and {each for _, each in self._table.pairs()} <= {*replicas}

    def _shares(
        self, packing: LoadPacking, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId]
    ) -> dict[AdapterDigest, tuple[ReplicaShare, ...]]:
        """Assign the bins to replicas and return the content of the table (steps 5 and 6)."""
        by_bin = replicas
        if self._table.shares:
            sizes_bytes = {demand.adapter: demand.size_bytes for demand in demands}
            held_by = self._routed if self._held is None else self._held.holders
            by_bin = tuple(least_movement(packing.bins, replicas, held_by, self._table.shares, sizes_bytes))
        shares = defaultdict[AdapterDigest, list[ReplicaShare]](list)
        for replica, content in sorted(zip(by_bin, packing.bins, strict=True), key=lambda each: each[0]):
            for adapter, fraction in content.items():
                shares[adapter].append(ReplicaShare(replica, fraction))
        return {adapter: tuple(its_shares) for adapter, its_shares in shares.items()}

    def _routed(self, adapter: AdapterDigest) -> list[ReplicaId]:
        return [share.replica for share in self._table.shares.get(adapter, ())]


class RankGroups(PlacementByRank):
    """Shares a rank's adapters among its replicas, forecasts demand by rank, and keeps good placements.

    Args:
        points: operating points.
    """

    def __init__(self, points: Points) -> None:
        super().__init__(points, RANK_GROUPS)


def floored(demands: Sequence[AdapterDemand], part: float) -> list[AdapterDemand]:
    """Return the demands, each raised to at least ``part`` of their mean."""
    floor = part * fmean(demand.tokens_per_s for demand in demands)
    return [demand._replace(tokens_per_s=max(demand.tokens_per_s, floor)) for demand in demands]


def extended(
    table: RoutingTable, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], points: Points
) -> dict[AdapterDigest, tuple[ReplicaShare, ...]]:
    """Return a table's content for exactly these adapters.

    New adapters are added whole, the largest rank first, to the replica whose utilisation at the largest rank is then
    lowest.

    Args:
        table: table of some of the adapters, on these replicas.
        demands: demands of all adapters.
        replicas: all replicas.
        points: operating points.
    """
    shares = {each.adapter: table.shares[each.adapter] for each in demands if each.adapter in table.shares}
    new = [demand for demand in demands if demand.adapter not in shares]
    if not new:
        return shares
    index = {replica: number for number, replica in enumerate(replicas)}
    tokens_per_s = np.zeros(len(replicas))
    point = np.full(len(replicas), np.inf)

    def put(demand: AdapterDemand, where: int, share: float) -> None:
        tokens_per_s[where] += share * demand.tokens_per_s
        point[where] = min(point[where], points[demand.rank])  # Points do not rise with the rank.

    for demand in demands:
        for replica, share in shares.get(demand.adapter, ()):
            put(demand, index[replica], share)
    for demand in sorted(new, key=lambda each: (-each.rank, -each.tokens_per_s, each.adapter)):
        after = (tokens_per_s + demand.tokens_per_s) / np.minimum(point, points[demand.rank])
        where = int(after.argmin())
        put(demand, where, 1.0)
        shares[demand.adapter] = (ReplicaShare(replicas[where], 1.0),)
    return shares


def utilisations(table: RoutingTable, demands: Sequence[AdapterDemand], points: Points) -> dict[ReplicaId, float]:
    """Return the utilisation of each replica that a table names, at the largest rank that it serves.

    A replica above 1 is expected to miss the SLO. So the values also show whether there are too few replicas or too
    many.
    """
    tokens_per_s = defaultdict[ReplicaId, float](float)
    max_rank = defaultdict[ReplicaId, int](int)
    for demand in demands:
        for replica, share in table.shares[demand.adapter]:
            tokens_per_s[replica] += share * demand.tokens_per_s
            max_rank[replica] = max(max_rank[replica], demand.rank)
    return {replica: load / points[max_rank[replica]] for replica, load in tokens_per_s.items()}
