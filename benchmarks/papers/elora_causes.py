"""Why figures of ELORA came out otherwise, by claim, in Markdown."""

_VLLM = """
What the paper's effect needs is more live history than the device holds, and more adapters than the split has places
for. A split of 0.2 holds 36 adapters of 8B, 55 of 34B and 57 of 70B, padded to the largest rank: with 20 adapters,
and mostly with 50, all of them stay, and vLLM loads none while it serves. With 100 it queues for places, above all in
the chatbot, whose batch has the most different adapters (the rows of 100 adapters in the table of all cases). And
vLLM discards KV that nobody asks for again: LMSYS-33k has 1.2 turns, a sentence is sent once, and our agents go on
after 5 s, so that their dialogues fit in the pool. The paper prints no pause. The table of agents by pause is the run
that shows it: at 20 s between turns, on 8B with 50 adapters, ELORA's TTFT is 75 % less, its TPOT 62 % less and its
peak 78 % higher than those of vLLM that discards KV; at 60 s, where the dialogues exceed the host as well, 41, 54 and
29 %.
"""
_TPOT = """
ELORA and vLLM prefill the same tokens here, because vLLM does not lose KV that is used again (`prefill-time-vllm`).
Then a decode step of vLLM is no longer than ELORA's, and where its adapters wait for places its batch is smaller and
its TPOT lower. In the table of agents by pause vLLM that discards KV prefills 3.3 times as much at 20 s between
turns, and ELORA's TPOT is 62 % less.
"""
_S_LORA = """
S-LoRA prefills the whole prompt of every turn. An agent's prompt has 360 tokens, of which 32 are new, and our agents
come at rates that fill the device with ELORA, four times what S-LoRA bears: past its peak a stage's queue decides.
The paper prints neither lengths nor rates. Where prompts are short (chatbot, translation), S-LoRA is nearer to ELORA
than printed.
"""
_UTILISATION = """
S-LoRA keeps nothing but adapters and running KV, which take a sixth of these pools; ELORA's pool is full of history
as on a server that has run for a while. The printed 2.6 says that S-LoRA's running KV and adapters took over a third
of it.
"""
_HITS = """
S-LoRA finds all adapters that fit, and no KV: its mean of both hit rates is 0.5, ELORA's is near 1, and the ratio
cannot exceed 2. The printed 3.4 needs an S-LoRA that misses adapters, too: one that frees them with their last
request, as Chameleon's S-LoRA does.
"""
_LOW = """
Nothing in Eq. 4 makes fewer adapters than Low, or more, worse than the other: it is 1 from Low on. With these pools
all 20 and 50 adapters stay, and most of 100, above Low nearly always; at the rates of the first stages Low is near 1.
That N is not below 0.95 Low holds in every sample. Fig. 14a itself shows all 100 adapters under light load.
"""
_DRAINED = """
256 running sequences (vLLM's limit) of some 150 tokens are 3 to 10 % of the pool on 34B; history fills the rest also
in the last stage, beyond the peak. The printed picture needs running KV that fills the pool: thousands of sequences,
or contexts far longer than those of LMSYS-33k.
"""
_INVALID = """
vLLM's KV is invalid where its adapter has lost its place: not with 20 and 50 adapters, which all have places, and 10
to 30 % with 100. The printed mean is that of a split that is short of places throughout.
"""
_WOM = """
Without the tree KV does outlive its adapter and its prompt: 9 % of it on average here, 38 % with a quarter of the
pool (8B, 100 adapters, chatbot), none in ELORA. TTFT is up to 10 % longer at low load. But what is evicted comes back
from the host at 56 GB/s for each device within milliseconds, and in these pools it is seldom used again. In the last
stages ELORA and `elora:wom` wait for the same full batch.
"""
_WOS = """
Eq. 5 with t in seconds is LRU in which a factor of e in visits counts as much as one second of age; LoRA_Eval is 1
while there are more adapters than Low, as nearly always here. On pools of the paper's size both evict the same texts,
which nobody asks for again: TTFT, TPOT and peak are equal, at every pause of the agents, too. The table of readings
has a quarter of the pool, where every eviction counts. There Eval keeps adapters (1 to 3 points more hits) at the
cost of KV. For the chatbot, whose KV is seldom used again, it is 1 % better than LRU; for translation equal; for
agents 9 to 13 % worse, since a dialogue's visits count turns that are over. With t in units of 10 or 60 s visits
weigh more: agents lose 22 to 38 %, translation gains up to 3 %. No reading gains what is printed on any of the three.
"""
_FACTORS = """
Cost is the same for every node where a node is a block (V-A), so ELORA without it is ELORA. LoRA_Eval is 1 while
there are more adapters than Low, as in every sample here. Visits count as much as seconds of age (see `wos-ttft`),
and pools of 61 to 481 GB evict little that is used again within a window.
"""
_POLICY = """
Policies differ in what they evict, and on 34B a pool of 242 GB evicts only texts that are not used again, whichever
policy chooses: hit rates of all are within a point of each other. What a miss costs is a copy of milliseconds.
"""
_BFS = """
`elora:bfs` moves whole branches, and does move more bytes, but over a link of 222 GB/s in sum and in the background
of the steps; its requests wait for little of it. A branch is rebuilt by requests, not by copies, if nobody used it.
"""
_MANY = """
With thousands of adapters each request loads one, for all three systems alike; prefetching by score cannot know
which. ELORA and S-LoRA have the whole pool for adapters and vLLM a fifth.
"""
_ORACLE = """
The best split holds all adapters that are asked for, and the rest of the pool is more than KV that is used again
needs. Then nothing that ELORA does can save time. The paper's best splits, too, are those that hold most adapters.
"""
_SPREAD = """
Our seeds draw other requests, other adapters and other lengths; the paper repeats the same trace.
"""

