"""Where the adapter is, or the KV of the prompt's beginning, unless that replica has too much to do."""

from math import ceil

import numpy as np

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.loads import Indices
from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.routing.prefixes import MOST_KEYS, Prefixes
from lorikeet.core.ids import ReplicaId

BOUND = 1.25
"""Times the mean number of requests that a replica may have and still be preferred."""
FREE_REQUESTS = 4
"""With so few requests a replica may always be preferred: sharing steps costs them little."""


def not_overloaded(candidates: Indices, fleet: Fleet, bound: float) -> Indices:
    """Return the candidates that one more request takes to at most ``bound`` times the mean of all, rounded up.

    There is always one: the least loaded has no more than the mean. Without the bound, a popular adapter would keep one
    replica overloaded; with it, as many come to hold the adapter as its load needs.

    Source: V. Mirrokni, M. Thorup and M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
    """
    requests = fleet.loads.requests[candidates]
    most = max(FREE_REQUESTS, ceil(bound * (requests.sum() + 1) / len(candidates)))
    there: Indices = candidates[requests < most]
    return there


class AdapterAffinity(Router):
    """A replica that has the adapter or is about to get it, if it is not overloaded; of these the least loaded.

    Args:
        bound: see :data:`BOUND`.
    """

    def __init__(self, bound: float = BOUND) -> None:
        self._bound = bound

    def route(self, asked: Asked, fleet: Fleet, now: float) -> ReplicaId | None:
        """Prefer holders."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        candidates = not_overloaded(candidates, fleet, self._bound)
        return fleet.info(least_loaded(candidates, fleet, ~fleet.is_warm(asked.adapter))).replica


class KvAffinity(Router):
    """The replica that was sent the longest prefix of the prompt, if it is not overloaded; else as by the adapter.

    Args:
        bound: see :data:`BOUND`.
        most_keys: prefixes that are remembered.
    """

    wants_keys = True

    def __init__(self, bound: float = BOUND, most_keys: int = MOST_KEYS) -> None:
        self._bound = bound
        self._prefixes = Prefixes(most_keys)
        self._changes = 0

    def route(self, asked: Asked, fleet: Fleet, now: float) -> ReplicaId | None:
        """Prefer whoever knows the longest prefix, then holders."""
        if self._changes != fleet.changes:
            self._forget_gone(fleet)
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        candidates = not_overloaded(candidates, fleet, self._bound)
        before = (*self._unknown_blocks(asked, fleet), ~fleet.is_warm(asked.adapter))
        info = fleet.info(least_loaded(candidates, fleet, *before))
        self._prefixes.add(asked.keys, (info.replica, info.epoch))
        return info.replica

    def _unknown_blocks(self, asked: Asked, fleet: Fleet) -> list[Indices]:
        """Return by replica minus the blocks of the prompt that it knows; no array if none knows any."""
        matched = self._prefixes.match(asked.keys)
        if not matched:
            return []
        unknown_blocks = np.zeros(len(fleet), np.intp)
        for (replica, _), blocks in matched.items():
            if replica in fleet.open_index:
                unknown_blocks[fleet.open_index[replica]] = -blocks
        return [unknown_blocks]

    def _forget_gone(self, fleet: Fleet) -> None:
        there = {(info.replica, info.epoch) for info in fleet.infos()}
        for home in self._prefixes.homes():
            if home not in there:
                self._prefixes.forget(home)
        self._changes = fleet.changes
