"""Defines presets: named combinations of policy options.

A policy option chooses one behaviour of an engine or a cluster, such as the eviction policy or the routing. A preset
sets all options. It describes Lorikeet's behaviour or a published system's, so that systems can be compared on the same
engine. ``lorikeet serve --preset elora`` chooses one; single options can be changed behind the name: ``--preset
elora,eviction=lru``.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from lorikeet import plugins
from lorikeet.config import ConfigError, Count, Seconds, convert
from lorikeet.core.plan import KernelForm
from lorikeet.core.text import unknown_name
from lorikeet.plugins import split_options


class KvAfterFinish(StrEnum):
    """Treatment of the KV of a finished request."""

    KEPT = "kept"
    """The KV stays cached for requests with the same prefix."""
    DROPPED = "dropped"
    """The KV is freed."""


class HostKv(StrEnum):
    """KV that is copied to the host tier."""

    NONE = "none"
    """No KV is copied. Evicted KV is dropped."""
    EVICTED = "evicted"
    """KV is copied when it is evicted. Its blocks are free after the copy has ended (ELORA)."""
    AHEAD = "ahead"
    """KV that is likely to be reused is copied before its blocks are needed. Eviction never waits for a copy."""


class MemorySplit(StrEnum):
    """Division of device memory between adapters and KV."""

    UNIFIED = "unified"
    """Any block can hold an adapter or KV."""
    STATIC = "static"
    """``adapter_share`` of the blocks is for adapters, the rest for KV."""


class PrefillApart(StrEnum):
    """Choice between prefills in the same steps as decodes, and prefills in separate steps while decodes wait."""

    NEVER = "never"
    """Prefills run in the same steps as decodes."""
    ALWAYS = "always"
    """Prefills run in separate steps."""
    WHEN_FASTER = "pays"
    """Prefills run in separate steps if first tokens gain more time than running answers lose, by measured costs."""


class MergeBy(StrEnum):
    """Way to change the adapter that is merged into the base weights."""

    DELTA = "delta"
    """The weights that the two adapters change are computed again."""
    MODEL = "model"
    """A whole merged model replaces the previous one."""


class ColdStart(StrEnum):
    """Behaviour while the adapter of a request is loaded."""

    WAIT = "wait"
    """Only requests for that adapter wait."""
    BLOCK = "block"
    """All requests wait."""
    ASSIST = "assist"
    """Host cores compute LoRA for a prefill on layers that have not arrived, while decodes wait. Without host cores,
    requests wait as with ``wait``."""
    AUTO = "auto"
    """``assist`` if it gives an earlier first token, otherwise ``wait``."""


class LayerGroups(StrEnum):
    """Number of groups of layers in which the adapter of an assisted prefill is loaded."""

    PLANNED = "planned"
    """The number of groups that gives the earliest first token."""
    ONE = "one"
    """One group."""


class HostLayers(StrEnum):
    """Layers of an assisted prefill on which host cores compute LoRA."""

    DYNAMIC = "dynamic"
    """Each layer that has not arrived when the prefill reaches it."""
    PATIENT = "patient"
    """The layers of ``dynamic``, except layers that will arrive before host cores could finish them."""
    STATIC = "static"
    """The layers of the first group. The prefill waits for all other layers."""


class MigrationProblem(StrEnum):
    """The optimisation problem that decides which requests and adapters move between replicas (dLoRA, section 5.2)."""

    RELAXED = "relaxed"
    """Requests may be split until the last step, and a lack of memory costs time for swapping."""
    FULL = "full"
    """The integer program: each request moves as a whole, and is in the memory of a device or a host."""
    PRINTED_FACTOR = "printed-factor"
    """``relaxed`` with the paper's printed migration factor, which is the same for staying and moving."""


