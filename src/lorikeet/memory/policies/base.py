"""Defines the interfaces of the memory's policies.

An :class:`EvictionPolicy` scores nodes of the tree, and the memory evicts the lowest score first. A
:class:`PrefetchPolicy` names nodes to load to the device, best first. Policies read the :class:`MemoryView` and are
notified of events. Policies never change the memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lorikeet.core.guard import Guards
from lorikeet.memory.tree import DependencyTree, Nodes, NodeTransfer, Scores

LOWEST = float(np.finfo(np.float64).min)
"""Replaces a score of minus infinity, which would become NaN when an infinite offset is added."""

MIN_REUSED_SHARE = 0.05
"""KV of an adapter is evicted first, and is not copied to the host, if a smaller share of it is reused."""

_Number = TypeVar("_Number", bound=np.generic)


class StepForecast(Protocol):
    """Predicts steps and delays for the memory's policies."""

    @property
    def least_step_s(self) -> float:
        """Expected seconds of a step with one token; 0 if unknown."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Return the expected seconds by which this many prompt tokens lengthen a step; 0 if unknown."""
        ...

    def delay_per_lost_second(self, excluded: int = 0) -> float:
        """Return the total seconds by which all requests are delayed if the engine loses a second.

        Args:
            excluded: number of waiting requests to leave out.
        """
        ...


@dataclass
class MemoryView:
    """Holds the memory's state that policies may read. The memory updates the view.

    All functions of the view are set before a policy is created, so a policy may store them.

    Attributes:
        tree: all nodes.
        device_blocks: size of the device arena, in blocks.
        queued: number of requests in the admission queue.
        waiting: adapter nodes of the queued requests, in queue order, with the number of requests for each; updated
            only if a policy sets ``follows_queue``.
        resident_adapters: returns the current number of adapters on the device or in flight to it.
        load_s: returns the expected seconds to load each of the given adapters; 0 if unknown.
        iteration_s: duration of the last step in seconds; 0 if unknown.
        load_kv_s: returns the expected seconds until so many blocks of KV are copied from the host; 0 if unknown.
        load_kv_alone_s: returns the same for a later time, at which no other copies are in flight.
        store_kv_s: returns the expected seconds until this many blocks of KV are copied to the host; 0 if unknown.
        store_kv_alone_s: returns the same for a later time, at which no other copies are in flight.
        reread_s: returns the expected seconds by which loading this many blocks of an adapter takes longer from its
            source than from the host; 0 if unknown.
        prefill_s: returns the expected seconds that computing this many blocks of KV adds to a step; 0 if unknown.
        delay_per_lost_second: returns the total seconds by which all requests are delayed if the engine loses a second;
            see :class:`StepForecast`.
        kv_reuse: returns the share of each adapter's KV that is expected to be reused if it stays on the device, given
            the adapters' nodes.
        kv_share: returns the same share of one adapter, given its node.
        evicted_kv_share: returns the share of its KV that is expected to be reused after it left the device.
        guards: the engine's guards; see ``core.guard``.
    """

    tree: DependencyTree
    device_blocks: int
    queued: int = 0
    waiting: Mapping[int, int] = field(default_factory=dict)
    resident_adapters: Callable[[], int] = lambda: 0
    load_s: Callable[[Nodes], Scores] = lambda nodes: np.zeros(len(nodes))
    iteration_s: float = 0.0
    load_kv_s: Callable[[int], float] = lambda blocks: 0.0
    load_kv_alone_s: Callable[[int], float] = lambda blocks: 0.0
    store_kv_s: Callable[[int], float] = lambda blocks: 0.0
    store_kv_alone_s: Callable[[int], float] = lambda blocks: 0.0
    reread_s: Callable[[int], float] = lambda blocks: 0.0
    prefill_s: Callable[[int], float] = lambda blocks: 0.0
    delay_per_lost_second: Callable[[int], float] = lambda excluded: 0.0
    kv_reuse: Callable[[Nodes], Scores] = lambda tops: np.ones(len(tops))
    kv_share: Callable[[int], float] = lambda top: 1.0
    evicted_kv_share: Callable[[int], float] = lambda top: 1.0
    guards: Guards = field(default_factory=Guards)

    def loading_kv_pays(self, blocks: int, needed: int = 0, *, is_waiting: bool = False) -> bool:
        """Return whether loading blocks of KV from the host is expected to cost less time than computing them.

        A load delays the request that waits for it. While the load holds blocks, it also delays queued requests that
        need blocks. A longer step delays all requests.

        Args:
            blocks: number of blocks to load or to compute.
            needed: number of all blocks that the request needs on the device.
            is_waiting: whether the request is queued now, so that it is one of the queued requests.
        """
        if not self.prefill_s(blocks):
            return True
        load_s = self.load_kv_cost_s(blocks, needed, is_waiting=is_waiting)
        return load_s <= self.compute_kv_cost_s(blocks, is_waiting=is_waiting)

    def load_kv_cost_s(self, blocks: int, needed: int = 0, *, is_waiting: bool = False) -> float:
        """Return by how many seconds a load of KV delays all requests; see :meth:`loading_kv_pays`."""
        kept_share = max(blocks, needed) / self.device_blocks
        return self.load_kv_s(blocks) * (1 + max(0, self.queued - is_waiting) * kept_share)

    def compute_kv_cost_s(self, blocks: int, *, is_waiting: bool = False) -> float:
        """Return by how many seconds computing KV delays all requests; see :meth:`loading_kv_pays`."""
        return self.prefill_s(blocks) * (1 + self.delay_per_lost_second(int(is_waiting)))

    def waiting_for_a_copy_pays(self, blocks: int, reused_share: float) -> bool:
        """Return whether KV should be copied to the host before its eviction, although requests wait for its blocks.

        The wait delays the request that needs the blocks, and the requests queued behind it. Without a copy, reused KV
        must be computed again, in a longer step that delays all requests. With a copy, it is loaded at a later time, so
        the copies that are in flight now do not delay it.

        Args:
            blocks: number of blocks to copy.
            reused_share: share of the blocks that is expected to be reused.
        """
        prefill_s = self.prefill_s(blocks)
        if not prefill_s:
            return True
        saved_s = reused_share * (prefill_s - self.load_kv_alone_s(blocks))
        return self.store_kv_s(blocks) * (1 + self.queued) <= saved_s * (1 + self.delay_per_lost_second(0))

    def losing_copies_pays(self, lost_share: float) -> bool:
        """Return whether to drop host copies of KV on the device, to keep KV that is nowhere else.

        KV whose copy was dropped is copied again at its eviction. KV that leaves its last tier is computed again if it
        is reused, in a longer step that delays all requests. Without measurements, copies stay.

        Args:
            lost_share: share of the KV that left its last tier and was requested again.
        """
        saved_s = lost_share * (self.prefill_s(1) - self.load_kv_alone_s(1))
        return self.store_kv_alone_s(1) < saved_s * (1 + self.delay_per_lost_second(0))


