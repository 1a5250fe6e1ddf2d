"""Defines presets of TOPPINGS, its ablations and baselines, and our change of its assistance."""

from msgspec.structs import replace

from lorikeet.core.plan import KernelForm
from lorikeet.presets import (
    ColdStart,
    HostLayers,
    KvAfterFinish,
    LayerGroups,
    PrefillApart,
    Preset,
    PresetGroup,
)

# A new request interrupts the decodes: prompts are computed in separate steps (section 2.2).
_ON_DEMAND = Preset(
    kernel_form=KernelForm.PADDED,
    kv_after_finish=KvAfterFinish.DROPPED,
    keep_adapters=False,
    cold_start=ColdStart.BLOCK,
    prefill_apart=PrefillApart.ALWAYS,
)
_TOPPINGS = replace(_ON_DEMAND, cold_start=ColdStart.ASSIST, routing="toppings")
_ASSIST = replace(_TOPPINGS, cold_start=ColdStart.AUTO, prefill_apart=PrefillApart.NEVER)

PRESETS = PresetGroup(
    "TOPPINGS",
    {
        # As printed: host cores compute LoRA of a prefill on layers whose weights have not arrived, BGMV computes the
        # rest, and an adapter stays while a request uses it. Algorithm 1 routes requests. The paper leaves the cost of
        # an empty queue open. This preset uses the sum of equation 2 for no requests.
        "toppings": _TOPPINGS,
        # By the other reading of equation 2, an empty queue has no cost.
        "toppings:empty-free": replace(_TOPPINGS, routing="toppings(empty_is_free=true)"),
        # The adapter arrives as one group (M = 1 in sections 4.1 and 7.3).
        "toppings:one-group": replace(_TOPPINGS, layer_groups=LayerGroups.ONE),
        # The host's layers are planned, even if their weights arrive earlier (section 4.1).
        "toppings:static": replace(_TOPPINGS, host_layers=HostLayers.STATIC),
        # Each host core gets four times as many tokens (section 7.2, S3).
        "toppings:fewer-cores": replace(_TOPPINGS, host_chunk=4),
        # The schedulers of section 7.4 on TOPPINGS' servers.
        "toppings:dlora": replace(_TOPPINGS, routing="dlora", comigration=True),
        "toppings:first-fit": replace(_TOPPINGS, routing="first-fit"),
        "toppings:random": replace(_TOPPINGS, routing="random"),
        # All requests wait while an adapter is loaded for a prefill, as in section 2.3.
        "toppings:on-demand": _ON_DEMAND,
        # Decodes continue while an adapter is loaded, and its prefill begins afterwards (section 4, "strawman").
        "toppings:strawman": replace(_ON_DEMAND, cold_start=ColdStart.WAIT),
        # S-LoRA as TOPPINGS measures it: on demand, with MBGMV.
        "toppings:s-lora": replace(_ON_DEMAND, kernel_form=KernelForm.UNPADDED),
        # All adapters are on the device (section 7.1).
        "cached": replace(_ON_DEMAND, keep_adapters=True, prefetch="all", cold_start=ColdStart.WAIT),
        # The host assists only if its assistance gives an earlier first token than a whole load, and prompts run beside
        # decodes. This preset wins if links are fast, prompts are long, or cores are few.
        "lorikeet:assist": _ASSIST,
        # The host waits for a layer that arrives before the host would have computed it.
        "lorikeet:assist-patient": replace(_ASSIST, host_layers=HostLayers.PATIENT),
    },
    {
        "toppings": "TOPPINGS: host cores assist prefills while their adapter is loaded",
        "cached": "the baseline of TOPPINGS whose adapters are always loaded",
        "lorikeet:assist": "host cores assist prefills of adapters being loaded, where the first token comes sooner",
        "lorikeet:assist-patient": "lorikeet:assist, but not on layers that arrive before host cores would be done",
    },
)
