"""Defines presets of Chameleon, its ablations, S-LoRA with its published batching, and our change of its queue."""

from typing import Any

from msgspec.structs import replace

from lorikeet.presets import PRESETS as ALL
from lorikeet.presets import ColdStart, KvAfterFinish, PrefillApart, Preset, PresetGroup

_CHAMELEON = Preset(
    kv_after_finish=KvAfterFinish.DROPPED,
    eviction="chameleon",
    prefetch="queue",
    admission="chameleon",
    prefill_apart=PrefillApart.ALWAYS,
    cold_start=ColdStart.BLOCK,
)
_CACHE_ALONE = replace(_CHAMELEON, admission="s-lora")
_NO_CACHE: dict[str, Any] = {"eviction": "lru", "keep_adapters": False}
_S_LORA = replace(_CACHE_ALONE, **_NO_CACHE)
_LRU = "chameleon(frequency=0,recency=1,size=0)"
_FAIRSHARE = f"chameleon(frequency={1 / 3},recency={1 / 3},size={1 / 3})"

PRESETS = PresetGroup(
    "Chameleon",
    {
        "chameleon": _CHAMELEON,
        "chameleon:output-only": replace(_CHAMELEON, admission="chameleon(output_only=true)"),
        "chameleon:no-cache": replace(_CHAMELEON, **_NO_CACHE),
        "chameleon:no-scheduler": _CACHE_ALONE,
        "chameleon:lru": replace(_CACHE_ALONE, eviction=_LRU),
        "chameleon:fairshare": replace(_CACHE_ALONE, eviction=_FAIRSHARE),
        "chameleon:lru-full": replace(_CHAMELEON, eviction=_LRU),
        "chameleon:fairshare-full": replace(_CHAMELEON, eviction=_FAIRSHARE),
        "chameleon:prefetch": replace(_CHAMELEON, prefetch="histogram"),
        "chameleon:s-lora": _S_LORA,
        # S-LoRA with the batching of its published code: requests are admitted after ten decode steps. In the paper
        # both systems admit in every iteration.
        "chameleon:s-lora-code": replace(_S_LORA, decodes_between_prefills=10),
        "chameleon:sjf": replace(_S_LORA, admission="sjf"),
        "chameleon:sjf-aging": replace(_S_LORA, admission="sjf(gamma=10)"),
        # Chameleon's queue, changed where memory stays empty or large requests starve. Mean TTFT falls, P99 may rise
        # (docs/decisions/chameleon-queues.md).
        "lorikeet:size-aware": replace(ALL["lorikeet:auto"], admission="size-aware"),
    },
    {
        "chameleon": "Chameleon: an adapter cache, and a multi-level queue by request size",
        "lorikeet:size-aware": "small requests first, by a multi-level queue with token quotas",
    },
)