CAUSES: dict[str, str] = {
    **dict.fromkeys(
        (
            "ttft-red-vllm",
            "peak-inc-vllm",
            "ttft-red-vllm-translation",
            "ttft-red-vllm-other",
            "ttft-p99-red-vllm",
            "ttft-p95-red-vllm",
            "prefill-time-vllm",
            "hit-rate-vllm",
            "mem-util-vllm",
        ),
        _VLLM,
    ),
    **dict.fromkeys(("tpot-red-vllm", "tpot-p99-red-vllm", "tpot-p95-red-vllm", "wins-all-cases"), _TPOT),
    **dict.fromkeys(
        (
            "ttft-red-slora",
            "tpot-red-slora",
            "peak-inc-slora",
            "ttft-p99-red-slora",
            "ttft-p95-red-slora",
            "tpot-p99-red-slora",
            "tpot-p95-red-slora",
            "ttft-red-slora-agent",
            "ttft-red-slora-other",
            "prefill-time-slora",
        ),
        _S_LORA,
    ),
    "mem-util-slora": _UTILISATION,
    "hit-rate-slora": _HITS,
    "lora-count-near-low": _LOW,
    "fig14-elora-history-kv-drained": _DRAINED,
    "invalid-kv-vllm": _INVALID,
    **dict.fromkeys(("wom-ttft", "wom-tpot", "wom-peak", "wom-invalid-kv"), _WOM),
    **dict.fromkeys(("wos-ttft", "wos-tpot", "wos-peak"), _WOS),
    **dict.fromkeys(
        [f"{name}-{figure}" for name in ("wol", "woc", "wov", "wou") for figure in ("ttft", "tpot", "peak")], _FACTORS
    ),
    **dict.fromkeys(
        [f"{name}-{figure}" for name in ("rrip", "hawkeye", "halp") for figure in ("ttft", "tpot")], _POLICY
    ),
    **dict.fromkeys(("bfs-ttft", "bfs-tpot", "bfs-mem-util", "bfs-pcie", "bfs-branch-max"), _BFS),
    **dict.fromkeys(("large-n-ttft", "large-n-tpot"), _MANY),
    **dict.fromkeys(("oracle-ttft", "oracle-tpot", "oracle-monotone-after"), _ORACLE),
    "std-error": _SPREAD,
}
