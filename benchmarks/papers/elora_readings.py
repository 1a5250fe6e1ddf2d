"""Other readings of ELORA's cost model, which test why it does not beat LRU.

Eq. 4 to 6 leave open the unit of t, whether the score of an adapter that leaves is divided by LoRA_Eval, the size of a
node, and whether a swap counts as a use. Each reading is an eviction policy, and runs in the preset ``elora``.
"""

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np

from benchmarks.papers.elora_work import Case, run_case
from benchmarks.papers.measure import Run
from lorikeet.memory.policies.base import MemoryView, extend_to_nodes
from lorikeet.memory.tree import Nodes, Scores
from lorikeet.papers.elora.cost_model import Elora
from lorikeet.policies import EVICTION


class Reading(Elora):
    """ELORA's score with another unit of t, node, sign of Eq. 4, or meaning of use.

    The other attributes are those of ``Elora``.

    Attributes:
        mirrored: whether the score of an adapter that would leave is divided by LoRA_Eval, which fits the text's aim.
        swaps_count: whether swapping in a node counts as a use (V-A).
    """

    mirrored = False
    swaps_count = False

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._swapped_s = np.zeros(0)

    def adapter_offset(self, now: float) -> float:
        """Return the difference between the logarithms of LoRA_Eval, negated if mirrored."""
        offset = super().adapter_offset(now)
        return -offset if self.mirrored else offset

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Record the times at which nodes were copied to the device."""
        self._swapped_s = extend_to_nodes(self._swapped_s, self.view.tree, 0.0)
        self._swapped_s[np.asarray(nodes, np.int64)] = now

    def _last_use_s(self, nodes: Nodes) -> Scores:
        last: Scores = super()._last_use_s(nodes)
        if self.swaps_count:
            self._swapped_s = extend_to_nodes(self._swapped_s, self.view.tree, 0.0)
            last = np.maximum(last, self._swapped_s[nodes])
        return last


def _reading(**attributes: float | bool) -> type[Reading]:
    return type("Reading", (Reading,), attributes)


_WHOLE = ",adapter_chain=false"
READINGS = {
    "t in seconds, as printed (elora)": "elora",
    "LRU (elora:wos)": "elora:wos",
    "t in 10 s": "elora,eviction=reading:tau-10",
    "t in 60 s": "elora,eviction=reading:tau-60",
    "Eq. 4 mirrored": "elora,eviction=reading:mirrored",
    "a swap is a use": "elora,eviction=reading:swaps",
    "an adapter is a node": "elora,eviction=reading:whole" + _WHOLE,
    "an adapter is a node, t in 60 s, mirrored": "elora,eviction=reading:earlier" + _WHOLE,
    "an adapter is a node, LRU": "elora:wos" + _WHOLE,
}
"""Presets by reading."""
_POLICIES = {
    "reading:tau-10": _reading(tau_s=10.0),
    "reading:tau-60": _reading(tau_s=60.0),
    "reading:mirrored": _reading(mirrored=True),
    "reading:swaps": _reading(swaps_count=True),
    "reading:whole": _reading(whole_adapters=True),
    "reading:earlier": _reading(whole_adapters=True, mirrored=True, tau_s=60.0),
}

POOL, LOAD, WINDOW, ADAPTERS, SEEDS = 0.5, 0.2, 0.5, 100, (1, 2)
"""Half of the device's pool. All adapters together take 80 % of this half, so that every eviction matters."""


def run_reading(preset: str, case: Case) -> dict[str, float]:
    """Run a reading, and return its means."""
    with patch.dict(EVICTION.own, _POLICIES):
        made = run_case(preset, case)
    return {
        "ttft_s": float(np.mean(made["ttft_s"])),
        "adapter_hit_rate": made["adapter_hit_rate"],
        "kv_hit_rate": made["kv_hit_rate"],
        "moved_bytes": made["moved_bytes"],
    }


def runs_of(preset: str, service: str) -> tuple[Run, ...]:
    """Return a reading's runs on one service, by seed."""
    return tuple(
        Run(run_reading, (preset, Case(service, "8B", ADAPTERS, seed, load=LOAD, pool=POOL, window=WINDOW)))
        for seed in SEEDS
    )
