"""Values adapters and KV in the host tier on one scale: seconds saved per block and second."""

from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.tree import NodeKind

_LEAST_AGE_S = 1e-3
"""Age in seconds that is assumed at least, since a node that was just used would have an infinite rate."""


class HostValues:
    """Values what the host tier holds.

    A host block of a node is worth the time that it saves when the node is requested again, times the rate of such
    requests, per block. The rate of an adapter is expected to be one request in the time since its last use. KV has the
    same rate times the share of its adapter's evicted KV that is reused, because most conversations end.

    An adapter saves the time by which its source is slower than the host, for the request that waits for it. KV saves
    the time by which computing it takes longer than loading it; a longer step delays all requests.

    Args:
        view: has prices and times of last use.
    """

    def __init__(self, view: MemoryView) -> None:
        self._view = view

    def known(self) -> bool:
        """Return whether reads from the source, copies from the host and steps were measured."""
        view = self._view
        return bool(view.prefill_s(1) and view.load_kv_alone_s(1) and view.reread_s(1))

    def of(self, node: int, now: float) -> float:
        """Return the value of a host block of a node in seconds per second; at least 0."""
        view = self._view
        age_s = max(_LEAST_AGE_S, now - float(view.tree.last_use_s[node]))
        if view.tree.kind[node] == NodeKind.ADAPTER:
            return view.reread_s(1) / age_s
        compute_s = view.prefill_s(1) * (1 + view.delay_per_lost_second(0))
        share = view.evicted_kv_share(int(view.tree.top[node]))
        return share * max(0.0, compute_s - view.load_kv_alone_s(1)) / age_s
