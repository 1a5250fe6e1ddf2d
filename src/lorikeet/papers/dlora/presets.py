"""Defines presets of dLoRA, its ablations and baselines, and our change of its batching."""

from typing import Any

from msgspec.structs import replace

from lorikeet.core.plan import KernelForm
from lorikeet.presets import (
    ColdStart,
    KvAfterFinish,
    MergeBy,
    MigrationProblem,
    PrefillApart,
    Preset,
    PresetGroup,
)

_DLORA = Preset(
    kernel_form=KernelForm.EINSUM,
    kv_after_finish=KvAfterFinish.DROPPED,
    prefetch="all",
    batching="dlora",
    cold_start=ColdStart.BLOCK,
    placement="dlora",
    placement_period_s=60.0,
    routing="dlora",
    pool_prefetch=True,
    comigration=True,
)
_UNMANAGED: dict[str, Any] = {
    "placement": "everywhere",
    "placement_period_s": Preset().placement_period_s,
    "routing": "round-robin",
    "pool_prefetch": False,
    "comigration": False,
}

PRESETS = PresetGroup(
    "dLoRA",
    {
        "dlora": _DLORA,
        # Ablations, and credits of other sizes.
        "dlora:no-credits": replace(_DLORA, batching="dlora(patience=inf)"),
        "dlora:no-tuning": replace(_DLORA, batching="dlora(tuned=false)"),
        "dlora:patience-64": replace(_DLORA, batching="dlora(patience=64)"),
        "dlora:patience-16384": replace(_DLORA, batching="dlora(patience=16384)"),
        "dlora:full-ilp": replace(_DLORA, comigration_problem=MigrationProblem.FULL),
        "dlora:printed-factor": replace(_DLORA, comigration_problem=MigrationProblem.PRINTED_FACTOR),
        "dlora:proactive": replace(_DLORA, comigration=False),
        "dlora:rr": replace(_DLORA, routing="round-robin", comigration=False),
        # Baselines.
        "merged-only": replace(_DLORA, batching="merged-only"),
        "unmerged-only": replace(_DLORA, batching="unmerged"),
        "dlora:peft": replace(_DLORA, **_UNMANAGED, batching="one-adapter", kernel_form=KernelForm.UNPADDED),
        "dlora:vllm-uniform": replace(
            _DLORA,
            batching="whole-models(turn_s=1)",
            merge_by=MergeBy.MODEL,
            placement="random",
            routing="table",
            comigration=False,
        ),
        "dlora:s-lora": replace(
            _DLORA,
            **_UNMANAGED,
            batching="unmerged",
            kernel_form=KernelForm.UNPADDED,
            admission="s-lora",
            prefill_apart=PrefillApart.ALWAYS,
            decodes_between_prefills=10,
        ),
        # Merged turns for starving adapters, and thresholds and times learned while serving: lower latency below
        # saturation, and on machines where LoRA costs several times the base model (docs/decisions/batching-mode.md).
        "lorikeet:merge-turns": replace(_DLORA, batching="merge-turns"),
    },
    {
        "dlora": "dLoRA: merged and unmerged batches, placement by burst tolerance, co-migration",
        "dlora:peft": "PEFT as dLoRA measures it: one adapter at a time, each replica in turn",
        "dlora:s-lora": "S-LoRA as dLoRA measures it: its own batching, each replica in turn",
        "dlora:vllm-uniform": "vLLM as dLoRA measures it: a merged model for each adapter, swapped in turn",
        "merged-only": "dLoRA with merged batches only",
        "unmerged-only": "dLoRA with unmerged batches only",
        "lorikeet:merge-turns": "dLoRA with merged turns for starving adapters, and thresholds learned while serving",
    },
)
