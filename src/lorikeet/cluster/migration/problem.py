"""The co-migration problem: the input of a review, the cost of a move, the problem as arrays, the plan.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024, section
5.2. For what the paper leaves open see docs/decisions/comigration.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId

TOKEN_ID_BYTES = 4


def recompute_s(known_tokens: int, prefill_s: Callable[[int], float], link_bytes_per_s: float) -> float:
    """Return the time to move a request without its KV: its token ids are sent, and the target computes their KV.

    Args:
        known_tokens: tokens of prompt and answer so far.
        prefill_s: returns how long a prefill of so many tokens takes at a replica.
        link_bytes_per_s: between replicas.
    """
    return send_s(known_tokens, link_bytes_per_s) + prefill_s(known_tokens)


def send_s(known_tokens: int, link_bytes_per_s: float) -> float:
    """Return the time to move a request that has no KV yet: its token ids are sent."""
    return known_tokens * TOKEN_ID_BYTES / link_bytes_per_s


class MoveTimes(NamedTuple):
    """The times of moves, each by the faster way.

    Attributes:
        prefill_s, link_bytes_per_s: see :func:`recompute_s`.
        kv_token_bytes: KV of one token.
        kv_bytes_per_s: returns the current bandwidth of KV from device to device; None if KV cannot be moved.
    """

    prefill_s: Callable[[int], float]
    link_bytes_per_s: float
    kv_token_bytes: float
    kv_bytes_per_s: Callable[[], float] | None

    @property
    def can_move_kv(self) -> bool:
        """Whether KV can be moved."""
        return self.kv_bytes_per_s is not None

    def recomputed_s(self, known_tokens: int) -> float:
        """Return the time of a move that recomputes the KV."""
        return recompute_s(known_tokens, self.prefill_s, self.link_bytes_per_s)

    def transferred_s(self, known_tokens: int) -> float:
        """Return the time of a move that transfers the KV, except that of the last token.

        It is infinite if KV cannot be moved.
        """
        if self.kv_bytes_per_s is None:
            return float("inf")
        return known_tokens * self.kv_token_bytes / self.kv_bytes_per_s() + self.prefill_s(1)

    def transfers_kv(self, known_tokens: int) -> bool:
        """Return whether it is faster to transfer the KV."""
        return self.transferred_s(known_tokens) < self.recomputed_s(known_tokens)

    def move_s(self, known_tokens: int) -> float:
        """Return the time to move a request with so many tokens, prompt and answer so far."""
        return min(self.transferred_s(known_tokens), self.recomputed_s(known_tokens))


class MovableRequest(NamedTuple):
    """A request at a replica, waiting or running.

    Attributes:
        request_id: id of the request.
        adapter: adapter of the request; None for the base model, which is everywhere.
        replica: replica of the request.
        memory_bytes: size of its KV.
        execution_s: expected execution time: the mean of its adapter's requests (``RequestAverages``).
        move_s: time to move it now to an idle replica (``MoveTimes``).
        transfers_kv: whether the move transfers its KV; otherwise the KV is recomputed.
        moved_s: time that its earlier moves have taken.
        on_host: whether its KV is swapped out. Only the full problem tells the two memories apart.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    replica: ReplicaId
    memory_bytes: int
    execution_s: float
    move_s: float = 0.0
    moved_s: float = 0.0
    on_host: bool = False
    transfers_kv: bool = False


class ReplicaLoad(NamedTuple):
    """The load of a replica.

    Attributes:
        replica: id of the replica.
        device_bytes: device memory for adapters and KV, without the base weights.
        free_bytes: the free part of it.
        queue_delay_s: seconds for which its oldest waiting request has waited.
        reserved_bytes: part of ``device_bytes`` reserved for copies of adapters; not available to requests and their
            adapters.
        host_bytes: host memory for swapped KV. Only the full problem limits it.
        running: number of running requests. All of them wait for the prefill of a request that moves there.
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
        """The device memory without the reserved part."""
        return self.device_bytes - self.reserved_bytes


class CoMigrationSettings(NamedTuple):
    """Settings of co-migration. The paper prints none of these values: they are ours.

    Attributes:
        free_share: a replica with a smaller share of its memory free is short of memory.
        queue_delay_s: a replica whose oldest waiting request has waited longer is short of time.
        selected: number of the most loaded replicas that take part, and of the least loaded.
        affinity: cost of an adapter with requests on a replica, as a share of the mean execution time.
        swap_bytes_per_s: between host and device.
        margin: a plan is applied only if it reduces the current value by at least this share.
        gap: the solver may stop this close to the best choice of adapters, as a share of its value.
        time_limit_s: limit of each of the solver's two runs.
        full: solve the full problem, with two memories and whole requests, instead of the relaxed one.
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
    """The outcome of a review."""

    CALM = "calm"
    """No replica is short of memory or time."""
    NO_BETTER = "no-better"
    """No plan reduces the current value enough."""
    UNSOLVED = "unsolved"
    """The solver found no proven solution in time, or there is none; nothing moves."""
    PLANNED = "planned"
    """The plan moves requests."""


