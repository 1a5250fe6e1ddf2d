"""Routes requests by pending time (dLoRA, section 5.1)."""

from typing import Any, Self

import numpy as np

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least
from lorikeet.cluster.routing.fleet import Flags, Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import PolicySetup
from lorikeet.config import ConfigError
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.profile import ProfileError
from lorikeet.costs.transfer_model import LinkDirection, TransferModel


class PendingTime(RoutingPolicy):
    """Chooses the replica where a request can start soonest.

    Among equals, replicas that have the adapter are preferred, then the replica with the most free memory.

    The pending time is the sum of three parts: the load of the adapter, if it is not resident; the queue, whose
    requests run ``max_batch`` at a time, each for the mean time of its adapter; and swapping, if memory is short. While
    no request waits, many replicas are equal. In this case the paper's other wording decides: the replica with the most
    available resources (3).

    Any open replica may be chosen, even if the table does not name it. The table lists the replicas with preloaded
    adapters, and in a burst adapters are also loaded elsewhere.

    Args:
        load_s, load_bytes_per_s: fixed time and bandwidth of a load: an adapter of b bytes takes ``load_s + b /
            load_bytes_per_s``.
    """

    may_leave_table = True

    def __init__(self, load_s: float = 0.0, load_bytes_per_s: float = 25e9) -> None:
        self._load_s = load_s
        self._load_bytes_per_s = load_bytes_per_s

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy with the profile's link to the device, or without a profile with the costs of a replica."""
        if setup.profile is None:
            costs = setup.options.costs
            return cls(costs.load_s, costs.load_bytes_per_s, **parameters)
        try:
            link = TransferModel(setup.profile, 1, setup.options.link_bytes_per_s).link(LinkDirection.IN)
        except ProfileError as error:
            raise ConfigError(f"routing dlora: {error}") from error
        return cls(link.fixed.value, link.bandwidth.value, **parameters)

    def learn(self, costs: ReplicaCosts) -> None:
        """Update the time and bandwidth of loads."""
        self._load_s, self._load_bytes_per_s = costs.load_s, costs.load_bytes_per_s

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the replica with the least pending time."""
        if not len(fleet.open):
            return None
        is_warm = fleet.is_warm(request.adapter)
        pending_s = self.pending_s(request, fleet, is_warm)
        chosen = least(fleet.open, pending_s, ~is_warm, -fleet.loads.free_tokens)
        return Choice(fleet.info(chosen).replica)

    def pending_s(self, request: RoutingRequest, fleet: Fleet, is_warm: Flags) -> Numbers:
        """Return the seconds that a request would wait, by replica. ``is_warm`` marks the replicas with its adapter."""
        loads = fleet.loads
        load_s = ~is_warm * (self._load_s + request.adapter_bytes / self._load_bytes_per_s)
        short_tokens = np.maximum(fleet.needed_tokens(request, is_warm) - loads.free_tokens, 0.0)
        swap_s = short_tokens * loads.kv_token_bytes / self._load_bytes_per_s
        return load_s + loads.queued_s / loads.max_batch + swap_s
