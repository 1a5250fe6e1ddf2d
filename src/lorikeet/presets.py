"""Presets: named combinations of policy options.

A policy option is one choice of how an engine or a cluster works, such as the eviction policy or the routing. A preset
sets all of them. It describes Lorikeet's own behaviour, or that of a published system, so that systems can be compared
on the same engine. ``lorikeet serve --preset elora`` chooses one; single options can be changed behind the name:
``--preset elora,eviction=lru``.
"""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from lorikeet.config import ConfigError, Count, Seconds, convert
from lorikeet.core.plan import KernelForm
from lorikeet.core.suggestions import unknown_name


class KvAfterFinish(StrEnum):
    """What happens to the KV of a finished request."""

    KEPT = "kept"
    """It stays cached for requests with the same prefix."""
    DROPPED = "dropped"
    """It is freed."""


class HostKv(StrEnum):
    """Which KV is copied to the host tier."""

    NONE = "none"
    """None: evicted KV is dropped."""
    EVICTED = "evicted"
    """KV that is evicted. Its blocks are free when the copy has ended (ELORA)."""
    AHEAD = "ahead"
    """KV that is likely to be used again, before its blocks are needed. Eviction never waits for a copy."""


class MemorySplit(StrEnum):
    """How device memory is divided between adapters and KV."""

    UNIFIED = "unified"
    """Any block can hold either."""
    STATIC = "static"
    """``adapter_share`` of the blocks is for adapters, the rest for KV."""


class PrefillApart(StrEnum):
    """Whether prompts are computed in steps of their own, while decodes wait."""

    NEVER = "never"
    """Beside decodes."""
    ALWAYS = "always"
    """In steps of their own."""
    WHEN_FASTER = "pays"
    """In steps of their own where first tokens come sooner by more than the running answers lose, by measured costs."""


class MergeBy(StrEnum):
    """How the adapter that is merged into the base weights is changed."""

    DELTA = "delta"
    """The weights that the adapters change are computed again."""
    MODEL = "model"
    """A whole merged model replaces the other."""


class ColdStart(StrEnum):
    """What happens while the adapter of a request is being loaded."""

    WAIT = "wait"
    """Only requests for that adapter wait."""
    BLOCK = "block"
    """All requests wait."""
    ASSIST = "assist"
    """Host cores compute LoRA for a prefill on layers that have not arrived; decodes wait. If they cannot, ``wait``."""
    AUTO = "auto"
    """``assist`` if the first token comes sooner with it, else ``wait``."""


class LayerGroups(StrEnum):
    """In how many groups of layers the adapter of an assisted prefill is loaded."""

    PLANNED = "planned"
    """As many as give the earliest first token."""
    ONE = "one"
    """One group."""


class HostLayers(StrEnum):
    """On which layers of an assisted prefill host cores compute LoRA."""

    DYNAMIC = "dynamic"
    """On each layer that has not arrived when it is computed."""
    PATIENT = "patient"
    """As ``dynamic``, except for layers that will arrive sooner than host cores would finish them."""
    STATIC = "static"
    """On the layers of the first group; for the others the prefill waits."""


class MigrationProblem(StrEnum):
    """Which problem is solved to move requests and adapters between replicas (dLoRA, section 5.2)."""

    RELAXED = "relaxed"
    """Requests may be split until the end, and memory that is short costs time for swapping."""
    FULL = "full"
    """The integer program: whole requests, each in the memory of a device or a host."""
    PRINTED_FACTOR = "printed-factor"
    """As ``relaxed``, with the printed migration factor, which does not tell staying from moving."""


