"""Presets: every system by name, as one choice on each of the design's options (idea 5)."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from lorikeet.config import ConfigError, Count, Seconds, convert
from lorikeet.core.plan import KernelForm
from lorikeet.core.suggestions import unknown_name


class KvAfterFinish(StrEnum):
    """What becomes of a request's KV when it finishes."""

    KEPT = "kept"
    DROPPED = "dropped"


class MemorySplit(StrEnum):
    """How device memory is divided between adapters and KV."""

    UNIFIED = "unified"
    """Not at all: any block serves either."""
    STATIC = "static"
    """``adapter_share`` of it is for adapters, the rest for KV."""


class MergeBy(StrEnum):
    """How another adapter comes to be merged into the base weights."""

    DELTA = "delta"
    """The weights that it touches are computed anew."""
    MODEL = "model"
    """A whole merged model takes the place of another."""


class ColdStart(StrEnum):
    """What happens while a request's adapter is transferred."""

    WAIT = "wait"
    """Only requests of that adapter wait."""
    BLOCK = "block"
    """Everything waits until the transfer has ended."""
    ASSIST = "assist"
    """Host cores compute what the adapter adds to a prefill on layers that have not arrived; decodes wait. Where they
    cannot, as ``wait``."""
    AUTO = "auto"
    """``assist`` where it brings the first token sooner, else ``wait``."""


class LayerGroups(StrEnum):
    """In how many parts an adapter whose prefill is assisted arrives."""

    PLANNED = "planned"
    """As many as bring the first token soonest."""
    ONE = "one"
    """All at once."""


class HostLayers(StrEnum):
    """On which layers of an assisted prefill the host computes."""

    DYNAMIC = "dynamic"
    """On each that has not arrived when its turn comes."""
    PATIENT = "patient"
    """The same, but a layer is waited for that will arrive sooner than the host would be done with it."""
    STATIC = "static"
    """On those of the first group; the others are waited for."""


