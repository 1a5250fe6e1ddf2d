"""Defines the co-migration problem: the input of a review, the cost of a move, the problem as arrays, and the plan.

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
    """Return the time to move a request without its KV: the token ids are sent, and the target recomputes the KV.

    Args:
        known_tokens: number of tokens of the prompt and of the answer so far.
        prefill_s: returns the seconds of a prefill at a replica, given its number of tokens.
        link_bytes_per_s: bandwidth between replicas.
    """
    return send_s(known_tokens, link_bytes_per_s) + prefill_s(known_tokens)


def send_s(known_tokens: int, link_bytes_per_s: float) -> float:
    """Return the time to move a request that has no KV yet: only the token ids are sent."""
    return known_tokens * TOKEN_ID_BYTES / link_bytes_per_s


class MoveTimes(NamedTuple):
    """Computes the time of a move, with or without KV, whichever is faster.

    Attributes:
        prefill_s, link_bytes_per_s: see :func:`recompute_s`.
        kv_token_bytes: bytes of one token's KV.
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
        """Return the time of a move that transfers the KV of all tokens but the last.

        The time is infinite if KV cannot be moved.
        """
        if self.kv_bytes_per_s is None:
            return float("inf")
        return known_tokens * self.kv_token_bytes / self.kv_bytes_per_s() + self.prefill_s(1)

    def transfers_kv(self, known_tokens: int) -> bool:
        """Return whether transferring the KV is faster than recomputing it."""
        return self.transferred_s(known_tokens) < self.recomputed_s(known_tokens)

    def move_s(self, known_tokens: int) -> float:
        """Return the time to move a request, given its number of prompt and answer tokens so far."""
        return min(self.transferred_s(known_tokens), self.recomputed_s(known_tokens))


class MovableRequest(NamedTuple):
    """Describes a waiting or running request at a replica.

    Attributes:
        request_id: id of the request.
        adapter: adapter of the request; None for the base model, which every replica has.
        replica: replica of the request.
        memory_bytes: size of its KV.
        execution_s: expected execution time: the mean over the adapter's finished requests (``RequestAverages``).
        move_s: time to move the request now to an idle replica (``MoveTimes``).
        transfers_kv: whether the move transfers its KV; otherwise the KV is recomputed.
        moved_s: total time of the request's earlier moves.
        on_host: whether the KV is swapped out. Only the full problem distinguishes device and host memory.
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
    """Describes the load of a replica.

    Attributes:
        replica: id of the replica.
        device_bytes: device memory for adapters and KV, without the base weights.
        free_bytes: free part of ``device_bytes``.
        queue_delay_s: waiting time of the oldest waiting request, in seconds.
        reserved_bytes: part of ``device_bytes`` reserved for copies of adapters; not available to requests and their
            adapters.
        host_bytes: host memory for swapped KV. Only the full problem limits it.
        running: number of running requests. All of them are delayed by the prefill of a request that moves to the
        replica.
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
        """Bytes of device memory without the reserved part."""
        return self.device_bytes - self.reserved_bytes


class CoMigrationSettings(NamedTuple):
    """Settings of co-migration. The paper prints none of the values, so they are ours.

    Attributes:
        free_share: a replica is short of memory if a smaller share of its memory is free.
        queue_delay_s: a replica is short of time if its oldest waiting request has waited longer.
        selected: number of the most loaded replicas in a review, and also of the least loaded ones.
        affinity: cost of each adapter that has requests on a replica, as a share of the mean execution time.
        swap_bytes_per_s: bandwidth between host and device.
        margin: smallest share by which a plan must reduce the busiest replica's running time; smaller gains move
            nothing.
        gap: relative distance from the best choice of adapters at which the solver may stop.
        time_limit_s: time limit of each of the solver's two runs.
        full: whether the full problem, with two memories and whole requests, is solved instead of the relaxed one.
        literal: whether all replicas get the migration factor as printed, which does not distinguish staying from
            moving.
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
    """Names the possible outcomes of a review."""

    CALM = "calm"
    """No replica is short of memory or time."""
    NO_BETTER = "no-better"
    """No plan reduces the busiest replica's running time enough."""
    UNSOLVED = "unsolved"
    """The solver found no proven solution within its time limit, or no solution exists. Nothing moves."""
    PLANNED = "planned"
    """The plan moves requests."""


class RequestMove(NamedTuple):
    """The move of a request.

    Attributes:
        request_id: id of the request.
        adapter: adapter of the request; None for the base model.
        source, target: current and next replica of the request.
    """

    request_id: RequestId
    adapter: AdapterDigest | None
    source: ReplicaId
    target: ReplicaId


class MigrationPlan(NamedTuple):
    """The result of a review.

    Attributes:
        outcome: the reason why requests move or stay.
        moves: requests to move; all others stay.
        before_s, after_s: running time of the busiest selected replica, now and after the plan. The two are equal if
            there is no plan, and 0 if they were not computed.
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
        mean_s: mean execution time of all requests, including requests that the problem leaves out.
        affinity_s: cost of each adapter that has requests on a replica.
        cost_s: ``[n, m]``, cost of a request on a replica: its execution time, times the migration factor.
        request_s, adapter_s: ``[n]`` and ``[k]``, memory as the time to swap its content.
        device_s, host_s: ``[m]``, memory of each replica as the time to swap its content.
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
        """Build the problem for the requests on ``replicas``. Other requests are left out.

        The migration factor depends on request and replica: 1 at home, and elsewhere (execution + earlier moves + this
        move) / execution, so moving a request again costs more than its first move. Execution times of requests
        overlap, but a prefill delays all requests that run at the target. So the time of a move is multiplied by their
        number, unless the KV is transferred. The printed factor depends on the request alone (``literal``): (execution
        + earlier moves) / execution.

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
        """Return, as ``[k, m]``, whether each adapter has requests on each replica."""
        needed = np.zeros((len(self.adapters), len(self.replicas)), np.bool_)
        bound = self.adapter_of != NO_ADAPTER
        needed[self.adapter_of[bound], placement[bound]] = True
        return needed

    def running_s(self, placement: Ints) -> Floats:
        """Return the running time of each replica, ``[m]``, if requests beyond its memory are swapped.

        Args:
            placement: ``[n]``, replica of each request.
        """
        needed = self.needed(placement)
        held_s = self._sums(placement, self.request_s) + self.adapter_s @ needed
        return self._busy_s(placement, needed) + np.maximum(held_s - self.device_s, 0.0)

    def running_with_swaps_s(self, placement: Ints, on_host: Flags) -> Floats:
        """Return the running time of each replica, ``[m]``, if exactly the requests of ``on_host`` are swapped."""
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
