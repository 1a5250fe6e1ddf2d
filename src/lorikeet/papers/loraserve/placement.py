"""Implements LoRAServe's placement as printed, and its baselines, which place an adapter once (section V-D)."""

import random
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Self

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.by_rank import PlacementByRank
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.setup import PolicySetup
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId


class OneHome(PlacementPolicy):
    """Assigns one replica to every adapter, where the adapter stays as long as both exist.

    A new adapter, or an adapter whose replica has left, gets a replica without moving other adapters. A replica that
    joins gets only new adapters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._homes: dict[AdapterDigest, ReplicaId] = {}

    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Return the placement, which ignores demand."""
        known = {demand.adapter: demand for demand in demands}
        stay = {adapter: home for adapter, home in self._homes.items() if adapter in known and home in replicas}
        unplaced = [demand for adapter, demand in known.items() if adapter not in stay]
        if unplaced or len(stay) < len(self._homes):
            self._homes = stay
            self._homes |= self._assign(unplaced, {adapter: known[adapter] for adapter in stay}, replicas)
            alone = {replica: (ReplicaShare(replica, 1.0),) for replica in replicas}
            return self._replaced({adapter: alone[home] for adapter, home in self._homes.items()})
        return self._table

    def resume(self, table: RoutingTable) -> None:
        """Continue from the replicas of an earlier placement."""
        super().resume(table)
        self._homes = {adapter: shares[0].replica for adapter, shares in table.shares.items()}

    @abstractmethod
    def _assign(
        self,
        unplaced: Sequence[AdapterDemand],
        placed: dict[AdapterDigest, AdapterDemand],
        replicas: Sequence[ReplicaId],
    ) -> dict[AdapterDigest, ReplicaId]:
        """Return replicas for the adapters in ``unplaced``.

        ``_homes`` holds the replicas of the adapters in ``placed``.
        """


class RandomPlacement(OneHome):
    """Assigns a random replica to each adapter.

    Source: LoRAServe, section V-D (S-LoRA Random), which leaves open whether counts are equal.

    Args:
        seed: seed of the draws.
        balanced: whether the adapters are shuffled and assigned in turn, so that counts are equal. If not, a replica is
            drawn for each adapter.
    """

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy with the seed of the options."""
        return cls(setup.options.seed, **parameters)

    def __init__(self, seed: int, *, balanced: bool = True) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._balanced = balanced
        self._dealt = 0

    def _assign(
        self,
        unplaced: Sequence[AdapterDemand],
        placed: dict[AdapterDigest, AdapterDemand],
        replicas: Sequence[ReplicaId],
    ) -> dict[AdapterDigest, ReplicaId]:
        adapters = sorted(demand.adapter for demand in unplaced)  # sorted, so that the draws depend only on the seed
        if not self._balanced:
            return {adapter: self._random.choice(replicas) for adapter in adapters}
        self._random.shuffle(adapters)
        first = self._dealt
        self._dealt += len(adapters)
        return {adapter: replicas[turn % len(replicas)] for turn, adapter in enumerate(adapters, start=first)}


class ContiguousPlacement(OneHome):
    """Sorts adapters by rank and cuts them into groups of equal count, one for each replica.

    If the counts cannot be equal, the first groups have one adapter more. A later adapter is placed on the replica of
    the adapter with the next lower rank.

    Source: LoRAServe, section V-D (S-LoRA Contiguous).
    """

    def _assign(
        self,
        unplaced: Sequence[AdapterDemand],
        placed: dict[AdapterDigest, AdapterDemand],
        replicas: Sequence[ReplicaId],
    ) -> dict[AdapterDigest, ReplicaId]:
        coming = sorted((demand.rank, demand.adapter) for demand in unplaced)
        if placed:
            present = sorted((demand.rank, adapter) for adapter, demand in placed.items())
            below = [present[max(0, bisect_right(present, each) - 1)] for each in coming]
            return {adapter: self._homes[of] for (_, adapter), (_, of) in zip(coming, below, strict=True)}
        size, larger = divmod(len(coming), len(replicas))
        sizes = [size + (number < larger) for number in range(len(replicas))]
        homes = [replica for replica, count in zip(replicas, sizes, strict=True) for _ in range(count)]
        return {adapter: home for (_, adapter), home in zip(coming, homes, strict=True)}


class LoRAServe(PlacementByRank):
    """Packs adapters of similar rank onto replicas in proportion to their demand, as printed in Algorithm 1.

    Algorithm 1 packs from scratch every time, and the paper does not print its extrapolation.
    """
