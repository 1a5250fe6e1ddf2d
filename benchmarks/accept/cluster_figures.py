"""What the papers of LoRAServe, TOPPINGS and dLoRA print of clusters, for tables that set ours beside it.

Numbers are those of the texts; values that stand on figures only are not here. Most are maxima over settings that are
not printed.
"""

LORASERVE_RATE = {"loraserve:toppings": 1.2, "loraserve:random": 2.0, "loraserve:contiguous": 2.0}
"""Times the request rate within the SLO at the most (V-F); which of S-LoRA's two placements 2 is of is not printed."""
LORASERVE_TTFT = 9.0
"""Times LoRAServe's P95 TTFT at the most, whose is not printed (V-F)."""
LORASERVE_STORAGE = 16.0
"""Adapters on a server under TOPPINGS ÷ LoRAServe's at the most (V-F); the mean of four servers is below 4."""
LORASERVE_TBT = 0.15
"""Less time between tokens at the most, than whose is not printed (V-F)."""
LORASERVE_SCALE = {4: 32.0, 8: 64.0, 12: 96.0}
"""Requests per second within the SLO by servers (V-G)."""

TOPPINGS_ATTAINED = 0.99
"""Share of the requests that keep the limit at the most (abstract)."""
TOPPINGS_GAINS = {"40/s": 0.21, "50/s": 0.26}
"""By which that share is larger than dLoRA's (7.4); read as points."""
TOPPINGS_TPT = {"toppings:dlora": 0.22, "toppings:random": 0.23, "toppings:first-fit": 0.57}
"""By which the mean TPT is less than that of each in the simulation (7.4)."""

DLORA_RATE = {"dlora:vllm-uniform": 57.9, "dlora:peft": 26.0}
"""Times the request rate within the SLO at the most, Llama-2-70B (7.2)."""
DLORA_QUEUEING = {"dlora:rr": 3.6, "dlora:proactive": 1.4}
"""Times dLoRA's mean queueing delay, on one server of 8 devices (7.4)."""

NOT_MADE = (
    "LoRAServe: the production trace and Azure's of 2024, which are not to be had with what is needed; evenly spaced "
    "arrivals and exponential popularity; 12 servers; the models of 30B and 70B",
    "TOPPINGS: 60 servers and 40,000 functions, of which a quarter is here; its rivals under the other kernel form",
    "dLoRA: Llama-2-7B (10.6 and 11.5 times vLLM's and PEFT's rate) and 13B (53.0 and 15.0), latency by the scale of "
    "lengths (7.4), the number of adapters (7.5)",
)
