"""What Chameleon's paper prints, for tables that set ours beside it.

Iliakopoulou and others, "Chameleon: Adaptive Caching and Scheduling for Many-Adapter LLM Inference Environments".
Numbers are those of the text; values that stand on figures only are not here. Unless something else is said:
Llama-7B on an A40 of 48 GB, 100 adapters of ranks 8 to 128, lengths of Azure's trace, Poisson arrivals, a predictor
that is right four times in five. Reductions are (S-LoRA - Chameleon) / S-LoRA.
"""

from typing import NamedTuple

KNEE_RPS = 8.7
"""Load at which S-LoRA starts to miss its limit (5.2)."""


class Load(NamedTuple):
    """Requests per second, and by how much Chameleon's P99 and P50 TTFT are below S-LoRA's (5.2)."""

    per_s: float
    p99_reduction: float
    p50_reduction: float


LOADS = {"low": Load(6, 0.147, 0.139), "medium": Load(8, 0.246, 0.209), "high": Load(9, 0.807, 0.481)}

THROUGHPUT = {"chameleon": 1.5, "chameleon:no-scheduler": 1.2, "chameleon:no-cache": 1.1}
"""Load within the limit on P99 TTFT, ÷ S-LoRA's (5.2); 12.9 and 8.7 per second."""

EVICTION = {"chameleon:lru": 0.18, "chameleon:fairshare": 0.22, "chameleon:no-scheduler": 0.26}
"""Reductions of P99 TTFT at medium load by the eviction of the cache, perhaps with the queues (5.3)."""
LARGEST_RANK_REDUCTION = 0.12
"""Of P99 TTFT at rank 128: Chameleon's eviction below equal weights (5.3)."""

PREFETCH_REDUCTION, PREFETCH_ACCURACY = 0.088, 0.95
"""Of P99 TTFT by the histogram's prefetches, at medium load; the accuracy is a lower bound (5.3)."""

TBT_S = 0.15
"""Limit that P99 TBT of both systems keeps (5.2)."""
SQUASHED = 0.05
"""Most requests that were squashed (4.2)."""

ADAPTER_SHARE, LOAD_SHARE = 0.60, 0.175
"""Of TTFT without load: loading and computing an adapter of rank 128, and the most that loading takes (3.1, 3.2)."""
PCIE_TIMES = 328
"""Bytes over PCIe with 500 adapters of rank 32 ÷ with one, under S-LoRA (3.2)."""

NOT_MODELLED = (
    "Llama-7B, 13B and 30B on an A100 of 80 GB with 500, 100 and 10 adapters: P99 TTFT less by 60.0, 61.3 and 59.3 %, "
    "throughput 1.86, 1.41 and 1.67 × (13B: 3,500 beside 2,500 tokens/s, 30B: 2,500 beside 1,500)",
    "Llama-7B on an A100 limited to 24, 48 and 80 GB: throughput 1.4, 1.6 and 1.9 × (5.5; compute scaling says 1.9 × "
    "at 48 GB)",
)