class PreemptedKv(StrEnum):
    """What happens to the KV of a preempted sequence."""

    KEPT = "kept"
    """It stays cached, is copied to the host when it is evicted, and is copied back."""
    DROPPED = "dropped"
    """It is freed and computed again."""
    CHEAPER = "cheaper"
    """The faster of the two, by the times of past copies and steps."""


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy options of one system. Policies are named as in their tables, such as ``memory.policies.EVICTION``.

    Attributes:
        kernel_form: how LoRA is computed for a batch of mixed ranks.
        kv_after_finish: what happens to the KV of a finished request.
        host_kv: which KV is copied to the host tier.
        memory_split: whether adapters and KV share all blocks of the device, or each has a fixed part.
        adapter_share: share of the device for adapters if ``memory_split`` is ``static``.
        padded_slots: whether every adapter takes as many blocks as the largest registered one.
        adapter_chain: whether an adapter is a chain of nodes of one block, which is evicted from its end as far as
            blocks are needed, and completed when the adapter is loaded. Else it is one node, moved as one.
        keep_adapters: whether an adapter stays cached after its last running request, until its blocks are needed.
        dependency_tree: whether KV is evicted before its adapter, and later KV before earlier. Else any unneeded node
            may be evicted, and KV may stay without its adapter.
        eviction: which adapters and KV are evicted first.
        prefetch: which adapters and KV are loaded before a request waits for them.
        swap_interval_s: seconds between ticks of the swapper, which evicts and prefetches; 0 for none.
        prefetch_below: the swapper prefetches while less than this share of the device is in use, up to it.
        evict_to: share of the device that stays in use when the swapper evicts from a full device.
        admission: which of the waiting requests is tried next.
        max_step_adapters: most adapters in one step; 0 for no limit.
        prefill_apart: whether prompts are computed in steps of their own, while decodes wait.
        decodes_between_prefills: while sequences run, requests are admitted only after so many decode steps since the
            last prefill.
        preempted_kv: what happens to the KV of a preempted sequence.
        batching_mode: which requests run together, and whether their adapter is merged into the base weights.
        merge_by: how the merged adapter is changed.
        cold_start: what happens while the adapter of a request is being loaded.
        step_hold: a step waits for transfers that requests wait for if those gain more time than all others lose, with
            those in the queue.
        layer_groups: in how many groups of layers the adapter of an assisted prefill is loaded.
        host_layers: on which layers of an assisted prefill host cores compute LoRA.
        host_chunk: tokens per host core in an assisted prefill, as a multiple of the number measured to suit one.
        placement: which replicas of a cluster serve which adapter. This and the options below matter only for several
            replicas.
        placement_period_s: seconds between two placements; each uses the demand of the periods before.
        routing: which of the replicas placed for its adapter gets a request.
        pool_prefetch: whether replicas fetch newly placed adapters immediately; else with the first request.
        pool_share: most bytes of adapters that the machines of all replicas hold, as a share of every adapter on each;
            then the copies that were unused for longest are deleted, but never an adapter's last one.
        comigration: whether requests and their adapters move together from busy replicas to idle ones.
        comigration_problem: which problem says what moves.
    """

    kernel_form: KernelForm = KernelForm.UNPADDED
    kv_after_finish: KvAfterFinish = KvAfterFinish.KEPT
    host_kv: HostKv = HostKv.EVICTED
    memory_split: MemorySplit = MemorySplit.UNIFIED
    adapter_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.2
    padded_slots: bool = False
    adapter_chain: bool = False
    keep_adapters: bool = True
    dependency_tree: bool = True
    eviction: str = "lru"
    prefetch: str = "none"
    swap_interval_s: Seconds = 0.0
    prefetch_below: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    evict_to: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.95
    admission: str = "fifo"
    max_step_adapters: Count = 0
    prefill_apart: PrefillApart = PrefillApart.NEVER
    decodes_between_prefills: Count = 0
    preempted_kv: PreemptedKv = PreemptedKv.CHEAPER
    batching_mode: str = "unmerged"
    merge_by: MergeBy = MergeBy.DELTA
    cold_start: ColdStart = ColdStart.WAIT
    step_hold: bool = False
    layer_groups: LayerGroups = LayerGroups.PLANNED
    host_layers: HostLayers = HostLayers.DYNAMIC
    host_chunk: Annotated[int, msgspec.Meta(ge=1)] = 1
    placement: str = "everywhere"
    placement_period_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    routing: str = "least-loaded"
    pool_prefetch: bool = False
    pool_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    comigration: bool = False
    comigration_problem: MigrationProblem = MigrationProblem.RELAXED


def _but(preset: Preset, **options: Any) -> Preset:
    """Return a copy of a preset with other values for some options."""
    return msgspec.structs.replace(preset, **options)


_PLAIN = Preset(routing="kv-affinity")
_AUTO = _but(
    _PLAIN,
    host_kv=HostKv.AHEAD,
    preempted_kv=PreemptedKv.KEPT,  # at no cost: it is evicted as other KV, without a copy
    prefetch="newest-first",
    swap_interval_s=0.1,
    admission="bounded-sjf",
    eviction="lru:reuse",
    prefill_apart=PrefillApart.WHEN_FASTER,
    step_hold=True,
    cold_start=ColdStart.AUTO,
    routing="seconds",
    pool_share=0.5,
)
_ELORA = Preset(adapter_chain=True, eviction="elora", prefetch="best-first", swap_interval_s=0.1)
_CHAMELEON = Preset(
    kv_after_finish=KvAfterFinish.DROPPED,
    eviction="chameleon",
    prefetch="queue",
    admission="chameleon",
    prefill_apart=PrefillApart.ALWAYS,
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


_CACHE_ALONE = _but(_CHAMELEON, admission="s-lora")
_NO_CACHE: dict[str, Any] = {"eviction": "lru", "keep_adapters": False}
_S_LORA = _but(_CACHE_ALONE, **_NO_CACHE)
# TOPPINGS and its baselines compute prompts in steps of their own: a request that arrives interrupts the decodes
# (section 2.2).
_PREFILL_APART = _but(_ON_DEMAND, prefill_apart=PrefillApart.ALWAYS)
_TOPPINGS = _but(_PREFILL_APART, cold_start=ColdStart.ASSIST, routing="toppings")
_LORASERVE = _but(_ON_DEMAND, prefetch="queue", placement="loraserve", routing="table")
_REPLICATED = _but(_LORASERVE, placement="everywhere", pool_prefetch=True)
_UNMANAGED: dict[str, Any] = {
    "placement": "everywhere",
    "placement_period_s": Preset().placement_period_s,
    "routing": "round-robin",
    "pool_prefetch": False,
    "comigration": False,
}

_TREE_LRU = _but(_ELORA, eviction="lru", prefetch="newest-first")

PRESETS: dict[str, Preset] = {
    # The default: as lorikeet:plain, but KV that is likely to be used again is copied to the host before it is evicted,
    # and the newest of it is prefetched, so that no request waits for a copy to the host.
    "lorikeet:auto": _AUTO,
    # Unified memory with LRU, prefix caching, first come first served, and routing to cached prefixes; KV is copied to
    # the host when it is evicted, and nothing is prefetched.
    "lorikeet:plain": _PLAIN,
    # All requests wait while an adapter is loaded.
    "lorikeet:plain-block": _but(_PLAIN, cold_start=ColdStart.BLOCK),
    # Without prefix caching, as vLLM's --no-enable-prefix-caching.
    "lorikeet:plain-no-reuse": _but(_PLAIN, kv_after_finish=KvAfterFinish.DROPPED, routing="adapter-affinity"),
    # LoRA padded to the largest rank of the batch.
    "lorikeet:plain-padded": _but(_PLAIN, kernel_form=KernelForm.PADDED),
    # LoRA as one einsum over all adapters of the batch.
    "lorikeet:plain-einsum": _but(_PLAIN, kernel_form=KernelForm.EINSUM),
    # Fair shares of served tokens between tenants.
    "lorikeet:fair": _but(_AUTO, admission="fair"),
    # Fair shares of served tokens between adapters.
    "lorikeet:fair-adapter": _but(_AUTO, admission="fair:adapter"),
    # Requests by their priority, as vLLM's priority scheduling.
    "lorikeet:priority": _but(_AUTO, admission="priority"),
    # Requests by the deadline of their first token.
    "lorikeet:deadline": _but(_AUTO, admission="deadline"),
    # Small requests first, by a multi-level queue with token quotas: Chameleon's, changed where memory stays empty or
    # large requests starve. Mean TTFT falls, P99 may rise: docs/decisions/chameleon-queues.md.
    "lorikeet:size-aware": _but(_AUTO, admission="size-aware"),
    # The default, and an adapter is merged while it alone has requests, once its overhead has paid for the switches.
    # Not the default: it takes the memory of the weights twice, and saves little (docs/decisions/merging-paid.md).
    "lorikeet:merge-paid": _but(_AUTO, batching_mode="merge-paid"),
    # Routing to the replica that has most of the prompt's KV.
    "lorikeet:kv-affinity": _but(_AUTO, routing="kv-affinity"),
    # Routing to replicas that have the adapter loaded.
    "lorikeet:adapter-affinity": _but(_AUTO, routing="adapter-affinity"),
    # Routing to the replica with the least load.
    "lorikeet:least-loaded": _but(_AUTO, routing="least-loaded"),
    # Routing to each replica in turn.
    "lorikeet:round-robin": _but(_AUTO, routing="round-robin"),
    # Routing to a random replica.
    "lorikeet:random": _but(_AUTO, routing="random"),
    # ELORA's tree, chains and prefetch with LRU in place of its cost model: 9 to 13 % less TTFT for agents than elora
    # with a quarter of the pool, 1 % more for a chatbot (docs/decisions/memory-policies.md).
    "lorikeet:tree-lru": _TREE_LRU,
    # LoRAServe, with replicas of one rank that share its adapters, the least work instead of a draw, and overflow to
    # other ranks: shorter TTFT tails, for more copies of adapters (docs/decisions/loraserve-placement.md).
    "lorikeet:rank-groups": _but(_LORASERVE, placement="rank-groups", routing="placed-work"),
    # dLoRA, with merged turns for starving adapters, and thresholds and times learned while serving: lower latency
    # below saturation, and on machines where LoRA costs several times the base model (docs/decisions/batching-mode.md).
    "lorikeet:merge-turns": _but(_DLORA, batching_mode="merge-turns"),
    # ELORA as printed: KV and adapters in one tree, evicted and prefetched by its cost model, t in seconds, adapters as
    # chains of blocks. Then without the tree (flat tables), the swapper's model (another name of lorikeet:tree-lru),
    # Eq. 4, visits or recency; with other policies in place of the model; and S-LoRA as the paper measures it.
    "elora": _ELORA,
    "elora:wom": _but(_ELORA, dependency_tree=False, eviction="elora:wom", prefetch="best-first:flat"),
    "elora:wos": _TREE_LRU,
    "elora:wol": _but(_ELORA, eviction="elora:wol"),
    "elora:wov": _but(_ELORA, eviction="elora:wov"),
    "elora:wou": _but(_ELORA, eviction="elora:wou"),
    "elora:bfs": _but(_ELORA, adapter_chain=False, eviction="bfs", prefetch="branches"),
    "elora:rrip": _but(_ELORA, eviction="rrip", prefetch="newest-first"),
    "elora:hawkeye": _but(_ELORA, eviction="hawkeye", prefetch="newest-first"),
    "elora:halp": _but(_ELORA, eviction="halp", prefetch="newest-first"),
    "elora:s-lora": Preset(kv_after_finish=KvAfterFinish.DROPPED, keep_adapters=False),
    # vLLM: a fixed number of adapter slots, the rest of the memory for KV; evicted KV goes to the host, or is gone.
    "vllm-static": _VLLM,
    "vllm-static:discard": _but(_VLLM, host_kv=HostKv.NONE),
    # Chameleon as printed: an adapter cache, and a multi-level queue by request size; then its ablations, and S-LoRA
    # with its own batching, on which the paper builds.
    "chameleon": _CHAMELEON,
    "chameleon:output-only": _but(_CHAMELEON, admission="chameleon:output-only"),
    "chameleon:no-cache": _but(_CHAMELEON, **_NO_CACHE),
    "chameleon:no-scheduler": _CACHE_ALONE,
    "chameleon:lru": _but(_CACHE_ALONE, eviction="chameleon:lru"),
    "chameleon:fairshare": _but(_CACHE_ALONE, eviction="chameleon:fairshare"),
    "chameleon:lru-full": _but(_CHAMELEON, eviction="chameleon:lru"),
    "chameleon:fairshare-full": _but(_CHAMELEON, eviction="chameleon:fairshare"),
    "chameleon:prefetch": _but(_CHAMELEON, prefetch="histogram"),
    "chameleon:s-lora": _S_LORA,
    # As its published code batches: requests are admitted after ten decode steps. The paper has both systems admit in
    # every iteration.
    "chameleon:s-lora-code": _but(_S_LORA, decodes_between_prefills=10),
    "chameleon:sjf": _but(_S_LORA, admission="sjf"),
    "chameleon:sjf-aging": _but(_S_LORA, admission="sjf:aging"),
    # dLoRA as printed: merged and unmerged batches, placement by burst tolerance, co-migration; then credits of other
    # sizes, its ablations and its baselines.
    "dlora": _DLORA,
    "dlora:no-credits": _but(_DLORA, batching_mode="dlora:no-credits"),
    "dlora:no-tuning": _but(_DLORA, batching_mode="dlora:no-tuning"),
    "dlora:patience-64": _but(_DLORA, batching_mode="dlora:patience-64"),
    "dlora:patience-16384": _but(_DLORA, batching_mode="dlora:patience-16384"),
    "dlora:full-ilp": _but(_DLORA, comigration_problem=MigrationProblem.FULL),
    "dlora:printed-factor": _but(_DLORA, comigration_problem=MigrationProblem.PRINTED_FACTOR),
    "dlora:proactive": _but(_DLORA, comigration=False),
    "dlora:rr": _but(_DLORA, routing="round-robin", comigration=False),
    "merged-only": _but(_DLORA, batching_mode="merged-only"),
    "unmerged-only": _but(_DLORA, batching_mode="unmerged"),
    "dlora:peft": _but(_DLORA, **_UNMANAGED, batching_mode="one-adapter", kernel_form=KernelForm.UNPADDED),
    "dlora:vllm-uniform": _but(
        _DLORA,
        batching_mode="whole-models:1-s",
        merge_by=MergeBy.MODEL,
        placement="random",
        routing="table",
        comigration=False,
    ),
    "dlora:s-lora": _but(
        _DLORA,
        **_UNMANAGED,
        batching_mode="unmerged",
        kernel_form=KernelForm.UNPADDED,
        admission="s-lora",
        prefill_apart=PrefillApart.ALWAYS,
        decodes_between_prefills=10,
    ),
    # TOPPINGS as printed: host cores compute LoRA of a prefill on layers whose weights have not arrived, BGMV computes
    # the rest, and an adapter stays while a request uses it. Requests go where Algorithm 1 says. The paper leaves open
    # what an empty queue costs: here what the sum of equation 2 gives for no requests.
    "toppings": _TOPPINGS,
    # As toppings, by the other reading of equation 2: an empty queue costs nothing.
    "toppings:empty-free": _but(_TOPPINGS, routing="toppings:empty-free"),
    # The adapter arrives as one group (M = 1 in sections 4.1 and 7.3).
    "toppings:one-group": _but(_TOPPINGS, layer_groups=LayerGroups.ONE),
    # Which layers the host computes is planned, instead of what has not arrived (section 4.1).
    "toppings:static": _but(_TOPPINGS, host_layers=HostLayers.STATIC),
    # Each host core gets four times as many tokens (section 7.2, S3).
    "toppings:fewer-cores": _but(_TOPPINGS, host_chunk=4),
    # The schedulers of section 7.4, on TOPPINGS' servers: dLoRA's, first fit, random.
    "toppings:dlora": _but(_TOPPINGS, routing="dlora", comigration=True),
    "toppings:first-fit": _but(_TOPPINGS, routing="first-fit"),
    "toppings:random": _but(_TOPPINGS, routing="random"),
    # All requests wait while an adapter is loaded for a prefill, as in section 2.3.
    "toppings:on-demand": _PREFILL_APART,
    # Decodes go on while it is loaded, and its prefill begins then (section 4, "strawman").
    "toppings:strawman": _but(_PREFILL_APART, cold_start=ColdStart.WAIT),
    # S-LoRA as TOPPINGS has it: on demand, with MBGMV.
    "toppings:s-lora": _but(_PREFILL_APART, kernel_form=KernelForm.UNPADDED),
    # All adapters are on the device (section 7.1).
    "cached": _but(_PREFILL_APART, keep_adapters=True, prefetch="all", cold_start=ColdStart.WAIT),
    # TOPPINGS' servers, but the host assists only if the first token comes sooner with it than after a whole load, and
    # prompts run beside decodes. Wins where links are fast, prompts long, or cores few.
    "lorikeet:assist": _but(_TOPPINGS, cold_start=ColdStart.AUTO, prefill_apart=PrefillApart.NEVER),
    # The same with a host that waits for a layer which arrives before it would be done.
    "lorikeet:assist-patient": _but(
        _TOPPINGS,
        cold_start=ColdStart.AUTO,
        host_layers=HostLayers.PATIENT,
        prefill_apart=PrefillApart.NEVER,
    ),
    # LoRAServe as printed: placement of adapters on replicas by rank and demand; then a variant and its baselines.
    "loraserve": _LORASERVE,
    "loraserve:prefetch": _but(_LORASERVE, pool_prefetch=True),
    "loraserve:random": _but(_LORASERVE, placement="random"),
    "loraserve:random-iid": _but(_LORASERVE, placement="random-iid"),
    "loraserve:contiguous": _but(_LORASERVE, placement="contiguous"),
    "loraserve:toppings": _but(_REPLICATED, routing="fewest-tokens"),
    "loraserve:toppings-rank": _but(_REPLICATED, routing="loraserve:toppings-rank"),
}
"""Presets by name. A new policy needs one file, one entry in its table, and one preset here."""

CHOICES: dict[str, tuple[str, ...]] = {
    field.name: tuple(field.type)
    for field in msgspec.structs.fields(Preset)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum)
}
"""Allowed values of the options that are not policies with tables."""

_CLUSTER_OPTIONS = (
    "placement",
    "placement_period_s",
    "routing",
    "pool_prefetch",
    "pool_share",
    "comigration",
    "comigration_problem",
)

MERGING_MODES = frozenset(
    {
        "dlora",
        "dlora:no-credits",
        "dlora:no-tuning",
        "dlora:patience-64",
        "dlora:patience-16384",
        "merge-turns",
        "merge-paid",
        "merged-only",
        "whole-models",
        "whole-models:0-s",
        "whole-models:0.1-s",
        "whole-models:1-s",
        "whole-models:10-s",
    }
)
"""Batching modes that may merge an adapter into the base weights; ranks keep unmerged copies only for them."""

AUTO_PRESET = "lorikeet:auto"
"""The preset that ``auto`` selects."""


def resolve_preset(name: str) -> tuple[str, Preset]:
    """Return the full name and the preset for ``name`` (``auto`` included).

    Options may be changed behind the name: ``vllm-static,adapter_share=0.35``.

    Raises:
        ConfigError: the preset or an option is unknown, or a value is wrong; the message lists the allowed ones.
    """
    base, *changes = (part.strip() for part in name.split(","))
    full = AUTO_PRESET if base == "auto" else base
    if full not in PRESETS:
        known = ["auto", AUTO_PRESET, *sorted(PRESETS.keys() - {AUTO_PRESET}, key=lambda each: (":" in each, each))]
        raise ConfigError(f"{unknown_name('preset', base, known)} (`lorikeet presets` lists all)")
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
    """Return the preset with the defaults of all options that matter only for several replicas."""
    default = Preset()
    return _but(preset, **{option: getattr(default, option) for option in _CLUSTER_OPTIONS})
