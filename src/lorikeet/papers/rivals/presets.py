"""Defines presets of vLLM: a fixed number of adapter slots, and the rest of the memory for KV."""

from msgspec.structs import replace

from lorikeet.presets import HostKv, MemorySplit, Preset, PresetGroup

_VLLM = Preset(memory_split=MemorySplit.STATIC, padded_slots=True, dependency_tree=False)

PRESETS = PresetGroup(
    "vLLM",
    {
        "vllm-static": _VLLM,
        # Evicted KV is dropped.
        "vllm-static:discard": replace(_VLLM, host_kv=HostKv.NONE),
    },
    {"vllm-static": "vLLM: a fixed number of adapter slots, the rest of the memory for KV"},
)
