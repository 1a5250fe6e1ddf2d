"""What TOPPINGS' paper prints of one server, for tables that set ours beside it.

"TOPPINGS: CPU-Assisted, Rank-Aware Adapter Serving for LLM Inference". Numbers are those of the text; values that stand
on figures only are not here. Increases are over CACHED, of means over requests.
"""

from typing import NamedTuple


class Increase(NamedTuple):
    """How much longer TTFT, TPT (latency per output token) and latency are than CACHED's; None is not printed."""

    ttft: float | None
    tpt: float | None
    e2e: float | None


INCREASES = {
    "MAF 128": {
        "toppings": Increase(0.09, None, None),
        "toppings:s-lora": Increase(0.43, 0.07, 0.05),
        "dlora": Increase(None, 0.29, 0.29),
    },
    "MAF 256": {"dlora": Increase(None, 0.86, 0.90)},
    "MAF 512": {"toppings:s-lora": Increase(None, 0.43, 0.43)},
    "S3": {
        "toppings": Increase(0.06, 0.06, 0.07),
        "toppings:s-lora": Increase(0.82, 0.80, 0.81),
        "dlora": Increase(0.29, 0.58, 0.57),
        "toppings:fewer-cores": Increase(0.17, 0.11, 0.10),
    },
    "S5": {
        "toppings": Increase(0.24, 0.30, 0.33),
        "toppings:s-lora": Increase(0.65, 0.65, 0.61),
        "dlora": Increase(0.18, 0.59, 0.61),
    },
}
"""By setting and row (7.2, Figs. 13, 14 and 16). The authors put S-LoRA and dLoRA into CACHED for S5."""

SPEEDUPS = {"MAF 512": Increase(1.25, 1.29, 1.28), "S6": Increase(1.6, 1.5, 1.4)}
"""S-LoRA's over TOPPINGS' (7.2)."""

PREFILL_S = {256: 0.044, 1000: 0.090}
"""Seconds of a prefill without a load, Llama-2-7B, by tokens (Fig. 4)."""

STRAWMAN = Increase(4.0, 1.4, None)
"""Times CACHED's at the most (Fig. 8); the setting is not printed."""

PIPELINE = {64: 1.1, 128: 1.2}
"""A prefill without pipelining over one with it, by rank (7.3)."""

INTERRUPTED_SHARE, INTERRUPTED_PER_S, INTERRUPTED_BYTES = 0.29, 9, 96 * 2**20
"""Of the serving time decodes are interrupted by cold starts, at so many requests per second of rank 64 (2.3)."""

NOT_MODELLED = (
    "S4, prompts of 2,000 to 30,000 tokens that an autocompressor turns into embeddings",
    "an explicit wait in place of the fused signal: prefills of 64 and 256 tokens take 67 and 145 instead of 61 and "
    "126 ms (7.3), and sockets in place of shared memory: what the two cost here is measured live",
    "use of the processors in S3: 46 % of the GPU under S-LoRA, 81 % under dLoRA, 56 % under TOPPINGS; of the CPU 4, 4 "
    "and 46 %",
)
