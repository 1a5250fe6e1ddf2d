"""Rank-aware scheduling (TOPPINGS, section 5, Algorithm 1)."""

from math import inf
from typing import NamedTuple

from lorikeet.cluster.routing.base import PerformanceModel, Router, least, with_room
from lorikeet.cluster.routing.fleet import Flags, Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId


class ToppingsCosts(NamedTuple):
    """What a request would cost, by replica.

    Attributes:
        breaks_slo: a decode step with it would take longer than the SLO: the paper's infinite cost.
        cost: seconds that it adds to a token of each request, its own prefill spread over the tokens of an answer.
        requests: that are there.
        total: for all of these requests together.
    """

    breaks_slo: Flags
    cost: Numbers
    requests: Numbers
    total: Numbers


class Toppings(Router):
    """The replica where a request slows the others least, of those that keep the SLO with it.

    The order is by (breaks the SLO, total, cost, requests, index): a number instead of the paper's infinity, since an
    idle replica would multiply it by 0. Candidates have room for the request; if none has, it waits.

    Args:
        prefill: of the step that prefills all queued requests (PrePerf).
        decode: of the step that decodes all requests (DecPerf).
        slo_s: most time of a decode step.
        safety: by which it is divided, since prefills between decodes are not in the model; 1 is the paper.
    """

    def __init__(
        self, prefill: PerformanceModel, decode: PerformanceModel, slo_s: float = inf, safety: float = 1.0
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._slo_s = slo_s / safety

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least."""
        candidates = with_room(asked, fleet, self.candidates(asked, fleet))
        if not len(candidates):
            return None
        costs = self.costs(asked, fleet)
        return fleet.info(least(candidates, costs.breaks_slo, costs.total, costs.cost, costs.requests)).replica

    def costs(self, asked: RoutingRequest, fleet: Fleet) -> ToppingsCosts:
        """Return the costs of a request at each replica."""
        loads, rank = fleet.loads, asked.rank
        _, prefill_s = self._prefill.added_seconds(
            loads.queued, loads.queued_rows, loads.queued_largest_rank, loads.queued_total_rank, rank
        )
        after_s, decode_s = self._decode.added_seconds(
            loads.requests, loads.rows, loads.largest_rank, loads.total_rank, rank
        )
        spread = fleet.averages.output_tokens
        cost = prefill_s / spread + decode_s + self._prefill.token_s * asked.known_tokens / spread
        return ToppingsCosts(after_s > self._slo_s, cost, loads.requests, cost * loads.requests)
