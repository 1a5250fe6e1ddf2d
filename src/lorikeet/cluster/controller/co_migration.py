"""Runs co-migration in a live cluster: every second, requests move to replicas where they finish sooner.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024, section
5.2. For what the paper leaves open see docs/decisions/comigration.md.
"""

import asyncio
import time

import structlog

from lorikeet.cluster.build import MigrationCosts
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.migration.problem import MigrationPlan
from lorikeet.cluster.migration.review import CoMigration, ReviewInput, observe
from lorikeet.core.ids import RequestId

REVIEW_S = 1.0
"""Seconds from the end of a review to the next (docs/decisions/comigration.md)."""

log = structlog.get_logger("lorikeet")


class CoMigrationController:
    """Reviews the cluster regularly and carries out the plans.

    Args:
        client: client of the cluster.
        costs: costs of moving a request, and settings of the reviews.
        review_s: seconds from the end of a review to the start of the next.
    """

    def __init__(
        self,
        client: ClusterClient,
        costs: MigrationCosts,
        review_s: float = REVIEW_S,
    ) -> None:
        self._client = client
        self._costs = costs
        self._comigration = CoMigration(costs.settings)
        self._review_s = review_s
        self._moved_s: dict[RequestId, float] = {}

    async def run(self) -> None:
        """Review the cluster regularly. A failed review is logged and moves nothing."""
        while True:
            await asyncio.sleep(self._review_s)
            try:
                await self.review()
            except Exception:
                log.exception("co-migration review failed")

    async def review(self) -> MigrationPlan:
        """Review the cluster, carry out the plan, and return it.

        The plan is made on another thread, from a snapshot. If a request ends or moves during the planning, or its
        target leaves, its move is skipped.
        """
        fleet = self._client.fleet
        self._moved_s = {each: moved_s for each, moved_s in self._moved_s.items() if fleet.entry(each) is not None}
        sent_s = self._client.sent_s()
        (times, reserved_share, _) = self._costs
        observed = observe(fleet, sent_s, self._moved_s, times, time.monotonic(), reserved_share)
        plan = await asyncio.to_thread(self._comigration.review, *observed)
        if plan.moves:
            moved = self._move(plan, observed)
            log.info(
                "requests moved to other replicas",
                moved=moved,
                planned=len(plan.moves),
                before_s=plan.before_s,
                after_s=plan.after_s,
            )
        return plan

    def _move(self, plan: MigrationPlan, observed: ReviewInput) -> int:
        """Carry out a plan; return the number of moved requests."""
        requests = {request.request_id: request for request in observed.requests}
        fleet = self._client.fleet
        moved = 0
        for move in plan.moves:
            is_as_planned = fleet.where(move.request_id) == move.source and move.target in fleet.open_index
            request = requests[move.request_id]
            if is_as_planned and self._client.move(move.request_id, move.target, with_kv=request.transfers_kv):
                earlier_s = self._moved_s.get(move.request_id, 0.0)
                self._moved_s[move.request_id] = earlier_s + request.move_s
                moved += 1
        return moved
