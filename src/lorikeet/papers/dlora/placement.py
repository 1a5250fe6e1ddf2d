"""Implements dLoRA's proactive placement: each copy is given to the adapter that a burst would hit hardest.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
section 5.1, and section 5.2 for the reserved memory. What they leave open: docs/decisions/comigration.md.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.setup import GENERIC_MEMORY_BYTES, GENERIC_TOKEN_BYTES, PolicySetup
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.ids import ReplicaId

RESERVED_SHARE = 0.05
"""Share of a replica's memory for adapters and KV that is reserved for further copies; the paper prints no size."""


class PreloadPlan(NamedTuple):
    """Lists the adapters that are loaded on each replica.

    Attributes:
        main: ``[adapters, replicas]``, copies in the memory that KV shares.
        reserved: ``[adapters, replicas]``, further copies in the reserved memory.
        free_bytes: ``[replicas]``, memory that ``main`` leaves for KV.
    """

    main: NDArray[np.bool_]
    reserved: NDArray[np.bool_]
    free_bytes: NDArray[np.int64]

    @property
    def copies(self) -> NDArray[np.bool_]:
        """All copies, in main and reserved memory, ``[adapters, replicas]``."""
        return self.main | self.reserved

    def tolerances(self, loads: Sequence[float], request_bytes: float) -> NDArray[np.float64]:
        """Return the burst tolerance of each adapter, ``[adapters]``.

        The tolerance is the number of requests that fit beside an adapter's copies, divided by its load.

        The free memory of a replica counts fully for every adapter on it.
        """
        requests = self.copies @ self.free_bytes / request_bytes
        tolerances = np.full(len(loads), np.inf)
        np.divide(requests, loads, out=tolerances, where=np.asarray(loads) > 0)
        return tolerances


def preload(
    sizes_bytes: Sequence[int],
    loads: Sequence[float],
    memory_bytes: Sequence[int],
    request_bytes: float,
    reserved_bytes: int = 0,
) -> PreloadPlan:
    """Place copies one by one, each of the adapter with the lowest burst tolerance (the busiest among equals).

    A copy is placed on the replica without the adapter that has the most free memory (the first among equals), if the
    adapter and one request fit there. In the main memory a copy reduces the KV of all adapters on the replica. So the
    greedy algorithm stops when a copy would lower the lowest tolerance, or when the adapter with the lowest tolerance
    can get no copy. Copies in the reserved memory do not reduce KV, so the algorithm continues with the next lowest
    tolerance until no adapter can get a copy. An adapter without load gets no copy.

    Args:
        sizes_bytes: sizes of the adapters.
        loads: mean past loads of the adapters. Only their ratios matter.
        memory_bytes: memory of the replicas without the base weights.
        request_bytes: bytes of a mean request's KV.
        reserved_bytes: reserved part of each replica's memory.
    """
    all_loads = np.array(loads, np.float64)
    # The busiest adapters come first, because argmin returns the first of equals. Adapters without load tolerate any
    # burst.
    order = np.argsort(-all_loads, kind="stable")[: int((all_loads > 0).sum())]
    main_bytes = np.array(memory_bytes, np.int64) - reserved_bytes
    greedy = _Greedy(
        np.array(sizes_bytes, np.int64)[order], all_loads[order], main_bytes, request_bytes, reserved_bytes
    )
    while greedy.add_main():
        pass
    while greedy.add_reserved():
        pass
    main = np.zeros((len(sizes_bytes), len(memory_bytes)), np.bool_)
    reserved = np.zeros_like(main)
    main[order], reserved[order] = greedy.main, greedy.reserved
    return PreloadPlan(main, reserved, greedy.free_bytes)


