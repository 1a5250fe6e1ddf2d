"""Defines presets of ELORA, its ablations (section VIII-G) and the compared policies (section VIII-H)."""

from msgspec.structs import replace

from lorikeet.presets import KvAfterFinish, Preset, PresetGroup

_ELORA = Preset(adapter_chain=True, eviction="elora", prefetch="best-first", swap_interval_s=0.1)

PRESETS = PresetGroup(
    "ELORA",
    {
        # The system as printed: t in seconds, adapters as chains of blocks.
        "elora": _ELORA,
        # Ablation without the tree: flat tables.
        "elora:wom": replace(_ELORA, dependency_tree=False, eviction="elora:wom", prefetch="best-first:flat"),
        # Ablation without the swapper's model; equal to lorikeet:tree-lru.
        "elora:wos": replace(_ELORA, eviction="lru", prefetch="newest-first"),
        # Ablations without Eq. 4, visits, or recency.
        "elora:wol": replace(_ELORA, eviction="elora(without=LoRA_Eval)"),
        "elora:wov": replace(_ELORA, eviction="elora(without=visit)"),
        "elora:wou": replace(_ELORA, eviction="elora(without=recency)"),
        # Other policies in place of the model.
        "elora:bfs": replace(_ELORA, adapter_chain=False, eviction="bfs", prefetch="branches"),
        "elora:rrip": replace(_ELORA, eviction="rrip", prefetch="newest-first"),
        "elora:hawkeye": replace(_ELORA, eviction="hawkeye", prefetch="newest-first"),
        "elora:halp": replace(_ELORA, eviction="halp", prefetch="newest-first"),
        # S-LoRA as the paper measures it.
        "elora:s-lora": Preset(kv_after_finish=KvAfterFinish.DROPPED, keep_adapters=False),
    },
    {"elora": "ELORA: KV and adapters in one dependency tree, evicted and prefetched by a cost model"},
)
