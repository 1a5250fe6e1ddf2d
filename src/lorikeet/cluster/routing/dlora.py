"""Dispatch by pending time (dLoRA, section 5.1)."""

import numpy as np

from lorikeet.cluster.routing.base import Router, least
from lorikeet.cluster.routing.fleet import Flags, Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId


class PendingTime(Router):
    """The least time until a request can run; of equals, those that have the adapter, then the one with the most room.

    It waits for its adapter to be loaded, if it is not there; for the queue, whose requests run ``max_batch`` at a time
    and each for the mean time of its adapter; and for bytes that must be moved out where memory is short. While nobody
    waits many are equal, and the paper's other wording decides: the replica with the most available resources (3).

    Any open replica may be chosen, whatever the table names: it says where adapters are loaded ahead of requests, and
    a burst has them loaded elsewhere, too.

    Args:
        load_s, load_bytes_per_s: an adapter of b bytes is loaded in ``load_s + b / load_bytes_per_s``.
    """

    def __init__(self, load_s: float = 0.0, load_bytes_per_s: float = 25e9) -> None:
        self._load_s = load_s
        self._load_bytes_per_s = load_bytes_per_s

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least."""
        if not len(fleet.open):
            return None
        is_warm = fleet.is_warm(asked.adapter)
        pending_s = self.pending_s(asked, fleet, is_warm)
        return fleet.info(least(fleet.open, pending_s, ~is_warm, -fleet.loads.free_tokens)).replica

    def pending_s(self, asked: RoutingRequest, fleet: Fleet, is_warm: Flags) -> Numbers:
        """Return by replica how long a request would wait; ``is_warm`` tells where its adapter is."""
        loads = fleet.loads
        load_s = ~is_warm * (self._load_s + asked.adapter_bytes / self._load_bytes_per_s)
        short_tokens = np.maximum(fleet.needed_tokens(asked, is_warm) - loads.free_tokens, 0.0)
        swap_s = short_tokens * loads.kv_token_bytes / self._load_bytes_per_s
        return load_s + loads.queued_s / loads.max_batch + swap_s