class EvictionPolicy:
    """Scores nodes; the node with the lowest score is evicted first. Subclasses override the methods that they need.

    Args:
        view: the state of the memory.

    Attributes:
        rescored_at_eviction: whether scores of adapters depend on the other resident nodes. If so, all adapters are
            scored again before every eviction. If not, the scores of the last tick are used, updated for nodes that
            were used since then.
        whole_branches: whether the eviction of a node also evicts all evictable nodes of its branch (the nodes with the
            same ``top``).
        deeper_first: whether the deeper of two nodes with equal scores is evicted first, and KV of one branch with
            equal scores together. If not, nodes are evicted one at a time, the lower index first.
        proposals: number of lowest-scored nodes that are passed to :meth:`choose`. With 1, the lowest-scored node is
            evicted.
        evictable_below: score below which adapters may be evicted for prefetches that queued requests need.
        worthless_below: score below which nodes are evicted for any prefetch, if evicted blocks become free
            immediately.
        follows_queue: whether the policy reads ``view.waiting``.
    """

    rescored_at_eviction = False
    whole_branches = False
    deeper_first = True
    proposals = 1
    evictable_below = -np.inf
    worthless_below = -np.inf
    follows_queue = False

    def __init__(self, view: MemoryView) -> None:
        self.view = view

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return a finite score for each node.

        ``deeper_first`` breaks ties. The score of the base model's node is ignored.
        """
        raise NotImplementedError

    def scores_changed(self) -> bool:
        """Return whether scores may have changed since the last call, other than those of nodes that were used.

        A tick of the swapper then scores all nodes again.
        """
        return True

    def adapter_offset(self, now: float) -> float:
        """Return the number to add to adapters' scores before they are compared with scores of KV for eviction."""
        return 0.0

    def prefetch_adapter_offset(self, now: float) -> float:
        """Return the number to add to adapters' scores before they are compared with scores of KV for prefetch."""
        return 0.0

    def choose(self, nodes: Sequence[int], now: float) -> int:
        """Choose one of the proposed nodes to evict. ``nodes`` are in order of score, the lowest first."""
        return nodes[0]

    def protect(self, adapter: int, until_s: float) -> None:
        """Handle a prefetch policy's request to keep an adapter until ``until_s``.

        By default, the request is ignored.
        """

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Handle the arrival of a request for ``adapter`` that matches ``path``.

        Visits and last use are already updated.
        """

    def admitted(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Handle the admission of a request."""

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Handle adapters or KV that have arrived on the device, earlier KV first."""

    def removed(self, nodes: Sequence[int], now: float) -> None:
        """Handle the eviction of nodes from the device, in this order."""

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Handle the removal of nodes from the tree. The nodes' indices may be reused."""

    def batch(self, running: int, now: float) -> None:
        """Handle a change of the number of sequences that hold blocks."""


