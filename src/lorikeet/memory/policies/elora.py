"""ELORA's cost model (§VI): what keeping a node saves, and how many adapters should be there.

    Eval = LoRA_Eval * cost * visit * (1 - sigmoid(t))                                               (Eq. 5, 6)
    LoRA_Eval = min(1, Now / Low)                                                                    (Eq. 4)
    Low = sum over adapters of 1 - (1 - prob)^BS                                                     (Eq. 3)

Only the order matters, so scores are logarithms: far from 37 units of age, where 1 - sigmoid(t) is 0 in float64, they
still tell old nodes from older ones. What the paper leaves open is settled in docs/decisions/memory-policies.md.
"""

import math
from collections import deque
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import LOWEST, EvictionPolicy, MemoryView
from lorikeet.memory.tree import BASE, NodeKind, Nodes, Scores

BATCH_WINDOW_S = 5.0
"""BS is the mean batch size over so long (§VI-A)."""
_PART = 8192
"""Scored at a time, so that what is computed in between stays in the processor's cache."""
TAU_S = 60.0
"""The unit of t, which the paper does not give."""


class LoraEval(StrEnum):
    """What LoRA_Eval means for an adapter that would leave the device."""

    MIRRORED = "mirrored"
    """Scores are divided by it: adapters are kept the more, the fewer there are. The paper's stated aim."""
    LITERAL = "literal"
    """Scores are multiplied with it, as printed: adapters leave the earlier, the fewer there are."""
    OFF = "off"
    """It is left out, for prefetching too."""


class Factor(StrEnum):
    """A factor of Eq. 5."""

    COST = "cost"
    VISIT = "visit"
    RECENCY = "recency"


def required_adapters(prob: npt.NDArray[np.float64], batch: float) -> float:
    """Return how many different adapters a batch is expected to hold (Eq. 3).

    Args:
        prob: for each adapter, the share of requests that use it.
        batch: requests in the batch; need not be whole.
    """
    return float(np.sum(1 - (1 - prob) ** batch))


def quantity_coefficient(resident: float, required: float) -> float:
    """Return LoRA_Eval for ``resident`` adapters on the device after a move (Eq. 4); 1 if none is required."""
    return min(1.0, resident / required) if required > 0 else 1.0


class WindowMean:
    """The mean over time of a number that changes in steps, over the last ``window_s`` or since it was first known."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._steps: deque[tuple[float, float, float]] = deque()  # time, integral up to it, value since

    def set(self, value: float, now: float) -> None:
        """From ``now`` on it has this value."""
        if self._steps and self._steps[-1][2] == value:
            return
        self._steps.append((now, self._integral(now), value))
        self._forget(now)

    def mean(self, now: float) -> float:
        """Return the mean up to ``now``; 0 if nothing is known."""
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
        """Its present value; 0 if nothing is known."""
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
    """See the module.

    LoRA_Eval has one value for all adapters and one for all KV, so it is no part of the scores: it is the offset
    between them, and a move that changes the number of adapters leaves all scores as they are.

    Args:
        view: what there is to see.
        lora_eval: what the coefficient means for eviction.
        tau_s: unit of age.
        without: a factor that is left out.
    """

    def __init__(
        self,
        view: MemoryView,
        *,
        lora_eval: LoraEval = LoraEval.MIRRORED,
        tau_s: float = TAU_S,
        without: Factor | None = None,
    ) -> None:
        super().__init__(view)
        self._lora_eval = lora_eval
        self._tau_s = tau_s
        self._without = without
        self._batch = WindowMean(BATCH_WINDOW_S)
        self._low = (-np.inf, 0.0)

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return log cost + log visit - softplus(t / tau), less what all nodes have in common.

        That is the link's bandwidth in cost and the number of requests in visit. ``LOWEST`` if a factor is 0: such
        are adapters that nobody has asked for yet.
        """
        scores = np.full(len(nodes), LOWEST)
        for begin in range(0, len(nodes), _PART):
            self._score(nodes[begin : begin + _PART], now, scores[begin : begin + _PART])
        return scores

    def adapter_offset(self, now: float) -> float:
        """Return log LoRA_Eval of an adapter that leaves less that of KV; with the sign turned if mirrored."""
        resident = self.view.resident_adapters()
        if self._lora_eval is LoraEval.OFF or resident == 0:
            return 0.0
        fewer = self._log_coefficient(resident - 1, now) - self._log_coefficient(resident, now)
        return -fewer if self._lora_eval is LoraEval.MIRRORED else fewer

    def adapter_offset_in(self, now: float) -> float:
        """Return log LoRA_Eval of an adapter that comes less that of KV: +inf if there is no adapter yet."""
        if self._lora_eval is LoraEval.OFF:
            return 0.0
        resident = self.view.resident_adapters()
        return self._log_coefficient(resident + 1, now) - self._log_coefficient(resident, now)

    def batch(self, running: int, now: float) -> None:
        """Note the batch size."""
        self._batch.set(running, now)

    def low(self, now: float) -> float:
        """Return Low. Requests without an adapter count among the requests, but need none."""
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
        if self._without is not Factor.COST:
            value *= tree.size[nodes]
        if self._without is not Factor.VISIT:
            value *= tree.visits[nodes]
        known = value > 0
        age = np.zeros(len(nodes))
        if self._without is not Factor.RECENCY:
            age = (now - tree.last_use_s[nodes]) / self._tau_s
            value /= 1 + np.exp(-age)  # with the age taken off below: softplus, and no overflow, as no age is negative
        np.log(value, out=scores, where=known)
        scores -= age
