"""Implements BFS (ELORA §VIII-H), which evicts whole branches, an adapter with all its KV, by the sum of Eval."""

import numpy as np

from lorikeet.memory.policies.base import LOWEST, MemoryView
from lorikeet.memory.tree import NodeKind, Nodes, Scores
from lorikeet.papers.elora.cost_model import Elora, Factor


class Bfs(Elora):
    """Scores a node by the logarithm of the sum of Eval over its branch, including nodes on both tiers.

    LoRA_Eval is left out, because every branch includes its adapter, so Now is equal for all branches and cancels.
    """

    whole_branches = True
    whole_adapters = True

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view, without=Factor.LORA_EVAL)

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the branch sums of ``nodes``. Nodes of one branch have equal scores."""
        tree, end = self.view.tree, self.view.tree.end
        tops = tree.top[nodes]
        is_wanted = np.zeros(end, np.bool_)
        is_wanted[tops] = True
        members = np.flatnonzero(tree.kind[:end] >= NodeKind.ADAPTER)
        members = members[is_wanted[tree.top[members]]]
        each, branch = super().scores(members, now), tree.top[members]
        highest = np.full(end, LOWEST)
        np.maximum.at(highest, branch, each)
        sums = np.bincount(branch, weights=np.exp(each - highest[branch]), minlength=end)
        filled = np.flatnonzero(sums)
        highest[filled] += np.log(sums[filled])
        return highest[tops]
