"""Defines presets of LoRAServe, a variant, and its baselines (section V-D)."""

from msgspec.structs import replace

from lorikeet.core.plan import KernelForm
from lorikeet.presets import ColdStart, KvAfterFinish, Preset, PresetGroup

_LORASERVE = Preset(
    kernel_form=KernelForm.PADDED,
    kv_after_finish=KvAfterFinish.DROPPED,
    keep_adapters=False,
    prefetch="queue",
    cold_start=ColdStart.BLOCK,
    placement="loraserve",
    routing="table",
    placement_period_s=60.0,  # as in the paper's runs; placements every 10 s follow chance
)
_REPLICATED = replace(_LORASERVE, placement="everywhere", pool_prefetch=True)

PRESETS = PresetGroup(
    "LoRAServe",
    {
        "loraserve": _LORASERVE,
        "loraserve:prefetch": replace(_LORASERVE, pool_prefetch=True),
        "loraserve:random": replace(_LORASERVE, placement="random"),
        "loraserve:random-iid": replace(_LORASERVE, placement="random(balanced=false)"),
        "loraserve:contiguous": replace(_LORASERVE, placement="contiguous"),
        "loraserve:toppings": replace(_REPLICATED, routing="fewest-tokens"),
        "loraserve:toppings-rank": replace(_REPLICATED, routing="loraserve:toppings-rank"),
    },
    {"loraserve": "LoRAServe: adapters placed on replicas by rank and demand"},
)