class PreemptedKv(StrEnum):
    """Treatment of the KV of a preempted sequence."""

    KEPT = "kept"
    """The KV stays cached. Evicted KV is copied to the host and later copied back."""
    DROPPED = "dropped"
    """The KV is freed and computed again."""
    CHEAPER = "cheaper"
    """The faster of the other two options, by the times of past copies and steps."""


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the policy options of one system. ``lorikeet.policies`` has the names of policies.

    A policy's parameters follow its name: ``dlora(patience=64)``.

    Only presets that reproduce a paper's system set the options marked "(papers)".

    Attributes:
        kernel_form: way to compute LoRA for a batch of mixed ranks.
        kv_after_finish: treatment of the KV of a finished request.
        host_kv: KV that is copied to the host tier: ``none``, KV that is ``evicted``, or KV ``ahead`` of its eviction.
        memory_split: whether adapters and KV share all blocks of the device, or each has a fixed part (papers).
        adapter_share: share of the device for adapters if ``memory_split`` is ``static`` (papers).
        padded_slots: whether every adapter takes as many blocks as the largest registered one (papers).
        adapter_chain: whether an adapter is a chain of nodes of one block. A chain is evicted from its end, as far as
            blocks are needed, and only the missing blocks are loaded again. Otherwise an adapter is one node.
        keep_adapters: whether an adapter stays cached after its last running request, until its blocks are needed.
        dependency_tree: whether KV is evicted before its adapter, and later KV before earlier. Otherwise any unneeded
            node may be evicted, and KV may stay without its adapter; only papers' presets do that.
        eviction: policy that orders the eviction of adapters and KV.
        prefetch: policy that chooses adapters and KV to load before a request waits for them.
        swap_interval_s: seconds between ticks of the swapper, which evicts and prefetches; 0 for no ticks.
        admission: policy that chooses the next waiting request to admit.
        prefill_apart: whether prefills run in separate steps, while decodes wait.
        decodes_between_prefills: number of decode steps after a prefill before requests are admitted, while sequences
            run (papers).
        preempted_kv: treatment of the KV of a preempted sequence.
        batching: policy that chooses the requests that run together, and the adapter that is merged into the base
            weights.
        merge_by: way to change the merged adapter (papers).
        cold_start: behaviour while the adapter of a request is loaded.
        step_hold: whether a step is delayed until a pending transfer ends, if the requests that wait for it gain more
            time than all running and queued requests lose.
        layer_groups: number of groups of layers in which the adapter of an assisted prefill is loaded (papers).
        host_layers: layers of an assisted prefill on which host cores compute LoRA.
        host_chunk: tokens per host core in an assisted prefill, as a multiple of the number that was measured to suit
            a core (papers).
        placement: policy that places adapters on the replicas of a cluster. This option and the following ones matter
            only for several replicas.
        placement_period_s: seconds between two placements; each uses the demand of the periods before.
        routing: policy that routes a request to one of the replicas that have its adapter.
        pool_prefetch: whether replicas fetch newly placed adapters immediately, instead of with the first request.
        pool_share: limit on the adapters that all machines hold together, as a share of a full copy on each machine.
            Beyond the limit, the copies unused for longest are deleted, except an adapter's last copy.
        comigration: whether requests and their adapters move together from busy replicas to idle ones.
        comigration_problem: the optimisation problem that decides what moves (papers).
        guard: whether copies ahead of eviction, eviction by reuse, the order of admission and loads of KV act only
            while they cost requests less time than their simple alternatives, as the engine measures it.
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
    admission: str = "fifo"
    prefill_apart: PrefillApart = PrefillApart.NEVER
    decodes_between_prefills: Count = 0
    preempted_kv: PreemptedKv = PreemptedKv.CHEAPER
    batching: str = "unmerged"
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
    guard: bool = False


class PresetGroup(NamedTuple):
    """Presets that a package offers together, such as the presets of a paper.

    Attributes:
        title: heading in ``lorikeet presets --all``.
        presets: presets by name.
        about: a line about each preset, by name. Presets without a line are shown by their options.
    """

    title: str
    presets: Mapping[str, Preset]
    about: Mapping[str, str] = {}


