"""``lorikeet presets``: the systems that a server can run as, one line each."""

import msgspec
from rich.table import Column, Table

from lorikeet.cli.console import JsonFile, check_json_file, output, write_json
from lorikeet.presets import AUTO_PRESET, PRESETS

_ABOUT = {
    "lorikeet:auto": "the default: one pool, a host tier, prefetch, short requests first within bounds",
    "lorikeet:plain": "one pool with LRU, prefix caching, first come first served, routing to cached KV",
    "lorikeet:plain-block": "all requests wait while an adapter is loaded",
    "lorikeet:plain-no-reuse": "no prefix caching, as vLLM's --no-enable-prefix-caching",
    "lorikeet:plain-padded": "LoRA padded to the largest rank of the batch",
    "lorikeet:plain-einsum": "LoRA as one einsum over all adapters of the batch",
    "lorikeet:fair": "fair shares of served tokens between tenants",
    "lorikeet:fair-adapter": "fair shares of served tokens between adapters",
    "lorikeet:priority": "requests by their priority, as vLLM's priority scheduling",
    "lorikeet:deadline": "requests by the deadline of their first token",
    "lorikeet:kv-affinity": "routing to the replica that has most of the prompt's KV",
    "lorikeet:merge-paid": "an adapter is merged while it alone has requests, once that has paid for itself",
    "lorikeet:size-aware": "small requests first, by a multi-level queue with token quotas",
    "lorikeet:tree-lru": "ELORA's tree and prefetch with LRU in place of its cost model",
    "lorikeet:rank-groups": "LoRAServe with groups of replicas by rank, and the least work in place of a draw",
    "lorikeet:merge-turns": "dLoRA with merged turns for starving adapters, and thresholds learned while serving",
    "lorikeet:assist-patient": "lorikeet:assist, but not on layers that arrive before host cores would be done",
    "lorikeet:assist": "host cores assist prefills while their adapter is loaded, where the first token comes sooner",
    "elora": "ELORA: KV and adapters in one dependency tree, evicted and prefetched by a cost model",
    "vllm-static": "vLLM: a fixed number of adapter slots, the rest of the memory for KV",
    "chameleon": "Chameleon: an adapter cache, and a multi-level queue by request size",
    "dlora": "dLoRA: merged and unmerged batches, placement by burst tolerance, co-migration",
    "dlora:peft": "PEFT as dLoRA measures it: one adapter at a time, each replica in turn",
    "dlora:s-lora": "S-LoRA as dLoRA measures it: its own batching, each replica in turn",
    "dlora:vllm-uniform": "vLLM as dLoRA measures it: a merged model for each adapter, swapped in turn",
    "merged-only": "dLoRA with merged batches only",
    "unmerged-only": "dLoRA with unmerged batches only",
    "toppings": "TOPPINGS: host cores assist prefills while their adapter is loaded",
    "cached": "the baseline of TOPPINGS whose adapters are always loaded",
    "loraserve": "LoRAServe: adapters placed on replicas by rank and demand",
}


def presets(json_file: JsonFile = None) -> None:
    """List the presets: systems that `serve --preset NAME` can run as.

    An option is changed behind the name: `--preset elora,eviction=lru`. With --json: every option of every preset.
    """
    check_json_file(json_file)
    if not write_json(json_file, PRESETS):
        return
    table = Table(Column("preset", no_wrap=True), "what it is")
    for name in PRESETS:
        table.add_row(name, about(name))
    output().print(table)


def about(name: str) -> str:
    """Return one line about a preset; for a variant, the options in which it differs from its system."""
    if name in _ABOUT:
        return _ABOUT[name]
    system = name.partition(":")[0]
    base = system if system in PRESETS else AUTO_PRESET
    own, other = msgspec.to_builtins(PRESETS[name]), msgspec.to_builtins(PRESETS[base])
    changed = ",".join(f"{option}={value}" for option, value in own.items() if value != other[option])
    return f"{base},{changed}" if changed else f"the same as {base}"
