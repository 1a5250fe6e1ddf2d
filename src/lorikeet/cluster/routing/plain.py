"""Policies that look at no adapters: random, round robin, least loaded, fewest tokens, first fit."""

from collections import OrderedDict
from random import Random

from lorikeet.cluster.routing.base import LeastCost, Router, least_loaded, with_room
from lorikeet.cluster.routing.fleet import Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import AdapterDigest, ReplicaId

_MOST_ADAPTERS = 65_536
"""Whose turns are remembered; of more, those that were not asked for for longest begin anew."""


class RandomChoice(Router):
    """Any of them, each with the same probability."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Draw."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        return fleet.info(int(self._random.choice(candidates))).replica


class RoundRobin(Router):
    """One after the other; by a table, every adapter goes round its own replicas (the baseline RR of dLoRA)."""

    def __init__(self) -> None:
        self._turns = OrderedDict[AdapterDigest | None, int]()

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the next."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        owner = None if self.table is None else asked.adapter
        turn = self._turns.pop(owner, 0)
        self._turns[owner] = turn + 1
        if len(self._turns) > _MOST_ADAPTERS:
            self._turns.popitem(last=False)
        return fleet.info(int(candidates[turn % len(candidates)])).replica


class LeastLoaded(Router):
    """The fewest requests, running and queued; of these the fewest tokens to compute."""

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least."""
        candidates = self.candidates(asked, fleet)
        return fleet.info(least_loaded(candidates, fleet)).replica if len(candidates) else None


class FewestTokens(LeastCost):
    """The fewest tokens to prefill and to decode; of equals the first. Knows no ranks."""

    def costs(self, asked: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the tokens."""
        return fleet.loads.pending_tokens


class FirstFit(Router):
    """The first with a place in its batch and room for the request's KV and adapter; nobody has: it waits.

    Source: the baseline of TOPPINGS (section 7.5), as Punica schedules.
    """

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the first that fits."""
        candidates = self.candidates(asked, fleet)
        has_place = fleet.loads.requests < fleet.loads.max_batch
        fitting = with_room(asked, fleet, candidates[has_place[candidates]])
        return fleet.info(int(fitting[0])).replica if len(fitting) else None
