"""LoRAServe's placement: like ranks together, equal load everywhere, few adapters moved."""

from collections import defaultdict
from collections.abc import Sequence, Set
from statistics import fmean

import msgspec
import numpy as np

from lorikeet.cluster.demand import COLD_TOKENS_PER_S, AdapterDemand
from lorikeet.cluster.operating_points import OperatingPoints
from lorikeet.cluster.placement.base import Placement
from lorikeet.cluster.placement.packing import Packing, PackingParams
from lorikeet.cluster.placement.permutation import least_movement
from lorikeet.cluster.tables import AdapterTable, RoutingTable, Share
from lorikeet.core.ids import AdapterDigest, ReplicaId


class LoRAServeParams(msgspec.Struct, frozen=True):
    """Settings of the placement.

    Attributes:
        demand_floor: no adapter counts for less than this part of the mean demand, so that silent ones spread.
        hysteresis: the old placement stays while its fullest replica is at most so much fuller than the new one's,
            and the replicas are the same; adapters that came meanwhile are added to it. None: it never stays.
        packing: see there.
    """

    demand_floor: float = 0.05
    hysteresis: float | None = 0.10
    packing: PackingParams = PackingParams()


LITERAL = LoRAServeParams(
    demand_floor=0.0, hysteresis=None, packing=PackingParams(slack=0.0, min_fraction=0.0, group=1, literal=True)
)
"""The algorithm as printed, without what the paper has not."""


class LoRAServe(Placement):
    """Packs adapters of like rank onto replicas in proportion to their demand, each time anew.

    Source: LoRAServe, Algorithm 1. The paper has neither hysteresis nor groups of replicas that share adapters.

    Args:
        replicas: that there are.
        points: operating points.
        params: settings.
        held: if given, as few bytes as possible come to replicas that do not hold them; else to replicas to which the
            last table did not route them, as in the paper.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaId],
        points: OperatingPoints,
        params: LoRAServeParams | None = None,
        held: AdapterTable | None = None,
    ) -> None:
        super().__init__(replicas)
        self._points = points
        self._params = params or LoRAServeParams()
        self._held = held
        self._placed_on: Set[ReplicaId] = frozenset()
        self.packing: Packing | None = None
        """What the last call made of the demands, whether it came to be the table or not."""

    def place(self, demands: Sequence[AdapterDemand], now: float) -> RoutingTable:
        """Return the new placement, or the old one if nobody asks for anything or it is nearly as good.

        Adapters that come or go do not move the others for that.
        """
        margin = self._params.hysteresis
        if not any(demand.tokens_per_s for demand in demands):
            if self._covers(demands):
                return self._table
            demands = [demand._replace(tokens_per_s=COLD_TOKENS_PER_S) for demand in demands]
        if not demands:
            return self._replaced({})
        demands = floored(demands, self._params.demand_floor)
        packing = self.packing = Packing(demands, len(self.replicas), self._points, self._params.packing)
        is_same = {*self.replicas} == self._placed_on
        self._placed_on = {*self.replicas}
        if is_same and margin is not None and self._table.shares:
            before = RoutingTable(self._table.epoch, extended(self._table, demands, self.replicas, self._points))
            if max(utilisations(before, demands, self._points).values()) <= packing.utilisations.max() * (1 + margin):
                return self._replaced(before.shares)
        return self._replaced(self._shares(packing, demands))

    def resume(self, table: RoutingTable) -> None:
        """See ``Placement``. What an earlier placement named is taken for what was there."""
        super().resume(table)
        self._placed_on = {replica for _, replica in table.pairs()}

    def _covers(self, demands: Sequence[AdapterDemand]) -> bool:
        """Whether the last table has exactly these adapters, all of them on replicas that there are."""
        adapters = {demand.adapter for demand in demands}
        return adapters == self._table.shares.keys() and {each for _, each in self._table.pairs()} <= {*self.replicas}

    def _shares(self, packing: Packing, demands: Sequence[AdapterDemand]) -> dict[AdapterDigest, tuple[Share, ...]]:
        """Return the table's content with every bin at a replica (steps 5 and 6)."""
        by_bin = self.replicas
        if self._table.shares:
            sizes_bytes = {demand.adapter: demand.size_bytes for demand in demands}
            held_by = self._routed if self._held is None else self._held.holders
            by_bin = tuple(least_movement(packing.bins, self.replicas, held_by, self._table.shares, sizes_bytes))
        shares = defaultdict[AdapterDigest, list[Share]](list)
        for replica, content in sorted(zip(by_bin, packing.bins, strict=True), key=lambda each: each[0]):
            for adapter, fraction in content.items():
                shares[adapter].append(Share(replica, fraction))
        return {adapter: tuple(its_shares) for adapter, its_shares in shares.items()}

    def _routed(self, adapter: AdapterDigest) -> list[ReplicaId]:
        return [share.replica for share in self._table.shares.get(adapter, ())]


def floored(demands: Sequence[AdapterDemand], part: float) -> list[AdapterDemand]:
    """Return the demands, none of them below such a part of their mean."""
    floor = part * fmean(demand.tokens_per_s for demand in demands)
    return [demand._replace(tokens_per_s=max(demand.tokens_per_s, floor)) for demand in demands]


def extended(
    table: RoutingTable, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], points: OperatingPoints
) -> dict[AdapterDigest, tuple[Share, ...]]:
    """Return a table's content for just these adapters.

    Those that are new go whole, the largest rank first, to where the result is least full at the largest rank there.

    Args:
        table: of some of the adapters, on these replicas.
        demands: of all adapters.
        replicas: that there are.
        points: operating points.
    """
    shares = {each.adapter: table.shares[each.adapter] for each in demands if each.adapter in table.shares}
    new = [demand for demand in demands if demand.adapter not in shares]
    if not new:
        return shares
    index = {replica: number for number, replica in enumerate(replicas)}
    tokens_per_s, point = np.zeros(len(replicas)), np.full(len(replicas), np.inf)

    def put(demand: AdapterDemand, where: int, share: float) -> None:
        tokens_per_s[where] += share * demand.tokens_per_s
        point[where] = min(point[where], points[demand.rank])  # they do not rise with the rank

    for demand in demands:
        for replica, share in shares.get(demand.adapter, ()):
            put(demand, index[replica], share)
    for demand in sorted(new, key=lambda each: (-each.rank, -each.tokens_per_s, each.adapter)):
        after = (tokens_per_s + demand.tokens_per_s) / np.minimum(point, points[demand.rank])
        where = int(after.argmin())
        put(demand, where, 1.0)
        shares[demand.adapter] = (Share(replicas[where], 1.0),)
    return shares


def utilisations(
    table: RoutingTable, demands: Sequence[AdapterDemand], points: OperatingPoints
) -> dict[ReplicaId, float]:
    """Return how full a table makes each replica that it names, at the largest rank that it serves.

    Above 1 a replica is expected to miss the SLO, so this also tells when there are too few replicas or too many.
    """
    tokens_per_s = defaultdict[ReplicaId, float](float)
    max_rank = defaultdict[ReplicaId, int](int)
    for demand in demands:
        for replica, share in table.shares[demand.adapter]:
            tokens_per_s[replica] += share * demand.tokens_per_s
            max_rank[replica] = max(max_rank[replica], demand.rank)
    return {replica: load / points[max_rank[replica]] for replica, load in tokens_per_s.items()}
