"""Routes a request to where it costs all requests together the fewest seconds."""

import numpy as np

from lorikeet.cluster.routing.affinity import MAX_PREFIXES, SentPrefixes
from lorikeet.cluster.routing.base import Router, least
from lorikeet.cluster.routing.fleet import Flags, Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts

COPY_TIMES = 3.0
"""How much longer an adapter takes of which the replica's machine has no copy yet."""


class FewestSeconds(Router):
    """Chooses the replica where a request adds the fewest seconds: its own until its end, and those that others lose.

    Its own are the prompts before it, its prompt without the prefix that was sent there before, and the steps of its
    answer in the batch there. Loading its adapter runs beside the prompts before it, and displaces what must be
    loaded again. Others wait for its prompt, and for one more sequence in each step of its answer. If the replica's
    memory is short, it waits for as long as the requests there need to free as much.

    Any open replica may be chosen, whatever the table names: where requests are sent decides where copies of their
    adapter are, and the pool deletes those that were unused for longest (``pool_share``).

    Source: the sum over all requests is that of TOPPINGS, Algorithm 1; a prefix, an adapter and their loads are
    counted in the same seconds.

    Args:
        costs: of a replica.
        max_prefixes: number of prefixes that are remembered.

    Attributes:
        saved_s: by how much the last choice was cheaper than the mean of all open replicas.
    """

    wants_keys = True

    def __init__(self, costs: ReplicaCosts, max_prefixes: int = MAX_PREFIXES) -> None:
        self._costs = costs
        self._prefixes = SentPrefixes(max_prefixes)
        self._changes = 0
        self.saved_s = 0.0

    def learn(self, costs: ReplicaCosts) -> None:
        """Decide by other costs from now on."""
        self._costs = costs

    def route(self, request: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Choose the replica with the fewest added seconds; of equals a holder, then the least loaded."""
        if self._changes != fleet.changes:
            self._prefixes.forget_gone(fleet)
            self._changes = fleet.changes
        if not len(fleet.open):
            return None
        is_warm = fleet.is_warm(request.adapter)
        seconds = self.seconds(request, fleet, is_warm)
        index = least(fleet.open, seconds, ~is_warm, fleet.loads.requests)
        self.saved_s = float(seconds[fleet.open].mean() - seconds[index])
        info = fleet.info(index)
        self._prefixes.add(request.keys, (info.replica, info.epoch))
        return info.replica

    def seconds(self, request: RoutingRequest, fleet: Fleet, is_warm: Flags) -> Numbers:
        """Return by replica the seconds that a request adds; ``is_warm`` says where its adapter is on the device."""
        costs, loads, rank = self._costs, fleet.loads, request.rank
        sequences, steps = loads.requests, max(1, request.expected_tokens)
        some = np.maximum(sequences, 1.0)
        tokens = request.known_tokens - self._known_tokens(request, fleet)
        prefill_s = (costs.prefill_token_s + costs.lora_prefill_s * rank) * tokens
        load_s = self._load_s(request, fleet, is_warm)
        added_s = costs.decode_s + costs.lora_decode_s * rank
        step_s = costs.step_s + costs.decode_s * sequences + costs.lora_decode_s * loads.total_rank + added_s
        step_s *= np.maximum(1.0, (sequences + 1) / loads.max_batch)  # beyond the largest batch they take turns
        left = loads.decode_tokens / some
        short = np.maximum(fleet.needed_tokens(request, is_warm) - loads.free_tokens, 0.0)
        freed_s = step_s * left * short / np.maximum(loads.held_tokens, 1.0)
        own_s = np.maximum(costs.prefill_token_s * loads.prefill_tokens, load_s) + prefill_s + steps * step_s + freed_s
        # What the adapter displaces must be loaded again.
        result: Numbers = own_s + load_s + sequences * (prefill_s + np.minimum(steps, left) * added_s)
        return result

    def _load_s(self, request: RoutingRequest, fleet: Fleet, is_warm: Flags) -> Numbers:
        if request.adapter is None:
            return np.zeros(len(fleet))
        load_s = self._costs.load_time_s(request.adapter_bytes)
        seconds = np.full(len(fleet), load_s)
        if self.holders is not None:
            held = self.holders(request.adapter)
            seconds *= COPY_TIMES
            seconds[[fleet.open_index[each] for each in held if each in fleet.open_index]] = load_s
        seconds[is_warm] = 0.0
        return seconds

    def _known_tokens(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return by replica the tokens of the longest prefix that was sent there. The last block is always computed."""
        known, block_tokens = np.zeros(len(fleet)), request.known_tokens / (len(request.keys) + 1)
        for (replica, _), blocks in self._prefixes.match(request.keys).items():
            if replica in fleet.open_index:
                known[fleet.open_index[replica]] = blocks * block_tokens
        return known
