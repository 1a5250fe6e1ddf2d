"""What ELORA's paper prints about its rivals and ablations, for tables that set ours beside it.

Shi and others, "ELORA: Efficient LoRA and KV Cache Management for Multi-LoRA LLM Serving". Numbers are those of the
text; values that stand on figures only are not here. Reductions are (rival - ELORA) / rival, increases are
(ELORA - rival) / rival, averaged by the paper over Llama3-8B, Llama2-34B and Llama3-70B, 20, 50 and 100 adapters, and
ten rates up to ELORA's peak.
"""

from typing import NamedTuple


class Ratio(NamedTuple):
    """Mean TTFT and TPOT relative to ELORA's, how much lower the peak load is, and where it stands."""

    ttft: float
    tpot: float
    peak_loss: float | None
    where: str


ROWS = {
    "elora:wom": Ratio(1.51, 1.34, 0.193, "VIII-E"),
    "elora:wos": Ratio(1.42, 1.29, 0.186, "VIII-F"),
    "elora:wol": Ratio(1.21, 1.11, 0.092, "VIII-G"),
    "elora:woc": Ratio(1.19, 1.09, 0.076, "VIII-G"),
    "elora:wov": Ratio(1.25, 1.15, 0.107, "VIII-G"),
    "elora:wou": Ratio(1.21, 1.14, 0.093, "VIII-G"),
    "elora:bfs": Ratio(2.29, 1.54, None, "VIII-H"),
    "elora:rrip": Ratio(1.35, 1.27, None, "VIII-H"),
    "elora:hawkeye": Ratio(1.38, 1.31, None, "VIII-H"),
    "elora:halp": Ratio(1.41, 1.31, None, "VIII-H"),
}
"""Ablations and other policies."""

ORACLE = Ratio(1.387, 1.244, None, "VIII-J")
"""vLLM with the best static split."""

INVALID_KV = {"vllm-static": 0.424, "elora:wom": 0.486, "elora": 0.0}
"""Share of KV whose adapter is not there (I; VIII-E; V-B)."""


class Rival(NamedTuple):
    """What ELORA gains over a rival: TTFT by scenario, TPOT and peak over all, and where it stands."""

    ttft_reduction: dict[str, float]
    tpot_reduction: float
    peak_increase: float
    where: str


RIVALS = {
    "vllm-static": Rival({"chatbot": 0.438, "translation": 0.494, "agent": 0.438}, 0.378, 0.789, "VIII-B"),
    "elora:s-lora": Rival({"chatbot": 0.384, "translation": 0.384, "agent": 0.532}, 0.314, 0.499, "VIII-B"),
}
"""Chatbot beside the one of the other two that is not named is printed as their mean."""