class PreemptedKv(StrEnum):
    """What becomes of the KV of a sequence that must wait again."""

    KEPT = "kept"
    """It may go to the host tier, and comes back from there."""
    DROPPED = "dropped"
    """It is computed again."""
    CHEAPER = "cheaper"
    """Whichever takes less time, by the copies and steps so far."""


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system: a choice on every option. Policies are named as their tables name them.

    Attributes:
        kernel_form: how a batch of mixed ranks is computed.
        kv_after_finish: what becomes of a request's KV.
        host_kv: KV that leaves the device goes to the host tier; else it is gone.
        memory_split: whether any block of the device serves adapters and KV alike, or they have parts of their own.
        adapter_share: of the device that adapters have if it is divided.
        padded_slots: an adapter takes as much of the device as the largest known one.
        keep_adapters: an adapter stays after its last running request, while nobody needs its room.
        dependency_tree: KV leaves the device before its adapter does, and later KV before earlier. Else anything that
            no sequence needs may leave, and KV may stay behind without what it depends on.
        eviction: who leaves first.
        prefetch: what is brought before anybody waits for it.
        swap_interval_s: time between the swapper's ticks; 0 for none.
        prefetch_below: it prefetches while less than this share of the device is in use, and up to it.
        evict_to: share of the device in use that it leaves when it finds the device full.
        admission: who of the waiting requests is tried next.
        max_step_adapters: most adapters in one step; 0 for no limit.
        preempted_kv: what becomes of the KV of a sequence that must wait again.
        batching_mode: who of the admitted and the waiting requests runs, and whether their adapter is merged.
        merge_by: how another adapter comes to be merged.
        cold_start: what happens while a request's adapter is transferred.
        layer_groups: in how many parts an adapter whose prefill is assisted arrives.
        host_layers: on which layers of an assisted prefill the host computes.
        host_chunk: an assisted prefill uses a host core for so many times the tokens that were measured to suit one.
        placement: which replicas of a cluster serve an adapter. One replica alone has no use for this and what follows.
        placement_period_s: time between two placements, each by the demand of the periods before.
        routing: which replica gets a request, of those that the placement names for its adapter.
        pool_prefetch: replicas fetch what a new placement gives them at once; else with the first request.
        comigration: requests and their adapters move together from busy replicas to idle ones.
    """

    kernel_form: KernelForm = KernelForm.UNPADDED
    kv_after_finish: KvAfterFinish = KvAfterFinish.KEPT
    host_kv: bool = True
    memory_split: MemorySplit = MemorySplit.UNIFIED
    adapter_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.2
    padded_slots: bool = False
    keep_adapters: bool = True
    dependency_tree: bool = True
    eviction: str = "lru"
    prefetch: str = "none"
    swap_interval_s: Seconds = 0.0
    prefetch_below: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    evict_to: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    admission: str = "fifo"
    max_step_adapters: Count = 0
    preempted_kv: PreemptedKv = PreemptedKv.CHEAPER
    batching_mode: str = "unmerged"
    merge_by: MergeBy = MergeBy.DELTA
    cold_start: ColdStart = ColdStart.WAIT
    layer_groups: LayerGroups = LayerGroups.PLANNED
    host_layers: HostLayers = HostLayers.DYNAMIC
    host_chunk: Annotated[int, msgspec.Meta(ge=1)] = 1
    placement: str = "everywhere"
    placement_period_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    routing: str = "least-loaded"
    pool_prefetch: bool = False
    comigration: bool = False


_PLAIN = Preset(routing="kv-affinity")

_ELORA = Preset(eviction="elora", prefetch="best-first", swap_interval_s=0.1)
_CHAMELEON = Preset(
    kv_after_finish=KvAfterFinish.DROPPED,
    eviction="chameleon",
    prefetch="queue",
    admission="chameleon",
    cold_start=ColdStart.BLOCK,
)
_DLORA = Preset(
    kernel_form=KernelForm.EINSUM,
    kv_after_finish=KvAfterFinish.DROPPED,
    prefetch="all",
    batching_mode="dlora",
    cold_start=ColdStart.BLOCK,
    placement="dlora",
    placement_period_s=60.0,
    routing="dlora",
    pool_prefetch=True,
    comigration=True,
)
_ON_DEMAND = Preset(
    kernel_form=KernelForm.PADDED,
    kv_after_finish=KvAfterFinish.DROPPED,
    keep_adapters=False,
    cold_start=ColdStart.BLOCK,
)
_VLLM = Preset(memory_split=MemorySplit.STATIC, padded_slots=True, dependency_tree=False)


def _but(preset: Preset, **options: Any) -> Preset:
    return msgspec.structs.replace(preset, **options)


_CACHE_ALONE = _but(_CHAMELEON, admission="fifo")
_NO_CACHE: dict[str, Any] = {"eviction": "lru", "keep_adapters": False}
_S_LORA = _but(_CACHE_ALONE, **_NO_CACHE)
_TOPPINGS = _but(_ON_DEMAND, cold_start=ColdStart.ASSIST, routing="toppings")
_LORASERVE = _but(_S_LORA, kernel_form=KernelForm.PADDED, placement="loraserve", routing="table")
_REPLICATED = _but(_LORASERVE, placement="everywhere", pool_prefetch=True)
_UNMANAGED: dict[str, Any] = {
    "placement": "everywhere",
    "placement_period_s": Preset().placement_period_s,
    "routing": "round-robin",
    "pool_prefetch": False,
    "comigration": False,
}

PRESETS: dict[str, Preset] = {
    "lorikeet:plain": _PLAIN,
    "lorikeet:plain-block": _but(_PLAIN, cold_start=ColdStart.BLOCK),
    "lorikeet:plain-no-reuse": _but(_PLAIN, kv_after_finish=KvAfterFinish.DROPPED, routing="adapter-affinity"),
    "lorikeet:plain-padded": _but(_PLAIN, kernel_form=KernelForm.PADDED),
    "lorikeet:plain-einsum": _but(_PLAIN, kernel_form=KernelForm.EINSUM),
    "lorikeet:fair": _but(_PLAIN, admission="fair"),
    "lorikeet:fair-adapter": _but(_PLAIN, admission="fair:adapter"),
    "lorikeet:priority": _but(_PLAIN, admission="priority"),
    "lorikeet:deadline": _but(_PLAIN, admission="deadline"),
    "lorikeet:kv-affinity": _PLAIN,
    "lorikeet:adapter-affinity": _but(_PLAIN, routing="adapter-affinity"),
    "lorikeet:least-loaded": _but(_PLAIN, routing="least-loaded"),
    "lorikeet:round-robin": _but(_PLAIN, routing="round-robin"),
    "lorikeet:random": _but(_PLAIN, routing="random"),
    "elora": _ELORA,
    "elora:literal": _but(_ELORA, eviction="elora:literal"),
    "elora:tau-1": _but(_ELORA, eviction="elora:tau-1"),
    "elora:tau-10": _but(_ELORA, eviction="elora:tau-10"),
    "elora:tau-300": _but(_ELORA, eviction="elora:tau-300"),
    "elora:wom": _but(_ELORA, dependency_tree=False, prefetch="best-first:flat"),
    "elora:wos": _but(_ELORA, eviction="lru", prefetch="newest-first"),
    "elora:wol": _but(_ELORA, eviction="elora:wol"),
    "elora:woc": _but(_ELORA, eviction="elora:woc"),
    "elora:wov": _but(_ELORA, eviction="elora:wov"),
    "elora:wou": _but(_ELORA, eviction="elora:wou"),
    "elora:bfs": _but(_ELORA, eviction="bfs", prefetch="branches"),
    "elora:rrip": _but(_ELORA, eviction="rrip", prefetch="newest-first"),
    "elora:hawkeye": _but(_ELORA, eviction="hawkeye", prefetch="newest-first"),
    "elora:halp": _but(_ELORA, eviction="halp", prefetch="newest-first"),
    "elora:s-lora": Preset(kv_after_finish=KvAfterFinish.DROPPED),
    "vllm-static": _VLLM,
    "vllm-static:discard": _but(_VLLM, host_kv=False),
    "chameleon": _CHAMELEON,
    "chameleon:literal": _but(_CHAMELEON, admission="chameleon:literal"),
    "chameleon:lazy": _but(_CHAMELEON, admission="chameleon:lazy"),
    "chameleon:output-only": _but(_CHAMELEON, admission="chameleon:output-only"),
    "chameleon:no-cache": _but(_CHAMELEON, **_NO_CACHE),
    "chameleon:no-scheduler": _CACHE_ALONE,
    "chameleon:lru": _but(_CACHE_ALONE, eviction="chameleon:lru"),
    "chameleon:fairshare": _but(_CACHE_ALONE, eviction="chameleon:fairshare"),
    "chameleon:lru-full": _but(_CHAMELEON, eviction="chameleon:lru"),
    "chameleon:fairshare-full": _but(_CHAMELEON, eviction="chameleon:fairshare"),
    "chameleon:prefetch": _but(_CHAMELEON, prefetch="histogram"),
    "chameleon:s-lora": _S_LORA,
    "chameleon:sjf": _but(_S_LORA, admission="sjf"),
    "chameleon:sjf-aging": _but(_S_LORA, admission="sjf:aging"),
    "dlora": _DLORA,
    "dlora:no-credits": _but(_DLORA, batching_mode="dlora:no-credits"),
    "dlora:no-tuning": _but(_DLORA, batching_mode="dlora:no-tuning"),
    "dlora:alone": _but(_DLORA, batching_mode="dlora:alone"),
    "dlora:proactive": _but(_DLORA, comigration=False),
    "dlora:rr": _but(_DLORA, routing="round-robin", comigration=False),
    "merged-only": _but(_DLORA, batching_mode="merged-only"),
    "unmerged-only": _but(_DLORA, batching_mode="unmerged"),
    "dlora:peft": _but(_DLORA, **_UNMANAGED, batching_mode="one-adapter", kernel_form=KernelForm.UNPADDED),
    "dlora:vllm-uniform": _but(
        _DLORA,
        batching_mode="whole-models",
        merge_by=MergeBy.MODEL,
        placement="random",
        routing="table",
        comigration=False,
    ),
    "dlora:s-lora": _but(_DLORA, **_UNMANAGED, batching_mode="unmerged", kernel_form=KernelForm.UNPADDED),
    "toppings": _TOPPINGS,
    "toppings:auto": _but(_TOPPINGS, cold_start=ColdStart.AUTO),
    "toppings:one-group": _but(_TOPPINGS, layer_groups=LayerGroups.ONE),
    "toppings:patient": _but(_TOPPINGS, host_layers=HostLayers.PATIENT),
    "toppings:static": _but(_TOPPINGS, host_layers=HostLayers.STATIC),
    "toppings:fewer-cores": _but(_TOPPINGS, host_chunk=4),
    "toppings:dlora": _but(_TOPPINGS, routing="dlora", comigration=True),
    "toppings:first-fit": _but(_TOPPINGS, routing="first-fit"),
    "toppings:random": _but(_TOPPINGS, routing="random"),
    "toppings:empty-free": _but(_TOPPINGS, routing="toppings:empty-free"),
    "toppings:on-demand": _ON_DEMAND,
    "toppings:strawman": _but(_ON_DEMAND, cold_start=ColdStart.WAIT),
    "toppings:s-lora": _but(_ON_DEMAND, kernel_form=KernelForm.UNPADDED),
    "cached": _but(_ON_DEMAND, keep_adapters=True, prefetch="all", cold_start=ColdStart.WAIT),
    "loraserve": _but(_LORASERVE, routing="loraserve"),
    "loraserve:literal": _but(_LORASERVE, placement="loraserve:literal"),
    "loraserve:prefetch": _but(_LORASERVE, routing="loraserve", pool_prefetch=True),
    "loraserve:random": _but(_LORASERVE, placement="random"),
    "loraserve:random-iid": _but(_LORASERVE, placement="random-iid"),
    "loraserve:contiguous": _but(_LORASERVE, placement="contiguous"),
    "loraserve:toppings": _but(_REPLICATED, routing="fewest-tokens"),
    "loraserve:toppings-rank": _but(_REPLICATED, routing="loraserve:toppings-rank"),
}
"""Every system by name. A new policy is one file and one preset here."""

CHOICES: dict[str, tuple[str, ...]] = {
    field.name: tuple(field.type)
    for field in msgspec.structs.fields(Preset)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum)
}
"""What an option may be, of those that are no policies with tables of their own."""

_CLUSTER_OPTIONS = ("placement", "placement_period_s", "routing", "pool_prefetch", "comigration")

MERGING_MODES = frozenset(
    {"dlora", "dlora:no-credits", "dlora:no-tuning", "dlora:alone", "merged-only", "whole-models"}
)
"""Batching modes that may merge an adapter into the base weights. For them alone ranks keep pristine copies."""

AUTO_PRESET = "lorikeet:plain"
"""What ``auto`` stands for today; the start-up log says it."""


def resolve_preset(name: str) -> tuple[str, Preset]:
    """Return the full name and the preset for ``name`` (``auto`` included).

    Options may be set otherwise behind the name: ``vllm-static,adapter_share=0.35``.

    Raises:
        ConfigError: there is no such preset or option, or a wrong value; the message lists what there is.
    """
    base, *changes = (part.strip() for part in name.split(","))
    full = AUTO_PRESET if base == "auto" else base
    if full not in PRESETS:
        known = ["auto", AUTO_PRESET, *sorted(PRESETS.keys() - {AUTO_PRESET}, key=lambda each: (":" in each, each))]
        raise ConfigError(unknown_name("preset", base, known))
    if not changes:
        return full, PRESETS[full]
    options = msgspec.to_builtins(PRESETS[full])
    for change in changes:
        option, _, value = change.partition("=")
        if option not in options:
            raise ConfigError(f"preset {name!r}: {unknown_name('option', option, list(options))}")
        choices = CHOICES.get(option)
        if choices is not None and value not in choices:
            raise ConfigError(f"preset {name!r}: {option} is one of {', '.join(choices)}, not {value!r}")
        options[option] = value
    return ",".join([full, *changes]), convert(options, Preset, f"preset {name!r}")


def describe_preset(name: str) -> str:
    """Return what ``name`` stands for, for the start-up log: ``preset auto = lorikeet:plain``.

    Options set behind the name are listed where they differ from the preset's own, which follow in brackets.

    Raises:
        ConfigError: see :func:`resolve_preset`.
    """
    base, _, _ = name.partition(",")
    full, preset = resolve_preset(name)
    base, full = base.strip(), full.partition(",")[0]
    own, used = msgspec.to_builtins(PRESETS[full]), msgspec.to_builtins(preset)
    changed = [f"{option}={used[option]} ({own[option]})" for option in own if used[option] != own[option]]
    words = f"preset {base}" if base == full else f"preset {base} = {full}"
    return f"{words} with {', '.join(changed)}" if changed else words


def for_one_replica(preset: Preset) -> Preset:
    """Return the preset with defaults on the options that one replica alone has no use for."""
    default = Preset()
    return _but(preset, **{option: getattr(default, option) for option in _CLUSTER_OPTIONS})
