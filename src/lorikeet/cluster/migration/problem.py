"""The co-migration problem: the input of a review, the cost of a move, the problem as arrays, the plan.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
section 5.2. What the paper leaves open: docs/decisions/comigration.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId

TOKEN_ID_BYTES = 4


def rebuild_s(known_tokens: int, prefill_s: Callable[[int], float], link_bytes_per_s: float) -> float:
    """Return what moving a request takes: its token ids travel, and the target computes their KV.

    Args:
        known_tokens: of prompt and answer so far.
        prefill_s: how long a prefill of so many tokens takes at a replica.
        link_bytes_per_s: between replicas.
    """
    return sent_s(known_tokens, link_bytes_per_s) + prefill_s(known_tokens)


def sent_s(known_tokens: int, link_bytes_per_s: float) -> float:
    """Return what moving a request takes that has no KV yet: its token ids travel."""
    return known_tokens * TOKEN_ID_BYTES / link_bytes_per_s


class MoveTimes(NamedTuple):
    """How long requests take to move if each does what takes less time.

    Attributes:
        prefill_s, link_bytes_per_s: see :func:`rebuild_s`.
        kv_token_bytes: of KV.
        kv_bytes_per_s: how fast KV travels from device to device at present; None if it cannot.
    """

    prefill_s: Callable[[int], float]
    link_bytes_per_s: float
    kv_token_bytes: float
    kv_bytes_per_s: Callable[[], float] | None

    def rebuilt_s(self, known_tokens: int) -> float:
        """Return it with the KV computed anew."""
        return rebuild_s(known_tokens, self.prefill_s, self.link_bytes_per_s)

    def carried_s(self, known_tokens: int) -> float:
        """Return it with the KV taken along, but that of the last token; infinity if that cannot be."""
        if self.kv_bytes_per_s is None:
            return float("inf")
        return known_tokens * self.kv_token_bytes / self.kv_bytes_per_s() + self.prefill_s(1)

    def carries(self, known_tokens: int) -> bool:
        """Whether KV is better taken along."""
        return self.carried_s(known_tokens) < self.rebuilt_s(known_tokens)

    def move_s(self, known_tokens: int) -> float:
        """Return what the move of a request with so many tokens, prompt and answer so far, takes."""
        return min(self.carried_s(known_tokens), self.rebuilt_s(known_tokens))


class MovableRequest(NamedTuple):
    """A request that is somewhere, waiting or running.

    Attributes:
        request_id: whose it is.
        adapter: which it needs; None: the base model, which is everywhere.
        replica: where it is.
        memory_bytes: of its KV.
        execution_s: what it is expected to take: the mean of its adapter's requests (``RequestAverages``).
        move_s: what moving it now would take an idle replica (``MoveTimes``).
        carries_kv: its KV would be taken along; else it is computed again.
        moved_s: what its earlier moves have taken.
        on_host: its KV has been swapped out. Only the full problem tells the two memories apart.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    replica: ReplicaId
    memory_bytes: int
    execution_s: float
    move_s: float = 0.0
    moved_s: float = 0.0
    on_host: bool = False
    carries_kv: bool = False


class ReplicaLoad(NamedTuple):
    """A replica as the monitor sees it.

    Attributes:
        replica: which.
        device_bytes: device memory for adapters and KV: what the base weights leave.
        free_bytes: of these, held by nobody.
        queue_delay_s: how long its oldest waiting request has waited.
        reserved_bytes: part of ``device_bytes`` set aside for copies of adapters; requests and their adapters may not
            count on it.
        host_bytes: host memory for swapped KV. Only the full problem has a limit there.
        running: requests in its steps, all of which wait for the prefill of one that moves there.
    """

    replica: ReplicaId
    device_bytes: int
    free_bytes: int
    queue_delay_s: float
    reserved_bytes: int = 0
    host_bytes: int = 0
    running: int = 0

    @property
    def usable_bytes(self) -> int:
        """Device memory without what is reserved."""
        return self.device_bytes - self.reserved_bytes


class CoMigrationSettings(NamedTuple):
    """What may be set. The paper prints none of these values: they are ours.

    Attributes:
        free_share: a replica with less of its memory free than this is short of memory.
        queue_delay_s: one whose oldest waiting request has waited longer is short of time.
        selected: how many of the most loaded replicas take part, and how many of the least loaded.
        affinity: what an adapter with requests on a replica costs it, as a share of the mean execution time.
        swap_bytes_per_s: between host and device.
        margin: a plan is applied only if it takes so large a share off the present value.
        gap: the solver may stop so close to the best choice of adapters, as a share of its value.
        time_limit_s: for each of the solver's runs, of which there are two.
        full: solve the full problem, with its two memories and whole requests, instead of the relaxed one.
        literal: weigh all replicas with the printed migration factor, which does not tell staying from moving.
    """

    free_share: float = 0.10
    queue_delay_s: float = 5.0
    selected: int = 2
    affinity: float = 0.1
    swap_bytes_per_s: float = 25e9
    margin: float = 0.05
    gap: float = 0.10
    time_limit_s: float = 0.050
    full: bool = False
    literal: bool = False


class ReviewOutcome(StrEnum):
    """What a review came to."""

    CALM = "calm"
    """No replica is short of anything."""
    NO_BETTER = "no-better"
    """No plan takes enough off the present value."""
    UNSOLVED = "unsolved"
    """The solver had no proven solution in time, or there is none; everything stays."""
    PLANNED = "planned"
    """There is something to move."""


class RequestMove(NamedTuple):
    """One request that leaves.

    Attributes:
        request_id: whose it is.
        adapter: which it needs, None: the base model.
        source, target: from where to where.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    source: ReplicaId
    target: ReplicaId


class MigrationPlan(NamedTuple):
    """What to do.

    Attributes:
        outcome: why there is, or is not, anything to do.
        moves: requests that leave; all others stay.
        before_s, after_s: running time of the busiest of the selected replicas, as things are and by the plan; equal
            if there is none, 0 where nobody looked.
    """

    outcome: ReviewOutcome
    moves: tuple[RequestMove, ...] = ()
    before_s: float = 0.0
    after_s: float = 0.0


Floats = NDArray[np.float64]
Whole = NDArray[np.intp]
Flags = NDArray[np.bool_]

NO_ADAPTER = -1
"""Stands for the base model among indices of adapters."""


@dataclass(frozen=True)
class MigrationProblem:
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

    requests: Sequence[MovableRequest]
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
        requests: Sequence[MovableRequest],
        adapter_bytes: Mapping[AdapterDigest, int],
        settings: CoMigrationSettings,
    ) -> "MigrationProblem":
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
