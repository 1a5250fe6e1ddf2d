"""Reviews a cluster: turns the fleet's state into the input of co-migration, and plans the moves."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lorikeet.cluster.migration.problem import (
    CoMigrationSettings,
    Floats,
    Ints,
    MigrationInstance,
    MigrationPlan,
    MovableRequest,
    MoveTimes,
    ReplicaLoad,
    RequestMove,
    ReviewOutcome,
    send_s,
)
from lorikeet.cluster.migration.solver import rounded, solve_full, solve_relaxed
from lorikeet.cluster.routing.fleet import Fleet, FleetReplica, FleetRequest
from lorikeet.core.ids import AdapterDigest, RequestId


class ReviewInput(NamedTuple):
    """Holds the arguments of ``CoMigration.review``."""

    replicas: list[ReplicaLoad]
    requests: list[MovableRequest]
    adapter_bytes: dict[AdapterDigest, int]


def observe(
    fleet: Fleet,
    sent_s: Mapping[RequestId, float],
    moved_s: Mapping[RequestId, float],
    times: MoveTimes,
    now: float,
    reserved_share: float = 0.0,
) -> ReviewInput:
    """Return the open replicas whose memory is known, and their requests.

    Args:
        fleet: state of the replicas. Their free memory comes from their last gauges.
        sent_s: time at which each request was sent to its replica. Requests without a time are left out, for example if
            their adapter is still being copied to the replica.
        moved_s: total time of each request's earlier moves.
        times: times of moves.
        now: current time, seconds.
        reserved_share: share of each replica's memory that is reserved for copies of adapters.
    """
    observed = ReviewInput([], [], {})
    for member in fleet.members():
        if not member.is_open or not member.info.kv_token_bytes:
            continue
        entries = [entry for entry in map(fleet.entry, member.requests) if entry and entry.request.request_id in sent_s]
        observed.replicas.append(_load(fleet, member, entries, sent_s, now, reserved_share))
        for entry in entries:
            observed.requests.append(_movable(fleet, entry, moved_s, times))
            if entry.request.adapter is not None:
                observed.adapter_bytes[entry.request.adapter] = entry.request.adapter_bytes
    return observed


def _load(
    fleet: Fleet,
    member: FleetReplica,
    entries: list[FleetRequest],
    sent_s: Mapping[RequestId, float],
    now: float,
    reserved_share: float,
) -> ReplicaLoad:
    """Return the load of a replica. Preempted requests count as running, because they were admitted before."""
    token_bytes = member.info.kv_token_bytes
    loads = fleet.loads
    device_bytes = int(member.info.total_tokens * token_bytes)
    free_tokens = float(loads.capacity_tokens[member.index] - loads.held_tokens[member.index])
    waiting_s = [sent_s[entry.request.request_id] for entry in entries if entry.admitted_s is None]
    return ReplicaLoad(
        replica=member.info.replica,
        device_bytes=device_bytes,
        free_bytes=int(max(0.0, free_tokens) * token_bytes),
        queue_delay_s=now - min(waiting_s, default=now),
        reserved_bytes=int(reserved_share * device_bytes),
        running=int(loads.running[member.index]),
    )


def _movable(fleet: Fleet, entry: FleetRequest, moved_s: Mapping[RequestId, float], times: MoveTimes) -> MovableRequest:
    request = entry.request
    tokens = entry.request.known_tokens + entry.output_tokens
    has_kv = entry.admitted_s is not None
    return MovableRequest(
        request_id=request.request_id,
        adapter=request.adapter,
        replica=entry.replica.info.replica,
        memory_bytes=int(tokens * entry.replica.info.kv_token_bytes),
        execution_s=fleet.averages.execution_s(request.adapter),
        move_s=times.move_s(tokens) if has_kv else send_s(tokens, times.link_bytes_per_s),
        transfers_kv=has_kv and times.transfers_kv(tokens),
        moved_s=moved_s.get(request.request_id, 0.0),
    )


class CoMigration:
    """Decides which requests should move. It keeps no state between reviews.

    Args:
        settings: settings of co-migration; None for the defaults.
    """

    def __init__(self, settings: CoMigrationSettings | None = None) -> None:
        self._settings = settings or CoMigrationSettings()

    def review(
        self,
        replicas: Sequence[ReplicaLoad],
        requests: Sequence[MovableRequest],
        adapter_bytes: Mapping[AdapterDigest, int],
    ) -> MigrationPlan:
        """Return the moves to make. Requests move only if a replica is short of memory or time and a plan helps.

        Callers leave out requests that cannot move, for example requests that are being moved. Such requests count
        neither as load nor as memory.

        Args:
            replicas: all open replicas.
            requests: requests on these replicas.
            adapter_bytes: size of each adapter that a request needs.

        Raises:
            KeyError: the size of an adapter is missing.
        """
        if not any(self._is_short(load) for load in replicas):
            return MigrationPlan(ReviewOutcome.CALM)
        everywhere = MigrationInstance.of(replicas, requests, adapter_bytes, self._settings)
        chosen = [replicas[j] for j in selected(self._running_s(everywhere), self._settings.selected)]
        problem = MigrationInstance.of(chosen, requests, adapter_bytes, self._settings)
        if not problem.requests:
            return MigrationPlan(ReviewOutcome.NO_BETTER)
        before_s = float(self._running_s(problem).max())
        enough_s = before_s * (1 - self._settings.margin)
        if problem.lower_bound_s() >= enough_s:
            return MigrationPlan(ReviewOutcome.NO_BETTER, before_s=before_s, after_s=before_s)
        found = self._solve(problem)
        if found is None:
            return MigrationPlan(ReviewOutcome.UNSOLVED, before_s=before_s, after_s=before_s)
        placement, after_s = found
        moves = _moves(problem, placement)
        # In the full problem, a plan without moves may still save time by swaps. Each replica decides its swaps itself.
        if not moves or after_s >= enough_s:
            return MigrationPlan(ReviewOutcome.NO_BETTER, before_s=before_s, after_s=before_s)
        return MigrationPlan(ReviewOutcome.PLANNED, moves, before_s, after_s)

    def _is_short(self, load: ReplicaLoad) -> bool:
        has_little = load.free_bytes < self._settings.free_share * load.device_bytes
        return has_little or load.queue_delay_s > self._settings.queue_delay_s

    def _running_s(self, problem: MigrationInstance) -> Floats:
        """Return the running time of each replica without moves."""
        if self._settings.full:
            return problem.running_with_swaps_s(problem.home, problem.on_host)
        return problem.running_s(problem.home)

    def _solve(self, problem: MigrationInstance) -> tuple[Ints, float] | None:
        """Return a placement and the running time of its busiest replica, computed for whole requests."""
        gap = self._settings.gap
        limit_s = self._settings.time_limit_s
        if self._settings.full:
            whole = solve_full(problem, gap, limit_s)
            return None if whole is None else (whole.placement, float(problem.running_with_swaps_s(*whole).max()))
        relaxed = solve_relaxed(problem, gap, limit_s)
        if relaxed is None:
            return None
        placement = rounded(relaxed.shares, problem.home)
        return placement, float(problem.running_s(placement).max())


def selected(running_s: Floats, count: int) -> list[int]:
    """Return the ``count`` busiest and the ``count`` least busy replicas, in order.

    If there are fewer replicas, all are returned. Of equally busy replicas the first counts as busier.
    """
    order = np.argsort(-running_s, kind="stable").tolist()
    return sorted(order if len(order) <= 2 * count else order[:count] + order[-count:])


def _moves(problem: MigrationInstance, placement: Ints) -> tuple[RequestMove, ...]:
    pairs = zip(problem.requests, placement.tolist(), strict=True)
    return tuple(
        RequestMove(request.request_id, request.adapter, request.replica, problem.replicas[j])
        for request, j in pairs
        if request.replica != problem.replicas[j]
    )
