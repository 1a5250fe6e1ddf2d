"""The co-migration problem as arrays, and the value of a placement.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
section 5.2. All memory is in seconds: what it would take to swap it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorikeet.cluster.comigration.state import CoMigrationSettings, Movable, ReplicaLoad
from lorikeet.core.ids import AdapterDigest, ReplicaId

Floats = NDArray[np.float64]
Whole = NDArray[np.intp]
Flags = NDArray[np.bool_]

NO_ADAPTER = -1
"""Stands for the base model among indices of adapters."""


@dataclass(frozen=True)
class Problem:
    """n requests on m replicas with the k adapters that they need.

    Attributes:
        requests, replicas, adapters: what the indices mean.
        adapter_of: ``[n]``, index of the adapter of each request, or ``NO_ADAPTER``.
        home: ``[n]``, index of the replica where each request is.
        mean_s: mean execution time of all requests, those left out too.
        affinity_s: what an adapter with requests on a replica costs that replica.
        cost_s: ``[n, m]``, what a request costs a replica: its execution, times the migration factor.
        request_s, adapter_s: ``[n]`` and ``[k]``, memory.
        device_s, host_s: ``[m]``, memory.
        on_host: ``[n]``, whether a request's KV has been swapped out.
    """

    requests: Sequence[Movable]
    replicas: Sequence[ReplicaId]
    adapters: Sequence[AdapterDigest]
    adapter_of: Whole
    home: Whole
    mean_s: float
    affinity_s: float
    cost_s: Floats
    request_s: Floats
    adapter_s: Floats
    device_s: Floats
    host_s: Floats
    on_host: Flags

    @classmethod
    def of(
        cls,
        replicas: Sequence[ReplicaLoad],
        requests: Sequence[Movable],
        adapter_bytes: Mapping[AdapterDigest, int],
        settings: CoMigrationSettings,
    ) -> "Problem":
        """Write down the requests that are on ``replicas``; others are left out.

        The migration factor is that of each pair: 1 at home, and elsewhere (execution + earlier moves + this move) over
        execution, so whoever has moved is dearer to move again. A request's execution is one among others', whereas a
        prefill holds up all that run at the target, so a move counts once for each of them, unless KV is taken along.
        The printed factor depends on the request alone (``literal``): (execution + earlier moves) over execution.

        Raises:
            KeyError: the size of an adapter is not known.
        """
        index = {load.replica: j for j, load in enumerate(replicas)}
        chosen = [request for request in requests if request.replica in index]
        adapters = sorted({request.adapter for request in chosen if request.adapter is not None})
        number = {adapter: k for k, adapter in enumerate(adapters)}
        home = np.array([index[request.replica] for request in chosen], np.intp)
        execution_s = np.array([request.execution_s for request in chosen], np.float64)
        moved_s = np.array([request.moved_s for request in chosen], np.float64)
        carries = np.array([request.carries_kv for request in chosen], np.bool_)[:, None]
        held_up = np.where(carries, 1.0, [max(1, load.running) for load in replicas])
        move_s = np.array([request.move_s for request in chosen], np.float64)[:, None] * held_up
        away = np.arange(len(replicas)) != home[:, None]
        extra_s = np.ones_like(away) * moved_s[:, None] if settings.literal else away * (moved_s[:, None] + move_s)
        mean_s = float(np.mean([request.execution_s for request in requests])) if requests else 0.0

        def seconds(sizes_bytes: Sequence[int]) -> Floats:
            return np.array(sizes_bytes, np.float64) / settings.swap_bytes_per_s

        return cls(
            requests=chosen,
            replicas=[load.replica for load in replicas],
            adapters=adapters,
            adapter_of=np.array([NO_ADAPTER if r.adapter is None else number[r.adapter] for r in chosen], np.intp),
            home=home,
            mean_s=mean_s,
            affinity_s=settings.affinity * mean_s,
            cost_s=execution_s[:, None] + extra_s,
            request_s=seconds([request.memory_bytes for request in chosen]),
            adapter_s=seconds([adapter_bytes[adapter] for adapter in adapters]),
            device_s=seconds([load.usable_bytes for load in replicas]),
            host_s=seconds([load.host_bytes for load in replicas]),
            on_host=np.array([request.on_host for request in chosen], np.bool_),
        )

    def least_s(self) -> float:
        """Return how long the busiest replica runs at least, whatever is where: all have an equal part of the work."""
        return float(self.cost_s.min(axis=1).sum() / len(self.replicas))

    def needed(self, placement: Whole) -> Flags:
        """Return ``[k, m]``: which adapters have requests on which replicas."""
        needed = np.zeros((len(self.adapters), len(self.replicas)), np.bool_)
        bound = self.adapter_of != NO_ADAPTER
        needed[self.adapter_of[bound], placement[bound]] = True
        return needed

    def running_s(self, placement: Whole) -> Floats:
        """Return ``[m]``: how long each replica runs, if what does not fit its memory is swapped.

        Args:
            placement: ``[n]``, replica of each request.
        """
        needed = self.needed(placement)
        held_s = self._sums(placement, self.request_s) + self.adapter_s @ needed
        return self._busy_s(placement, needed) + np.maximum(held_s - self.device_s, 0.0)

    def running_with_swaps_s(self, placement: Whole, on_host: Flags) -> Floats:
        """Return ``[m]``: how long each replica runs, if exactly the requests of ``on_host`` are swapped."""
        swapped_s = self._sums(placement, self.request_s * on_host)
        return self._busy_s(placement, self.needed(placement)) + swapped_s

    def _busy_s(self, placement: Whole, needed: Flags) -> Floats:
        costs_s = self.cost_s[np.arange(len(placement)), placement]
        busy_s = self._sums(placement, costs_s)
        busy_s += self.affinity_s * needed.sum(axis=0)
        return busy_s

    def _sums(self, placement: Whole, values: Floats) -> Floats:
        sums = np.zeros(len(self.replicas))
        np.add.at(sums, placement, values)
        return sums