class PrefetchPolicy:
    """Names nodes to load to the device. Subclasses override :meth:`targets`.

    Args:
        view: the state of the memory.
        eviction: eviction policy of the same preset.

    Attributes:
        below_watermark_only: whether prefetches use the device only up to a share of ``swapper.PREFETCH_BELOW``. If
            not, prefetches may use all free memory.
        follows_queue: whether the policy reads ``view.waiting``.
    """

    below_watermark_only = True
    follows_queue = False

    def __init__(self, view: MemoryView, eviction: EvictionPolicy) -> None:
        self.view = view
        self.eviction = eviction

    def targets(self, now: float) -> Iterator[int]:
        """Yield nodes to load, best first: KV on the host, and adapters on the host or at their source.

        A KV node may be yielded only if its parent is on the device, in flight to it, or was yielded before (any node
        in presets without ``dependency_tree``). The swapper skips nodes that cannot be moved now, and starts or skips
        each adapter before it reads the next node. If ``below_watermark_only``, the scores in ``tree.score`` are up to
        date.
        """
        return iter(())

    def due_s(self, now: float) -> float:
        """Return the next time at which :meth:`targets` yields more nodes without an event.

        Return ``inf`` if there is none.
        """
        return float("inf")

    def evicts_below(self, node: int) -> float:
        """Return the score below which adapters may be evicted to load ``node``; ``-inf`` if none may be evicted."""
        return -np.inf

    def arrived(self, adapter: int, now: float) -> None:
        """Handle the arrival of a request for ``adapter``, before any load for the request."""

    def fetched(self, node: int, now: float) -> None:
        """Handle the start of a prefetch that the policy named."""

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Handle the removal of nodes from the tree. The nodes' indices may be reused."""


def is_prefetchable(tree: DependencyTree, node: int) -> bool:
    """Return whether a node could be loaded to the device: it is off the device and in no transfer."""
    entry = tree.adapters.get(node)
    if entry is not None and entry.retired:
        return False
    return not tree.on_device[node] and not tree.moving[node] and (entry is not None or bool(tree.on_host[node]))


def stays_on_device(
    tree: DependencyTree, nodes: npt.NDArray[np.int64] | npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Return whether each node is on the device without being evicted, or is in flight to the device."""
    moving = tree.moving[nodes]
    staying: npt.NDArray[np.bool_] = (tree.on_device[nodes] & (moving != NodeTransfer.OUT)) | (
        moving == NodeTransfer.IN
    )
    return staying


def extend_to_nodes(values: npt.NDArray[_Number], tree: DependencyTree, empty: Any) -> npt.NDArray[_Number]:
    """Extend an array indexed by node with ``empty`` to the size of the tree."""
    missing = len(tree.kind) - len(values)
    return np.concatenate([values, np.full(missing, empty, values.dtype)]) if missing > 0 else values