class _Greedy:
    """Places copies of adapters with load one by one, the busiest adapter first.

    Args:
        sizes_bytes, loads: sizes and loads of the adapters.
        main_bytes: memory of the replicas without the reserved memory.
        request_bytes, reserved_bytes: see :func:`preload`.
    """

    def __init__(
        self,
        sizes_bytes: NDArray[np.int64],
        loads: NDArray[np.float64],
        main_bytes: NDArray[np.int64],
        request_bytes: float,
        reserved_bytes: int,
    ) -> None:
        self._sizes, self._loads, self._request_bytes = sizes_bytes, loads, request_bytes
        self.free_bytes = main_bytes.copy()
        self._reserve_bytes = np.full_like(main_bytes, reserved_bytes)
        # The array is column-major, because every copy reads all adapters of one replica.
        self.main = np.zeros((len(loads), len(main_bytes)), np.bool_, order="F")
        self.reserved = np.zeros_like(self.main)
        self._capacity_bytes = np.zeros(len(loads), np.int64)  # free memory of all replicas that have an adapter
        self._full = np.zeros(len(loads), np.bool_)  # adapters that can get no copy in reserved memory

    def add_main(self) -> bool:
        """Place one copy in the memory shared with KV. Return False if no copy raises the lowest tolerance."""
        if not len(self._loads):
            return False
        tolerances = self._capacity_bytes / self._loads
        k = int(tolerances.argmin())
        size = self._sizes[k]
        fits = ~self.main[k] & (self.free_bytes >= size + self._request_bytes)
        if not fits.any():
            return False
        j = self._most_free(fits)
        capacity_bytes = self._capacity_bytes - size * self.main[:, j]
        capacity_bytes[k] += self.free_bytes[j] - size
        if (capacity_bytes / self._loads).min() < tolerances[k]:
            return False
        self._capacity_bytes = capacity_bytes
        self.free_bytes[j] -= size
        self.main[k, j] = True
        return True

    def add_reserved(self) -> bool:
        """Place one copy in reserved memory, or mark an adapter that can get no copy.

        Return False if no adapter can get a copy.
        """
        if self._full.all():
            return False
        k = int(np.where(self._full, np.inf, self._capacity_bytes / self._loads).argmin())
        fits = ~self.main[k] & ~self.reserved[k] & (self._reserve_bytes >= self._sizes[k])
        if fits.any():
            j = self._most_free(fits)
            self._capacity_bytes[k] += self.free_bytes[j]
            self._reserve_bytes[j] -= self._sizes[k]
            self.reserved[k, j] = True
        else:
            self._full[k] = True
        return True

    def _most_free(self, fits: NDArray[np.bool_]) -> int:
        return int(np.where(fits, self.free_bytes, -1).argmax())


class BurstTolerance(PlacementPolicy):
    """Preloads adapters by burst tolerance. An adapter's requests are split evenly among the replicas that have it.

    An adapter without a copy is loaded on demand, at the replica with the least load.

    Args:
        memory_bytes: memory of each replica for adapters and KV.
        request_bytes: bytes of a mean request's KV.
        reserved_share: share of the memory that is reserved for copies that do not reduce KV.
    """

    reserved_share = RESERVED_SHARE

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy. Without co-migration, no memory is reserved (section 5.1, not 5.2)."""
        options, profile = setup.options, setup.profile
        memory_bytes = options.memory_bytes or (GENERIC_MEMORY_BYTES if profile is None else profile.pool_bytes)
        token_bytes = options.kv_token_bytes or (
            GENERIC_TOKEN_BYTES if profile is None else profile.geometry.token_bytes
        )
        request_bytes = (options.prompt_tokens + options.output_tokens) * token_bytes
        return cls(memory_bytes, request_bytes, RESERVED_SHARE if setup.preset.comigration else 0.0, **parameters)

    def __init__(self, memory_bytes: int, request_bytes: float, reserved_share: float) -> None:
        super().__init__()
        self._memory_bytes = memory_bytes
        self._request_bytes = request_bytes
        self._reserved_bytes = int(reserved_share * memory_bytes)

    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        """Place copies. Tokens per second replace requests per second, because only ratios matter."""
        loads = [demand.tokens_per_s for demand in demands]
        memory_bytes = [self._memory_bytes] * len(replicas)
        sizes_bytes = [demand.size_bytes for demand in demands]
        placed = preload(sizes_bytes, loads, memory_bytes, self._request_bytes, self._reserved_bytes)
        copies = placed.copies
        _assign_homes(copies, np.array(loads, np.float64))
        shares = {
            demand.adapter: tuple(ReplicaShare(replicas[j], 1 / int(has.sum())) for j in np.flatnonzero(has).tolist())
            for demand, has in zip(demands, copies, strict=True)
        }
        return self._replaced(shares)


def _assign_homes(copies: NDArray[np.bool_], loads: NDArray[np.float64]) -> None:
    """Assign a replica to every adapter without a copy.

    The busiest adapter comes first, and each gets the replica with the least load so far. Among equally loaded
    replicas, the replica with the fewest adapters is chosen, then the first.
    """
    holders = copies.sum(axis=1)
    load = (loads / np.maximum(holders, 1)) @ copies
    counts = copies.sum(axis=0)
    for k in np.argsort(np.where(holders == 0, -loads, np.inf), kind="stable")[: int((holders == 0).sum())]:
        j = np.lexsort((counts, load))[0]
        copies[k, j] = True
        load[j] += loads[k]
        counts[j] += 1
