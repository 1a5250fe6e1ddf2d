"""What a policy of the memory is: it looks at the tree, is told what happens, and says what it thinks.

Policies change nothing. The memory asks an :class:`EvictionPolicy` for scores and moves nodes in their order; a
:class:`PrefetchPolicy` names nodes to bring to the device, best first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lorikeet.memory.tree import DependencyTree, Nodes, NodeTransfer, Scores

LOWEST = float(np.finfo(np.float64).min)
"""Stands for a score of minus infinity, which would be no number any more with an infinite offset added."""

_Number = TypeVar("_Number", bound=np.generic)


@dataclass
class MemoryView:
    """What policies may look at. The memory keeps it up to date; they only read.

    Attributes:
        tree: all nodes.
        device_blocks: size of the device arena.
        queued: requests in the admission queue.
        waiting: their adapters, in its order, with how many requests want each; kept up to date where a policy follows
            the queue.
        resident_adapters: returns the number of adapters on the device or on their way to it, at this moment: it
            changes with every single move.
        load_s: predicted seconds until each of some adapters could be used if it was loaded now; 0 where nobody knows.
        iteration_s: what a step takes at present; 0 where nobody knows.
    """

    tree: DependencyTree
    device_blocks: int
    queued: int = 0
    waiting: Mapping[int, int] = field(default_factory=dict)
    resident_adapters: Callable[[], int] = lambda: 0
    load_s: Callable[[Nodes], Scores] = lambda nodes: np.zeros(len(nodes))
    iteration_s: float = 0.0


class EvictionPolicy:
    """Scores nodes: the lowest leaves first. Subclasses override what they need.

    Args:
        view: what there is to see.

    Attributes:
        rescored_at_eviction: scores depend on who else is resident, and are asked for anew before every eviction
            (of the adapters only); else those of the last tick count, renewed for nodes that were used since.
        whole_branches: when a node leaves, what may leave of its branch (all nodes of the same ``top``) leaves too.
        proposals: so many of the lowest are put before :meth:`choose`; with 1 the lowest leaves.
        dispensable_below: adapters that score less may make room for what the queue wants before its turn has come.
        follows_queue: it looks at ``view.waiting``.
    """

    rescored_at_eviction = False
    whole_branches = False
    proposals = 1
    dispensable_below = -np.inf
    follows_queue = False

    def __init__(self, view: MemoryView) -> None:
        self.view = view

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return a finite score for each of ``nodes``; a node of a tie that lies deeper leaves first.

        What is returned for the base's node is never looked at.
        """
        raise NotImplementedError

    def adapter_offset(self, now: float) -> float:
        """Return what is added to the scores of adapters when they are compared with those of KV for eviction."""
        return 0.0

    def adapter_offset_in(self, now: float) -> float:
        """Return what is added to the scores of adapters when they are compared with those of KV for prefetching."""
        return 0.0

    def choose(self, nodes: Sequence[int], now: float) -> int:
        """Return which of the proposed nodes leaves, the lowest score first among them; the others stay."""
        return nodes[0]

    def protect(self, adapter: int, until_s: float) -> None:
        """A prefetch asks that an adapter be kept until then. What that means, if anything, is the policy's."""

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """A request arrived for ``adapter`` and matched ``path``; visits and last uses are noted already."""

    def admitted(self, adapter: int, path: Sequence[int], now: float) -> None:
        """A request received its blocks."""

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Adapters or KV came to the device that were not there before; earlier KV first."""

    def removed(self, nodes: Sequence[int], now: float) -> None:
        """Nodes left the device, in this order."""

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Nodes were taken out of the tree; their indices may stand for others later."""

    def batch(self, running: int, now: float) -> None:
        """From now on so many sequences hold blocks."""


class PrefetchPolicy:
    """Names what should be on the device. Subclasses override :meth:`targets`.

    Args:
        view: what there is to see.
        eviction: of the same row.

    Attributes:
        fills: bring nodes only while less than the row's ``prefetch_below`` of the device is in use, and up to it.
            Else any free memory is used.
        follows_queue: it looks at ``view.waiting``.
    """

    fills = True
    follows_queue = False

    def __init__(self, view: MemoryView, eviction: EvictionPolicy) -> None:
        self.view = view
        self.eviction = eviction

    def targets(self, now: float) -> Iterator[int]:
        """Yield nodes on the host (adapters also from their source), best first.

        A node of KV may be named only when its parent is on the device, on its way there, or has been named before
        (rows without the tree rule: any). Nodes that cannot be moved now are passed over by whoever asks, one by
        one: an adapter is on its way, or passed over, before the next node is asked for. Where a row ``fills``, the
        eviction policy's scores in ``tree.score`` are those of this moment.
        """
        return iter(())

    def due_s(self, now: float) -> float:
        """Return when :meth:`targets` will name more though nothing has happened; ``inf`` if never."""
        return float("inf")

    def evicts_below(self, node: int) -> float:
        """Return below which score adapters may be evicted to make room for ``node``; -inf: nobody may."""
        return -np.inf

    def arrived(self, adapter: int, now: float) -> None:
        """A request arrived for ``adapter``; nothing has been loaded for it yet."""

    def fetched(self, node: int, now: float) -> None:
        """A node that it named is being brought."""

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Nodes were taken out of the tree; their indices may stand for others later."""


def is_prefetchable(tree: DependencyTree, node: int) -> bool:
    """Whether a node's bytes are off the device, at rest, and could be brought to it."""
    entry = tree.adapters.get(node)
    if entry is not None and entry.retired:
        return False
    return not tree.on_device[node] and not tree.moving[node] and (entry is not None or bool(tree.on_host[node]))


def stays(tree: DependencyTree, nodes: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return which nodes are on the device and not about to leave it, or are on their way to it."""
    moving = tree.moving[nodes]
    there: npt.NDArray[np.bool_] = (tree.on_device[nodes] & (moving != NodeTransfer.OUT)) | (moving == NodeTransfer.IN)
    return there


def by_node(values: npt.NDArray[_Number], tree: DependencyTree, empty: Any) -> npt.NDArray[_Number]:
    """Return a policy's own array by node, lengthened with ``empty`` if the tree has grown."""
    missing = len(tree.kind) - len(values)
    return np.concatenate([values, np.full(missing, empty, values.dtype)]) if missing > 0 else values