_PLAIN = Preset(routing="kv-affinity")
_AUTO = replace(
    _PLAIN,
    host_kv=HostKv.AHEAD,
    preempted_kv=PreemptedKv.KEPT,  # Keeping the KV costs nothing: it is evicted like other KV, without a copy.
    prefetch="newest-first",
    swap_interval_s=0.1,
    admission="bounded-sjf",
    eviction="lru:reuse",
    prefill_apart=PrefillApart.WHEN_FASTER,
    step_hold=True,
    cold_start=ColdStart.AUTO,
    routing="seconds",
    pool_share=0.5,
    guard=True,
)

OWN = PresetGroup(
    "Lorikeet",
    {
        # The default. It copies KV that is likely to be reused to the host before the eviction, and prefetches the
        # newest, so that no request waits for a copy to the host. It admits short requests first within bounds, evicts
        # rarely reused KV of adapters first, runs prefills in separate steps and lets host cores assist cold prefills
        # where these pay, and routes by the seconds that a request adds.
        "lorikeet:auto": _AUTO,
        # Unified memory with LRU, prefix caching, first come first served, and routing to cached prefixes. Evicted KV
        # is copied to the host, and nothing is prefetched.
        "lorikeet:plain": _PLAIN,
        "lorikeet:plain-block": replace(_PLAIN, cold_start=ColdStart.BLOCK),
        "lorikeet:plain-no-reuse": replace(_PLAIN, kv_after_finish=KvAfterFinish.DROPPED, routing="adapter-affinity"),
        "lorikeet:plain-padded": replace(_PLAIN, kernel_form=KernelForm.PADDED),
        "lorikeet:plain-einsum": replace(_PLAIN, kernel_form=KernelForm.EINSUM),
        "lorikeet:fair": replace(_AUTO, admission="fair"),
        "lorikeet:fair-adapter": replace(_AUTO, admission="fair(by=adapter)"),
        "lorikeet:priority": replace(_AUTO, admission="priority"),
        "lorikeet:deadline": replace(_AUTO, admission="deadline"),
        # This preset is not the default, since it takes the memory of the weights twice and saves little
        # (docs/decisions/merging-paid.md).
        "lorikeet:merge-paid": replace(_AUTO, batching="merge-paid"),
        "lorikeet:kv-affinity": replace(_AUTO, routing="kv-affinity"),
        "lorikeet:adapter-affinity": replace(_AUTO, routing="adapter-affinity"),
        "lorikeet:least-loaded": replace(_AUTO, routing="least-loaded"),
        "lorikeet:round-robin": replace(_AUTO, routing="round-robin"),
        "lorikeet:random": replace(_AUTO, routing="random"),
        # TTFT is 9 to 13 % shorter than with elora for agents with a quarter of the pool, and 1 % longer for a chatbot
        # (docs/decisions/memory-policies.md).
        "lorikeet:tree-lru": Preset(adapter_chain=True, eviction="lru", prefetch="newest-first", swap_interval_s=0.1),
        # Replicas of one rank share its adapters, the replica with the least work gets the request, and requests
        # overflow to other ranks: shorter TTFT tails than with loraserve, for more copies of adapters
        # (docs/decisions/loraserve-placement.md).
        "lorikeet:rank-groups": Preset(
            kernel_form=KernelForm.PADDED,
            kv_after_finish=KvAfterFinish.DROPPED,
            keep_adapters=False,
            prefetch="queue",
            cold_start=ColdStart.BLOCK,
            placement="rank-groups",
            routing="placed-work",
        ),
    },
    {
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
        "lorikeet:merge-paid": "an adapter is merged while it alone has requests, once that has paid for itself",
        "lorikeet:kv-affinity": "routing to the replica that has most of the prompt's KV",
        "lorikeet:adapter-affinity": "routing to replicas that have the adapter loaded",
        "lorikeet:least-loaded": "routing to the replica with the least load",
        "lorikeet:round-robin": "routing to each replica in turn",
        "lorikeet:random": "routing to a random replica",
        "lorikeet:tree-lru": "KV and adapters in one dependency tree, adapters loaded block by block, LRU",
        "lorikeet:rank-groups": "groups of replicas by rank, and the least work among them",
    },
)
"""The presets for users."""


