"""Implements ELORA's cost model (§VI): the saving of keeping a node, and the required number of resident adapters.

    Eval = LoRA_Eval * cost * visit * (1 - sigmoid(t))                                               (Eq. 5, 6)
    LoRA_Eval = min(1, Now / Low)                                                                    (Eq. 4)
    Low = sum over adapters of 1 - (1 - prob)^BS                                                     (Eq. 3)

By the letter of the paper, t is in seconds, and a node is one block of an adapter or of KV (§V-A), so that cost is
equal for all nodes. Only the order matters, so scores are logarithms of Eval. In float64, 1 - sigmoid(t) is 0 from an
age of 37 seconds on, but its logarithm still distinguishes old nodes from older nodes. See
docs/decisions/memory-policies.md for open points of the paper and our decisions.
"""

import math
from collections import deque
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import LOWEST, EvictionPolicy, MemoryView
from lorikeet.memory.tree import BASE, NodeKind, Nodes, Scores

BATCH_WINDOW_S = 5.0
"""Window of the mean batch size BS (§VI-A)."""
_CHUNK_NODES = 8192
"""Number of nodes scored at a time, so that intermediate arrays stay in the processor's cache."""


class Factor(StrEnum):
    """Names the factors of Eval, for ablations (§VIII-G)."""

    LORA_EVAL = "LoRA_Eval"
    VISIT = "visit"
    RECENCY = "recency"


def required_adapters(prob: npt.NDArray[np.float64], batch: float) -> float:
    """Return the expected number of different adapters in a batch (Eq. 3).

    Args:
        prob: share of requests that use each adapter.
        batch: number of requests in the batch; may be fractional.
    """
    return float(np.sum(1 - (1 - prob) ** batch))


def quantity_coefficient(resident: float, required: float) -> float:
    """Return LoRA_Eval for ``resident`` adapters on the device after a move (Eq. 4); 1 if no adapter is required."""
    return min(1.0, resident / required) if required > 0 else 1.0


class WindowMean:
    """Averages a piecewise constant number over time, over the last ``window_s`` seconds or since its first value."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._steps: deque[tuple[float, float, float]] = deque()  # time, integral up to it, value since

    def set(self, value: float, now: float) -> None:
        """Set the value from ``now`` on."""
        if self._steps and self._steps[-1][2] == value:
            return
        self._steps.append((now, self._integral(now), value))
        self._forget(now)

    def mean(self, now: float) -> float:
        """Return the mean up to ``now``; 0 before the first value."""
        if not self._steps:
            return 0.0
        self._forget(now)
        time, integral, value = self._steps[0]
        begin = max(now - self._window_s, time)
        if now <= begin:
            return self._steps[-1][2]
        return (self._integral(now) - integral - value * (begin - time)) / (now - begin)

    @property
    def last(self) -> float:
        """Current value; 0 before the first value."""
        return self._steps[-1][2] if self._steps else 0.0

    def _forget(self, now: float) -> None:
        while len(self._steps) > 1 and self._steps[1][0] <= now - self._window_s:
            self._steps.popleft()

    def _integral(self, now: float) -> float:
        if not self._steps:
            return 0.0
        time, integral, value = self._steps[-1]
        return integral + value * (now - time)


class Elora(EvictionPolicy):
    """Scores nodes by the logarithm of ELORA's Eval.

    LoRA_Eval has one value for all adapters and one value for all KV. So it is the offset between the two kinds and not
    a part of the scores. Scores stay valid when the number of resident adapters changes.

    Args:
        view: the state of the memory.
        without: a factor to leave out.

    Attributes:
        tau_s: unit of the age t, in seconds.
        whole_adapters: whether an adapter is one node, whose cost covers all its blocks.
    """

    tau_s = 1.0
    whole_adapters = False

    def __init__(self, view: MemoryView, *, without: Factor | None = None) -> None:
        super().__init__(view)
        self._without = without
        self._batch = WindowMean(BATCH_WINDOW_S)
        self._low = (-np.inf, 0.0)

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return log cost + log visit - softplus(t), without terms that are equal for all nodes.

        The omitted terms are the bandwidth and, for nodes of one block, the size in cost, and the number of requests in
        visit. The score is ``LOWEST`` if a factor is 0, for example for adapters that no request has used yet.
        """
        scores = np.full(len(nodes), LOWEST)
        for begin in range(0, len(nodes), _CHUNK_NODES):
            self._score(nodes[begin : begin + _CHUNK_NODES], now, scores[begin : begin + _CHUNK_NODES])
        return scores

    def adapter_offset(self, now: float) -> float:
        """Return log LoRA_Eval for the eviction of an adapter minus log LoRA_Eval for the eviction of KV.

        As printed, the adapter's value is smaller while fewer adapters than required are resident. So adapters are
        evicted earlier in this case, against the stated aim of the paper.
        """
        resident = self.view.resident_adapters()
        if self._without is Factor.LORA_EVAL or resident == 0:
            return 0.0
        return self._log_coefficient(resident - 1, now) - self._log_coefficient(resident, now)

    def prefetch_adapter_offset(self, now: float) -> float:
        """Return log LoRA_Eval for the load of an adapter minus log LoRA_Eval for the load of KV.

        Return +inf if no adapter is resident.
        """
        if self._without is Factor.LORA_EVAL:
            return 0.0
        resident = self.view.resident_adapters()
        return self._log_coefficient(resident + 1, now) - self._log_coefficient(resident, now)

    def batch(self, running: int, now: float) -> None:
        """Record the batch size."""
        self._batch.set(running, now)

    def low(self, now: float) -> float:
        """Return Low (Eq. 3). Requests for the base model count, but need no adapter."""
        if self._low[0] != now:
            self._low = (now, self._compute_low(now))
        return self._low[1]

    def _compute_low(self, now: float) -> float:
        tree, end = self.view.tree, self.view.tree.end
        busy = self._batch.last > 0 or self.view.queued > 0
        batch = max(self._batch.mean(now), 1.0 if busy else 0.0)
        visits = tree.visits[:end][tree.kind[:end] == NodeKind.ADAPTER]
        total = float(np.sum(visits)) + float(tree.visits[BASE])
        return required_adapters(visits / total, batch) if total > 0 else 0.0

    def _log_coefficient(self, resident: int, now: float) -> float:
        coefficient = quantity_coefficient(resident, self.low(now))
        return math.log(coefficient) if coefficient > 0 else -np.inf

    def _score(self, nodes: Nodes, now: float, scores: Scores) -> None:
        tree = self.view.tree
        value = np.ones(len(nodes))
        if self.whole_adapters:
            value *= tree.size[nodes]
        if self._without is not Factor.VISIT:
            value *= tree.visits[nodes]
        known = value > 0
        age = np.zeros(len(nodes))
        if self._without is not Factor.RECENCY:
            age = (now - self._last_use_s(nodes)) / self.tau_s
            # With the age subtracted below, this is softplus; it cannot overflow, because ages are not negative
            value /= 1 + np.exp(-age)
        np.log(value, out=scores, where=known)
        scores -= age

    def _last_use_s(self, nodes: Nodes) -> Scores:
        """Return the time at which each node was last used, by the clock of ``now``."""
        return self.view.tree.last_use_s[nodes]
