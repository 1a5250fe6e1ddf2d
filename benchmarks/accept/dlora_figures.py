"""What dLoRA's paper prints of one server, for tables that set ours beside it.

Wu and others, "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving" (OSDI 2024). Numbers are
those of the text; values that stand on figures only are not here. Llama-2-7B on an A800 of 80 GB, 8 adapters of rank 8,
lengths of ShareGPT, calls of Azure's functions. All are maxima over a grid of skewness that is not printed.
"""

from typing import NamedTuple


class Rival(NamedTuple):
    """By how much dLoRA's average and P90 latency per output token are lower, at the most; None is not printed."""

    mean: float
    p90: float | None
    where: str


RIVALS = {
    "merged-only": Rival(3.9, 5.2, "7.3, at low skewness"),
    "unmerged-only": Rival(2.4, 2.5, "7.3, at high skewness"),
    "dlora:s-lora": Rival(1.8, None, "7.7"),
}

SLO_S, SLO_STEPS = 0.5, 10
"""Limit of the average latency per output token: seconds, and decode steps (7.1)."""

INFERENCE_SHARE = 0.967
"""Of the latency at least, the rest being switches and the placement of requests over replicas (7.5)."""

ADAPTER_SHARE = 0.389
"""Time of an adapter's computation ÷ the base's (4.1)."""

NOT_MODELLED = (
    "throughput within the limit on 32 A800: up to 57.9 × vLLM's and 26.0 × PEFT's (Llama-2-70B), 53.0 and 15.0 × "
    "(13B), 10.6 and 11.5 × (7B); queueing delay over the replicas of one server (7.4), the number of adapters (7.5): "
    "these need several replicas",
)