class PresetTable(Mapping[str, Preset]):
    """Finds all presets by name: the product's, the papers', and those of other packages.

    An entry point of the group ``lorikeet.presets`` has the name of a preset, or of a family whose presets are called
    ``FAMILY:VARIANT``, and is a :class:`PresetGroup`. The entry point is imported when a name of its family is looked
    up.

    Args:
        own: the product's presets.
    """

    group = "lorikeet.presets"

    def __init__(self, own: PresetGroup) -> None:
        self.own = own

    def __getitem__(self, name: str) -> Preset:
        """Return a preset.

        Raises:
            KeyError: the name is unknown.
            ConfigError: the preset's package cannot be imported.
        """
        if name in self.own.presets:
            return self.own.presets[name]
        for entry in dict.fromkeys((name, name.partition(":")[0])):
            plugin = plugins.find(self.group, entry, "preset")
            if plugin is not None and name in (found := _group_of(plugin)).presets:
                return found.presets[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Return the names of all presets, except those of packages that cannot be imported."""
        return iter(dict.fromkeys(name for group in self.groups() for name in group.presets))

    def __len__(self) -> int:
        """Return the number of presets."""
        return sum(1 for _ in self)

    def groups(self, on_error: Callable[[ConfigError], None] = lambda error: None) -> list[PresetGroup]:
        """Return the groups of all presets, the product's presets first.

        Args:
            on_error: function that is called with the error of each package that cannot be imported.
        """
        found = [self.own]
        for entry in plugins.names(self.group):
            try:
                plugin = plugins.find(self.group, entry, "preset")
                group = None if plugin is None else _group_of(plugin)
            except ConfigError as error:
                on_error(error)
                continue
            if group is not None and all(group is not each for each in found):
                found.append(group)
        return found

    def names(self) -> list[str]:
        """Return the names that need no import of a package: the product's presets, others, and families."""
        return list(dict.fromkeys([*self.own.presets, *plugins.names(self.group)]))


def _group_of(plugin: plugins.Plugin) -> PresetGroup:
    group = plugin.load("preset")
    if not isinstance(group, PresetGroup):
        raise ConfigError(f"preset {plugin}: expected a PresetGroup, not {type(group).__name__}")
    return group


PRESETS = PresetTable(OWN)
"""All presets by name."""

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

AUTO_PRESET = "lorikeet:auto"
"""The preset that ``auto`` selects."""


def resolve_preset(name: str) -> tuple[str, Preset]:
    """Return the full name and the preset for ``name`` (``auto`` included).

    Options may be changed behind the name: ``vllm-static,adapter_share=0.35``.

    Raises:
        ConfigError: the preset or an option is unknown, or a value is wrong. The message lists the allowed ones.
    """
    base, *changes = split_options(name)
    full = AUTO_PRESET if base == "auto" else base
    try:
        preset = PRESETS[full]
    except KeyError:
        known = ["auto", AUTO_PRESET, *sorted({*PRESETS} - {AUTO_PRESET}, key=lambda each: (":" in each, each))]
        raise ConfigError(f"{unknown_name('preset', base, known)} (`lorikeet presets --all` lists all)") from None
    if not changes:
        return full, preset
    options = msgspec.to_builtins(preset)
    for change in changes:
        option, _, value = change.partition("=")
        if option not in options:
            raise ConfigError(f"preset {name!r}: {unknown_name('option', option, list(options))}")
        choices = CHOICES.get(option)
        if choices is not None and value not in choices:
            raise ConfigError(f"preset {name!r}: {option} must be one of {', '.join(choices)}, not {value!r}")
        options[option] = value
    return ",".join([full, *changes]), convert(options, Preset, f"preset {name!r}")


def describe_preset(name: str) -> str:
    """Return the preset that ``name`` selects, for the start-up log: ``preset auto = lorikeet:auto``.

    Options set behind the name are listed if they differ from the preset's values, which follow in brackets.

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
    return replace(preset, **{option: getattr(default, option) for option in _CLUSTER_OPTIONS})
