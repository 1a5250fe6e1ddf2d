"""Why claims of Chameleon's paper came out otherwise, each with the run that shows it."""

_CAPACITY = """
At its knee the A40 computes without pause, and all systems compute the same, so an order of requests cannot move the
knee. The cache saves the time in which everything waits for a load. With lengths × 0.3 and 4 GB/s, S-LoRA loads 64 GB
in 225 s at 9 requests/s (table of systems), which is 7 % of the time, and Chameleon 14 GB. So its knee by the limit on
P99 TTFT is 1.01 times S-LoRA's there (grid). With 1 GB/s it is 1.13 times. For 1.5 times, loads would have to take a
third of S-LoRA's time, where Fig. 2 gives them 17.5 % of a request that runs alone.
"""
_HIGH = """
With lengths × 0.3 and 4 GB/s, 9 requests/s is just below S-LoRA's knee, so its queue does not grow. The printed gain is
one over a growing queue (Fig. 13). The grid's cell with lengths × 0.3 and 1 GB/s shows it: S-LoRA's knee is 8.0 there,
and at 9 requests/s Chameleon has 80 % less P99 TTFT and 94 % less P50. But there loading takes 48 % of the TTFT of a
request alone instead of 17.5 %.
"""
_LOW = """
A load that is saved helps more than its own request: while one adapter is loaded, all requests wait
(`cold_start=block`, as S-LoRA does before a prefill). At 6 requests/s S-LoRA finds 28 % of the adapters on the device
and Chameleon 93 % (grid, lengths × 0.3, 4 GB/s). The paper does not print its hit rates; if its S-LoRA hid more of its
loads behind the queue, the gain at low load would be smaller.
"""
_FITS = """
All 100 adapters together take 10 GB of the 33 GB that the A40 has for adapters and KV. At 8 requests/s KV leaves that
much free, no adapter is evicted, and policies of eviction cannot differ: the table of caches shows equal hits and equal
bytes loaded. What is left is the first load of each adapter. It comes before its histogram has the ten gaps that a
prediction takes, so a prefetch has nothing to do either.
"""
_TBT = """
Prompts are computed in steps of their own, and requests are admitted in every iteration, as the paper says of both
systems. At 9 requests/s a decode then waits for prefills and loads, often for several in turn. The paper does not say
how its P99 TBT stays below 150 ms with that. S-LoRA's published code decodes ten times between two prefills:
`chameleon:s-lora-code` in the table of systems.
"""

CAUSES = {
    **dict.fromkeys(("throughput-a40", "throughput-nosched", "throughput-nocache", "slo-knee-chameleon"), _CAPACITY),
    **dict.fromkeys(("p99-ttft-high", "p50-ttft-high"), _HIGH),
    **dict.fromkeys(("p99-ttft-low", "p50-ttft-low"), _LOW),
    **dict.fromkeys(("evict-chameleon-vs-fairshare-r128", "prefetch-extra", "prefetch-accuracy"), _FITS),
    "tbt-slo": _TBT,
}
