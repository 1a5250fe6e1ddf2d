"""Who may leave a tier, and who leaves it first."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lorikeet.memory.tree import Kind, Moving, Nodes, Tree
from lorikeet.memory.victims import Victims

At = int | slice | Nodes
"""One node or several; what is asked about them is a bool, or an array of them."""
Below = int | npt.NDArray[np.bool_]
"""How many nodes are to be below each: 0, as a rule."""


class Leaving:
    """See the module.

    Args:
        tree: has everybody's score: the lowest leaves first.
        may_leave: whether nodes may, with so many below them.
    """

    def __init__(self, tree: Tree, may_leave: Callable[[At, Below], Any]) -> None:
        self._tree = tree
        self._may_leave = may_leave
        self._queues = {
            kind: Victims(tree, partial(self.candidates, kind), self.allows) for kind in (Kind.KV, Kind.ADAPTER)
        }

    def allows(self, at: At) -> Any:
        """Whether nodes may leave."""
        return self._may_leave(at, 0)

    def candidates(self, kind: int) -> Nodes:
        """Return all of a kind that may leave."""
        every = slice(self._tree.end)
        return np.flatnonzero((self._tree.kind[every] == kind) & self.allows(every))

    def offer(self, node: int) -> None:
        """A node may have become one that can leave, or its score has changed."""
        kind = int(self._tree.kind[node])
        if kind in self._queues:
            self._queues[kind].offer(node)

    def forget(self, kind: int) -> None:
        """All scores of a kind have changed."""
        self._queues[kind].forget()

    def first(self, kind: int, count: int) -> list[int]:
        """Return up to ``count`` of a kind that leave first, the very first first."""
        return self._queues[kind].first(count)

    def run(self, node: int, most: int) -> list[int]:
        """Return KV that leaves first, with what it was last used together with: its equals by score before it.

        Args:
            node: who leaves first of all that may.
            most: nodes.

        Returns:
            KV of one branch, later KV first; each may leave when the one below it has.
        """
        tree, run = self._tree, [node]
        parent, kind = tree.parent.item, tree.kind.item
        while len(run) < most and kind(above := parent(run[-1])) == Kind.KV:
            run.append(above)
        at = np.asarray(run)
        leaves = (self._may_leave(at, np.arange(len(at)) > 0) & (tree.score[at] == tree.score[node])).tolist()
        return run[: leaves.index(False)] if False in leaves else run

    def overlooked(self) -> list[int]:
        """Return nodes that may leave and that nobody would ask to; for checks."""
        return [node for queue in self._queues.values() for node in queue.missing()]


def leaving_device(tree: Tree, *, dependent: bool) -> Leaving:
    """Return who may leave the device: who rests there unneeded; where KV depends on what is above it, leaves only."""

    def may_leave(at: At, below: Below) -> Any:
        may = tree.on_device[at] & (tree.moving[at] == Moving.NO) & (tree.pins[at] == 0) & (tree.kind[at] != Kind.BASE)
        return may & (tree.children_on_device[at] == below) if dependent else may

    return Leaving(tree, may_leave)


def leaving_host(tree: Tree) -> Leaving:
    """Return who may leave the host: who rests there unneeded, and of KV only what nothing is below."""

    def may_leave(at: At, below: Below) -> Any:
        may = tree.on_host[at] & (tree.moving[at] == Moving.NO) & (tree.pins[at] == 0)
        return may & ((tree.kind[at] == Kind.ADAPTER) | (tree.children[at] == below))

    return Leaving(tree, may_leave)


def is_nowhere(tree: Tree, at: At) -> Any:
    """Whether nodes are KV that nobody needs and whose bytes are nowhere."""
    somewhere = tree.on_device[at] | tree.on_host[at] | (tree.moving[at] != Moving.NO) | (tree.pins[at] > 0)
    return (tree.kind[at] == Kind.KV) & ~somewhere


def host_blocks_at_rest(tree: Tree) -> int:
    """Return the host blocks of all who rest there unneeded, KV with what is below it and adapters."""
    every = slice(tree.end)
    rests = tree.on_host[every] & (tree.moving[every] == Moving.NO) & (tree.pins[every] == 0)
    adapters = np.flatnonzero(rests & (tree.kind[every] == Kind.ADAPTER)).tolist()
    kv = int((rests & (tree.kind[every] == Kind.KV)).sum())
    return kv + sum(len(tree.adapters[node].host_blocks) for node in adapters)
