"""dLoRA's reactive mechanism: when a replica runs short, requests and adapters move together.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
section 5.2. What it leaves open: docs/decisions/comigration.md.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from lorikeet.cluster.comigration.ilp import rounded, solve_full, solve_relaxed
from lorikeet.cluster.comigration.problem import Floats, Problem, Whole
from lorikeet.cluster.comigration.state import CoMigrationSettings, Movable, Move, Outcome, Plan, ReplicaLoad
from lorikeet.core.ids import AdapterDigest


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
        requests: Sequence[Movable],
        adapter_bytes: Mapping[AdapterDigest, int],
    ) -> Plan:
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
            return Plan(Outcome.CALM)
        everywhere = Problem.of(replicas, requests, adapter_bytes, self._settings)
        chosen = [replicas[j] for j in selected(self._running_s(everywhere), self._settings.selected)]
        problem = Problem.of(chosen, requests, adapter_bytes, self._settings)
        if not problem.requests:
            return Plan(Outcome.NO_BETTER)
        before_s = float(self._running_s(problem).max())
        enough_s = before_s * (1 - self._settings.margin)
        if problem.least_s() >= enough_s:
            return Plan(Outcome.NO_BETTER, before_s=before_s, after_s=before_s)
        found = self._solve(problem)
        if found is None:
            return Plan(Outcome.UNSOLVED, before_s=before_s, after_s=before_s)
        placement, after_s = found
        moves = _moves(problem, placement)
        # Without moves there may still be a gain, in the full problem: of swaps, which each replica sees to itself.
        if not moves or after_s >= enough_s:
            return Plan(Outcome.NO_BETTER, before_s=before_s, after_s=before_s)
        return Plan(Outcome.PLANNED, moves, before_s, after_s)

    def _is_short(self, load: ReplicaLoad) -> bool:
        has_little = load.free_bytes < self._settings.free_share * load.device_bytes
        return has_little or load.queue_delay_s > self._settings.queue_delay_s

    def _running_s(self, problem: Problem) -> Floats:
        """Return how long each replica runs as things are."""
        if self._settings.full:
            return problem.running_with_swaps_s(problem.home, problem.on_host)
        return problem.running_s(problem.home)

    def _solve(self, problem: Problem) -> tuple[Whole, float] | None:
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


def _moves(problem: Problem, placement: Whole) -> tuple[Move, ...]:
    pairs = zip(problem.requests, placement.tolist(), strict=True)
    return tuple(
        Move(request.request_id, request.adapter, request.replica, problem.replicas[j])
        for request, j in pairs
        if request.replica != problem.replicas[j]
    )