class RequestMove(NamedTuple):
    """The move of a request.

    Attributes:
        request_id: id of the request.
        adapter: adapter of the request; None for the base model.
        source, target: its current replica, and its next one.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    source: ReplicaId
    target: ReplicaId


class MigrationPlan(NamedTuple):
    """The result of a review.

    Attributes:
        outcome: why there is, or is not, anything to move.
        moves: requests to move; all others stay.
        before_s, after_s: running time of the busiest of the selected replicas, now and by the plan. Equal if there is
            no plan; 0 if it was not computed.
    """

    outcome: ReviewOutcome
    moves: tuple[RequestMove, ...] = ()
    before_s: float = 0.0
    after_s: float = 0.0


Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]

NO_ADAPTER = -1
"""Index of the base model among the adapters."""


@dataclass(frozen=True)
class MigrationInstance:
    """One instance of the migration problem: n requests on m replicas with the k adapters that they need.

    Attributes:
        requests, replicas, adapters: meaning of the indices.
        adapter_of: ``[n]``, index of the adapter of each request, or ``NO_ADAPTER``.
        home: ``[n]``, index of the current replica of each request.
        mean_s: mean execution time of all requests, including those that are left out.
        affinity_s: cost of an adapter with requests on a replica.
        cost_s: ``[n, m]``, cost of a request on a replica: its execution time, times the migration factor.
        request_s, adapter_s: ``[n]`` and ``[k]``, memory as the time to swap it.
        device_s, host_s: ``[m]``, memory as the time to swap it.
        on_host: ``[n]``, whether a request's KV is swapped out.
    """

    requests: Sequence[MovableRequest]
    replicas: Sequence[ReplicaId]
    adapters: Sequence[AdapterDigest]
    adapter_of: Ints
    home: Ints
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
    ) -> "MigrationInstance":
        """Build the problem for the requests on ``replicas``; others are left out.

        The migration factor depends on request and replica: 1 at home, and elsewhere (execution + earlier moves + this
        move) / execution, so a request that has moved is dearer to move again. Execution times of requests overlap,
        whereas a prefill delays all requests that run at the target. So a move counts once for each of them, unless its
        KV is transferred. The printed factor depends on the request alone (``literal``): (execution + earlier moves) /
        execution.

        Raises:
            KeyError: the size of an adapter is missing.
        """
        index = {load.replica: j for j, load in enumerate(replicas)}
        chosen = [request for request in requests if request.replica in index]
        adapters = sorted({request.adapter for request in chosen if request.adapter is not None})
        number = {adapter: k for k, adapter in enumerate(adapters)}
        home = np.array([index[request.replica] for request in chosen], np.intp)
        execution_s = np.array([request.execution_s for request in chosen], np.float64)
        moved_s = np.array([request.moved_s for request in chosen], np.float64)
        transfers_kv = np.array([request.transfers_kv for request in chosen], np.bool_)[:, None]
        delayed = np.where(transfers_kv, 1.0, [max(1, load.running) for load in replicas])
        move_s = np.array([request.move_s for request in chosen], np.float64)[:, None] * delayed
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

    def lower_bound_s(self) -> float:
        """Return a lower bound of the running time of the busiest replica: an equal share of the cheapest work."""
        return float(self.cost_s.min(axis=1).sum() / len(self.replicas))

    def needed(self, placement: Ints) -> Flags:
        """Return ``[k, m]``: whether an adapter has requests on a replica."""
        needed = np.zeros((len(self.adapters), len(self.replicas)), np.bool_)
        bound = self.adapter_of != NO_ADAPTER
        needed[self.adapter_of[bound], placement[bound]] = True
        return needed

    def running_s(self, placement: Ints) -> Floats:
        """Return ``[m]``: the running time of each replica, if requests beyond its memory are swapped.

        Args:
            placement: ``[n]``, replica of each request.
        """
        needed = self.needed(placement)
        held_s = self._sums(placement, self.request_s) + self.adapter_s @ needed
        return self._busy_s(placement, needed) + np.maximum(held_s - self.device_s, 0.0)

    def running_with_swaps_s(self, placement: Ints, on_host: Flags) -> Floats:
        """Return ``[m]``: the running time of each replica, if exactly the requests of ``on_host`` are swapped."""
        swapped_s = self._sums(placement, self.request_s * on_host)
        return self._busy_s(placement, self.needed(placement)) + swapped_s

    def _busy_s(self, placement: Ints, needed: Flags) -> Floats:
        costs_s = self.cost_s[np.arange(len(placement)), placement]
        busy_s = self._sums(placement, costs_s)
        busy_s += self.affinity_s * needed.sum(axis=0)
        return busy_s

    def _sums(self, placement: Ints, values: Floats) -> Floats:
        sums = np.zeros(len(self.replicas))
        np.add.at(sums, placement, values)
        return sums
