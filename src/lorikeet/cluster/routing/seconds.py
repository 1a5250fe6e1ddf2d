"""Routes a request to the replica where it adds the fewest seconds to all requests together."""

from collections.abc import Set
from typing import Any, Self

import numpy as np

from lorikeet.cluster.routing.affinity import MAX_PREFIXES, SentPrefixes
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least
from lorikeet.cluster.routing.fleet import Flags, Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import PolicySetup
from lorikeet.core.ids import ReplicaId
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts

COPY_TIMES = 3.0
"""Factor by which a load takes longer if the replica's machine has no copy of the adapter yet."""


class FewestSeconds(RoutingPolicy):
    """Chooses the replica where a request adds the fewest seconds: its own latency, and the delays of other requests.

    The request's latency consists of the prefills before it, the prefill of its prompt without the prefix that was sent
    to the replica before, and the decode steps of its answer. The load of its adapter overlaps the prefills before it,
    and evicts adapters that must be loaded again. Other requests wait for its prefill, and for one more sequence in
    each step of its answer. If the replica's memory is short, the request waits until the replica's requests have freed
    enough.

    Any open replica may be chosen, even if the table does not name it. Copies of an adapter follow its requests, and
    the pool deletes the copies that were unused for longest (``pool_share``).

    Padded kernels compute every row with the largest rank at the replica. So a small rank costs more beside large
    ranks, and the first large rank slows down all other requests.

    Source: TOPPINGS, Algorithm 1, for the sum over all requests. Prefixes, adapters and their loads are our additions.

    Args:
        costs: costs of a replica.
        form: form of the kernels of all replicas.
        max_prefixes: number of prefixes that are remembered.
    """

    wants_keys = True
    may_leave_table = True
    needs = frozenset({"learned_costs"})

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy with the costs from ``setup``."""
        return cls(setup.costs(), setup.preset.kernel_form, **parameters)

    def __init__(
        self,
        costs: ReplicaCosts,
        form: KernelForm = KernelForm.UNPADDED,
        max_prefixes: int = MAX_PREFIXES,
    ) -> None:
        self._costs = costs
        self._is_padded = form is KernelForm.PADDED
        self._prefixes = SentPrefixes(max_prefixes)
        self._changes = 0

    def learn(self, costs: ReplicaCosts) -> None:
        """Update the costs of a replica."""
        self._costs = costs

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the replica with the fewest added seconds.

        Among equals, a holder of the adapter is preferred, then the least loaded replica.
        """
        if self._changes != fleet.changes:
            self._prefixes.forget_gone(fleet)
            self._changes = fleet.changes
        if not len(fleet.open):
            return None
        is_warm = fleet.is_warm(request.adapter)
        seconds = self.seconds(request, fleet, is_warm, places.holders)
        index = least(fleet.open, seconds, ~is_warm, fleet.loads.requests)
        info = fleet.info(index)
        self._prefixes.add(request.keys, (info.replica, info.epoch))
        return Choice(info.replica, saved_s=float(seconds[fleet.open].mean() - seconds[index]))

    def seconds(self, request: RoutingRequest, fleet: Fleet, is_warm: Flags, holders: Set[ReplicaId] | None) -> Numbers:
        """Return, by replica, the seconds that a request adds.

        Args:
            request: the request to route.
            fleet: state of all replicas.
            is_warm: whether the request's adapter is on the device, by replica.
            holders: replicas whose machine has a copy of the adapter; None if all machines have one.
        """
        # The number of array operations is kept low: with 64 replicas each takes a microsecond, and a route may take
        # 100.
        costs = self._costs
        loads = fleet.loads
        rank = request.rank
        sequences = loads.requests
        steps = max(1, request.expected_tokens)
        some = np.maximum(sequences, 1.0)
        left = loads.decode_tokens / some
        ranks = loads.total_rank
        largest: Numbers | int = rank
        rows_rank: Numbers | int = rank  # growth of the work in a decode step
        if self._is_padded:
            ranks = loads.largest_rank * loads.rows
            largest = np.maximum(loads.largest_rank, rank)
            rows_rank = largest * (loads.rows + bool(rank)) - ranks
        added_s = costs.decode_s + costs.lora_decode_s * rows_rank
        step_s = costs.decode_s * sequences + (costs.step_s + added_s)
        if costs.lora_decode_s:
            step_s += costs.lora_decode_s * ranks
        step_s = np.maximum(step_s, step_s * some / loads.max_batch)  # beyond the largest batch, requests take turns
        before_s = costs.prefill_token_s * loads.prefill_tokens
        seconds = steps * step_s
        if request.adapter is not None:
            load_s = self._load_s(request, fleet, is_warm, holders)
            before_s = np.maximum(before_s, load_s)
            seconds += load_s  # displaced adapters must be loaded again
        seconds += before_s
        prefill_s = (costs.prefill_token_s + costs.lora_prefill_s * largest) * self._new_tokens(request, fleet)
        seconds += prefill_s
        seconds += sequences * (np.minimum(left, steps) * added_s + prefill_s)
        free_tokens = loads.free_tokens
        if free_tokens.min() < request.known_tokens + request.adapter_bytes * loads.tokens_per_byte.max():
            short = np.maximum(fleet.needed_tokens(request, is_warm) - free_tokens, 0.0)
            seconds += step_s * left * short / np.maximum(loads.held_tokens, 1.0)
        return seconds

    def _load_s(self, request: RoutingRequest, fleet: Fleet, is_warm: Flags, holders: Set[ReplicaId] | None) -> Numbers:
        load_s = self._costs.load_time_s(request.adapter_bytes)
        seconds = np.full(len(fleet), load_s)
        if holders is not None:
            seconds *= COPY_TIMES
            seconds[[fleet.open_index[each] for each in holders if each in fleet.open_index]] = load_s
        seconds[is_warm] = 0.0
        return seconds

    def _new_tokens(self, request: RoutingRequest, fleet: Fleet) -> Numbers | int:
        """Return, by replica, the number of tokens to prefill after the known prefix.

        The known prefix is the longest one that was sent to the replica. At least the last block counts as new.
        """
        matched = self._prefixes.match(request.keys)
        if not matched:
            return request.known_tokens
        new = np.full(len(fleet), float(request.known_tokens))
        block_tokens = request.known_tokens / (len(request.keys) + 1)
        for (replica, _), blocks in matched.items():
            if replica in fleet.open_index:
                new[fleet.open_index[replica]] -= blocks * block_tokens
        return new
