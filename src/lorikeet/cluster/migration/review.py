"""What co-migration is told, made from what routing knows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lorikeet.cluster.migration.problem import (
    CoMigrationSettings,
    Floats,
    MigrationPlan,
    MigrationProblem,
    MovableRequest,
    MoveTimes,
    ReplicaLoad,
    RequestMove,
    ReviewOutcome,
    Whole,
    sent_s,
)
from lorikeet.cluster.migration.solver import rounded, solve_full, solve_relaxed
from lorikeet.cluster.routing.fleet import Fleet, FleetReplica, FleetRequest
from lorikeet.core.ids import AdapterDigest, RequestId


class ReviewInput(NamedTuple):
    """The arguments of ``CoMigration.review``."""

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
    """Return the replicas that may be sent requests and whose memory is known, and the requests there.

    Args:
        fleet: what routing knows; its room is as the replicas' last gauges told.
        sent_s: when each request was handed to the replica where it is. Others are left out: their adapter is on its
            way to the replica, say.
        moved_s: what the earlier moves of requests took, of those that have moved.
        times: what moving a request takes.
        now: the present time.
        reserved_share: of each replica's memory, set aside for copies of adapters.
    """
    observed = ReviewInput([], [], {})
    for member in fleet.members():
        if not member.is_open or not member.info.kv_token_bytes:
            continue
        entries = [entry for entry in map(fleet.entry, member.requests) if entry and entry.asked.request_id in sent_s]
        observed.replicas.append(_load(fleet, member, entries, sent_s, now, reserved_share))
        for entry in entries:
            observed.requests.append(_movable(fleet, entry, moved_s, times))
            if entry.asked.adapter is not None:
                observed.adapter_bytes[entry.asked.adapter] = entry.asked.adapter_bytes
    return observed


def _load(
    fleet: Fleet,
    member: FleetReplica,
    entries: list[FleetRequest],
    sent_s: Mapping[RequestId, float],
    now: float,
    reserved_share: float,
) -> ReplicaLoad:
    """Return a replica as it is; who was preempted there counts as running, since it has had its turn."""
    token_bytes, loads = member.info.kv_token_bytes, fleet.loads
    device_bytes = int(member.info.total_tokens * token_bytes)
    free_tokens = float(loads.room_tokens[member.index] - loads.held_tokens[member.index])
    waiting_s = [sent_s[entry.asked.request_id] for entry in entries if entry.admitted_s is None]
    return ReplicaLoad(
        replica=member.info.replica,
        device_bytes=device_bytes,
        free_bytes=int(max(0.0, free_tokens) * token_bytes),
        queue_delay_s=now - min(waiting_s, default=now),
        reserved_bytes=int(reserved_share * device_bytes),
        running=int(loads.running[member.index]),
    )


def _movable(fleet: Fleet, entry: FleetRequest, moved_s: Mapping[RequestId, float], times: MoveTimes) -> MovableRequest:
    asked, tokens = entry.asked, entry.asked.known_tokens + entry.output_tokens
    has_kv = entry.admitted_s is not None
    return MovableRequest(
        request_id=asked.request_id,
        adapter=asked.adapter,
        replica=entry.replica.info.replica,
        memory_bytes=int(tokens * entry.replica.info.kv_token_bytes),
        execution_s=fleet.averages.execution_s(asked.adapter),
        move_s=times.move_s(tokens) if has_kv else sent_s(tokens, times.link_bytes_per_s),
        carries_kv=has_kv and times.carries(tokens),
        moved_s=moved_s.get(asked.request_id, 0.0),
    )


class CoMigration:
    """Looks at the cluster whenever it is asked, and says what should move. It keeps nothing between reviews.

    Args:
        settings: values.
    """

    def __init__(self, settings: CoMigrationSettings | None = None) -> None:
        self._settings = settings or CoMigrationSettings()

    def review(
        self,
        replicas: Sequence[ReplicaLoad],
        requests: Sequence[MovableRequest],
        adapter_bytes: Mapping[AdapterDigest, int],
    ) -> MigrationPlan:
        """Return what to move, which is nothing unless a replica is short of memory or time and a plan helps.

        Requests that must stay where they are (their move is under way, say) are to be left out; they then count
        neither as load nor as memory.

        Args:
            replicas: all that serve.
            requests: that are on them.
            adapter_bytes: size of each adapter that a request needs.

        Raises:
            KeyError: an adapter without a size.
        """
        if not any(self._is_short(load) for load in replicas):
            return MigrationPlan(ReviewOutcome.CALM)
        everywhere = MigrationProblem.of(replicas, requests, adapter_bytes, self._settings)
        chosen = [replicas[j] for j in selected(self._running_s(everywhere), self._settings.selected)]
        problem = MigrationProblem.of(chosen, requests, adapter_bytes, self._settings)
        if not problem.requests:
            return MigrationPlan(ReviewOutcome.NO_BETTER)
        before_s = float(self._running_s(problem).max())
        enough_s = before_s * (1 - self._settings.margin)
        if problem.least_s() >= enough_s:
            return MigrationPlan(ReviewOutcome.NO_BETTER, before_s=before_s, after_s=before_s)
        found = self._solve(problem)
        if found is None:
            return MigrationPlan(ReviewOutcome.UNSOLVED, before_s=before_s, after_s=before_s)
        placement, after_s = found
        moves = _moves(problem, placement)
        # Without moves there may still be a gain, in the full problem: of swaps, which each replica sees to itself.
        if not moves or after_s >= enough_s:
            return MigrationPlan(ReviewOutcome.NO_BETTER, before_s=before_s, after_s=before_s)
        return MigrationPlan(ReviewOutcome.PLANNED, moves, before_s, after_s)

    def _is_short(self, load: ReplicaLoad) -> bool:
        has_little = load.free_bytes < self._settings.free_share * load.device_bytes
        return has_little or load.queue_delay_s > self._settings.queue_delay_s

    def _running_s(self, problem: MigrationProblem) -> Floats:
        """Return how long each replica runs as things are."""
        if self._settings.full:
            return problem.running_with_swaps_s(problem.home, problem.on_host)
        return problem.running_s(problem.home)

    def _solve(self, problem: MigrationProblem) -> tuple[Whole, float] | None:
        """Return a placement and how long its busiest replica runs: counted anew, for the requests as they are."""
        gap, limit_s = self._settings.gap, self._settings.time_limit_s
        if self._settings.full:
            whole = solve_full(problem, gap, limit_s)
            return None if whole is None else (whole.placement, float(problem.running_with_swaps_s(*whole).max()))
        relaxed = solve_relaxed(problem, gap, limit_s)
        if relaxed is None:
            return None
        placement = rounded(relaxed.shares, problem.home)
        return placement, float(problem.running_s(placement).max())


def selected(running_s: Floats, count: int) -> list[int]:
    """Return the ``count`` busiest replicas and as many of the least busy, in their order; all if there are no more.

    Of equally busy ones the first counts as busier.
    """
    order = np.argsort(-running_s, kind="stable").tolist()
    return sorted(order if len(order) <= 2 * count else order[:count] + order[-count:])


def _moves(problem: MigrationProblem, placement: Whole) -> tuple[RequestMove, ...]:
    pairs = zip(problem.requests, placement.tolist(), strict=True)
    return tuple(
        RequestMove(request.request_id, request.adapter, request.replica, problem.replicas[j])
        for request, j in pairs
        if request.replica != problem.replicas[j]
    )
