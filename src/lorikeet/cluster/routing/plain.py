"""Implements routing policies that ignore adapters: random, round robin, and least loaded."""

from collections import OrderedDict
from random import Random
from typing import Any, Self

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least_loaded
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import PolicySetup
from lorikeet.core.ids import AdapterDigest

_MAX_ADAPTERS = 65_536
"""Number of adapters whose turns are remembered; the least recently requested ones start again."""


class RandomChoice(RoutingPolicy):
    """Chooses a random candidate, each with the same probability."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy with the seed of the options."""
        return cls(setup.options.seed, **parameters)

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Draw a candidate."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        return Choice(fleet.info(int(self._random.choice(candidates))).replica)


class RoundRobin(RoutingPolicy):
    """Chooses one replica after the other. With a table, each adapter cycles through its replicas (dLoRA's RR)."""

    def __init__(self) -> None:
        self._turns = OrderedDict[AdapterDigest | None, int]()

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the next candidate."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        owner = None if places.table is None else request.adapter
        turn = self._turns.pop(owner, 0)
        self._turns[owner] = turn + 1
        if len(self._turns) > _MAX_ADAPTERS:
            self._turns.popitem(last=False)
        return Choice(fleet.info(int(candidates[turn % len(candidates)])).replica)


class LeastLoaded(RoutingPolicy):
    """Chooses the replica with the fewest requests, running and queued; among equals, the fewest tokens to compute."""

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the least loaded candidate."""
        candidates = self.candidates(request, fleet, places.table)
        return Choice(fleet.info(least_loaded(candidates, fleet)).replica) if len(candidates) else None
