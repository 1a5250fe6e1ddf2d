"""Builds the policies of a cluster from a preset: routing, placement and co-migration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from lorikeet.cluster.adapters.copy_times import CopyCosts
from lorikeet.cluster.migration.problem import CoMigrationSettings, MoveTimes
from lorikeet.cluster.placement import PLACEMENT, PlacementOptions
from lorikeet.cluster.placement.base import Placement
from lorikeet.cluster.placement.burst import RESERVED_SHARE
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.routing import ROUTING
from lorikeet.cluster.routing.base import PerformanceModel, Router, RoutingOptions, fit_performance
from lorikeet.config import ConfigError, EngineSettings
from lorikeet.core.extras import install_command
from lorikeet.core.ids import ReplicaId
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo, format_slo
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile, OperatingLoads, ProfileError
from lorikeet.costs.transfers import LinkDirection, TransferModel
from lorikeet.presets import HostKv, MigrationProblem, Preset, resolve_preset

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""Lengths of a mean request where nothing better is known; from LoRAServe's motivation."""

_BATCHES = (4, 8, 16, 32)
_RANKS = (8, 16, 32, 64)
"""Ranks of the steps that performance models are fitted to, with ``_BATCHES``: those of TOPPINGS (section 5)."""

T = TypeVar("T")


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What policies are built with besides preset and profile. Plain values, which can be sent to other processes.

    Attributes:
        seed: of all random draws.
        ttft_s, tpot_s, e2e_s: the SLO; 0 for no limit. `lorikeet serve` has no E2E target.
        memory_bytes: of each replica, for adapters and KV, over all ranks; 0 for the profile's.
        kv_token_bytes: KV of one token, over all ranks; 0 for the profile's.
        link_bytes_per_s: of a declared link (``engine.link_bytes_per_s``); 0 for the profile's.
        prompt_tokens, output_tokens: of a mean request.
        tokens_per_s: operating points by rank; empty for the profile's.
        step_models: TOPPINGS' PrePerf and DecPerf; None to fit them to the profile's steps.
    """

    seed: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    memory_bytes: int = 0
    kv_token_bytes: float = 0.0
    link_bytes_per_s: float = 0.0
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    tokens_per_s: dict[int, float] = {}
    step_models: tuple[PerformanceModel, PerformanceModel] | None = None

    @property
    def slo(self) -> Slo:
        """The SLO in the form of requests."""
        return Slo(self.ttft_s or None, self.tpot_s or None, self.e2e_s or None)


class MigrationCosts(NamedTuple):
    """What co-migration must know of a replica.

    Attributes:
        times: of moves.
        reserved_share: of each replica's memory, not available to requests.
        settings: of the reviews.
    """

    times: MoveTimes
    reserved_share: float
    settings: CoMigrationSettings = CoMigrationSettings()


def build_cluster_policies(
    preset: Preset, replicas: Sequence[ReplicaId], profile: CostProfile | None, options: ClusterOptions
) -> tuple[Router, Placement]:
    """Build the routing and the placement policy; see :func:`build_router` and :func:`build_placement`."""
    return build_router(preset, profile, options), build_placement(preset, replicas, profile, options)


def build_router(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> Router:
    """Build the preset's routing policy.

    Args:
        preset: of all replicas.
        profile: of one of them; None if there is none.
        options: everything else.

    Raises:
        ConfigError: unknown policy, or profile and options lack something that it needs.
    """
    make = _policy("routing", preset.routing, ROUTING)
    needed = _FOR_ROUTING.get(preset.routing)
    return make(RoutingOptions(options.seed) if needed is None else needed(preset, profile, options))


def build_placement(
    preset: Preset, replicas: Sequence[ReplicaId], profile: CostProfile | None, options: ClusterOptions
) -> Placement:
    """Build the preset's placement policy.

    Args:
        preset: of all replicas.
        replicas: to place on, at least one.
        profile: of one of them; None if there is none.
        options: everything else.

    Raises:
        ConfigError: unknown policy, or profile and options lack something that it needs.
        ValueError: no replica.
    """
    make = _policy("placement", preset.placement, PLACEMENT)
    needed = _FOR_PLACEMENT.get(preset.placement)
    return make(replicas, PlacementOptions(options.seed) if needed is None else needed(preset, profile, options))


def build_migration(
    settings: EngineSettings,
    profile: CostProfile | None,
    kv_bytes_per_s: Callable[[], float],
    copies: CopyCosts | None = None,
) -> MigrationCosts | None:
    """Return the costs that co-migration needs; None if the preset has no co-migration.

    KV is sent through the host tiers, and only where one rank holds all of it.

    Args:
        settings: of all replicas.
        profile: of one of them; None if there is none.
        kv_bytes_per_s: returns how fast KV is transferred between replicas.
        copies: says how fast the network between replicas is.

    Raises:
        ConfigError: there is no profile.
    """
    _, preset = resolve_preset(settings.preset)
    if not preset.comigration:
        return None
    profile = _needed(profile, "comigration needs a profile with the cost of a prefill")
    model = CostModel(profile, preset.kernel_form)

    def prefill_s(tokens: int) -> float:
        return model.step_s(step_work([SequenceWork(0, tokens, True, None, 0.0)], preset.kernel_form))

    link_bytes_per_s = (copies or CopyCosts()).network_bytes_per_s
    reserves = _FOR_PLACEMENT.get(preset.placement) is _for_burst_tolerance
    is_one_rank = settings.tensor_parallel == profile.tensor_parallel == 1
    can_export_kv = preset.host_kv is not HostKv.NONE and settings.host_memory_bytes != 0 and is_one_rank
    times = MoveTimes(
        prefill_s, link_bytes_per_s, profile.geometry.block_bytes(1), kv_bytes_per_s if can_export_kv else None
    )
    problem = preset.comigration_problem
    is_full, is_literal = problem is MigrationProblem.FULL, problem is MigrationProblem.PRINTED_FACTOR
    review = CoMigrationSettings(full=is_full, literal=is_literal)
    return MigrationCosts(times, RESERVED_SHARE if reserves else 0.0, review)


def build_points(
    preset: Preset, profile: CostProfile | None, options: ClusterOptions, what_for: str
) -> OperatingPoints:
    """Return the operating points of a replica.

    Args:
        preset: of all replicas.
        profile: of one of them; None if there is none.
        options: everything else. Its points take precedence over the profile's.
        what_for: names what needs the points, for the error.

    Raises:
        ConfigError: there are none, or SciPy is not installed.
    """
    tokens_per_s = options.tokens_per_s
    if not tokens_per_s:
        lengths = options.prompt_tokens, options.output_tokens
        loads = None if profile is None else loads_that_fit(profile, preset.kernel_form, options.slo, *lengths)
        if loads is None:
            raise ConfigError(_no_points(preset, profile, options.slo, what_for))
        tokens_per_s = loads.tokens_per_s
    try:
        return OperatingPoints(tokens_per_s)
    except ValueError as error:
        raise ConfigError(f"{what_for}: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what_for} needs {error.name}: run `{install_command('cluster')}`") from error


def needs_operating_points(preset: Preset) -> bool:
    """Return whether the preset's placement uses operating points."""
    return _FOR_PLACEMENT.get(preset.placement) is _for_loraserve


def loads_that_fit(
    profile: CostProfile, form: KernelForm, slo: Slo, prompt_tokens: int, output_tokens: int
) -> OperatingLoads | None:
    """Return the operating points of a kernel form and an SLO; None if the profile has none.

    If there are several, choose those of requests nearest in length.
    """

    def apart(loads: OperatingLoads) -> int:
        return abs(loads.prompt_tokens - prompt_tokens) + abs(loads.output_tokens - output_tokens)

    fitting = [loads for loads in profile.operating_points if (loads.kernel_form, loads.slo) == (form, slo)]
    return min(fitting, key=apart, default=None)


def performance_models(
    profile: CostProfile, form: KernelForm, prompt_tokens: int, output_tokens: int
) -> tuple[PerformanceModel, PerformanceModel]:
    """Return TOPPINGS' PrePerf and DecPerf, fitted to steps of several batch sizes and ranks in the profile.

    As in the paper all requests of a step have one rank, each its own adapter. The models do not count tokens: those of
    a prompt are part of the slope.

    Args:
        profile: costs of steps.
        form: kernel form.
        prompt_tokens, output_tokens: of a mean request; a decoding one has half of its answer.

    Raises:
        ValueError: the paper has no model of this kernel form.
        ProfileError: the profile does not know the kernel form.
    """
    context_tokens = prompt_tokens + output_tokens // 2
    prefill = _fit(profile, form, lambda adapter, rank: SequenceWork(0, prompt_tokens, True, adapter, rank))
    decode = _fit(profile, form, lambda adapter, rank: SequenceWork(context_tokens, 1, True, adapter, rank))
    return prefill, decode


def _fit(profile: CostProfile, form: KernelForm, sequence: Callable[[int, int], SequenceWork]) -> PerformanceModel:
    model = CostModel(profile, form)
    steps = []
    for rank in _RANKS:
        for batch in _BATCHES:
            work = step_work((sequence(adapter, rank) for adapter in range(batch)), form)
            steps.append(((rank,) * batch, model.step_s(work)))
    return fit_performance(form, steps)


def _for_toppings(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> RoutingOptions:
    lengths = options.prompt_tokens, options.output_tokens
    if options.step_models is None:
        known = _needed(profile, "routing toppings needs a profile with the cost of steps")
        try:
            prefill, decode = performance_models(known, preset.kernel_form, *lengths)
        except ValueError as error:
            raise ConfigError(f"routing toppings: {error}") from error
    else:
        prefill, decode = options.step_models
    return RoutingOptions(options.seed, prefill, decode, slo_s=options.tpot_s or inf)


def _for_pending_time(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> RoutingOptions:
    known = _needed(profile, "routing dlora needs a profile with the cost of loading an adapter")
    try:
        link = TransferModel(known, 1, options.link_bytes_per_s).link(LinkDirection.IN)
    except ProfileError as error:
        raise ConfigError(f"routing dlora: {error}") from error
    return RoutingOptions(options.seed, load_s=link.fixed.value, load_bytes_per_s=link.bandwidth.value)


def _for_loraserve(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> PlacementOptions:
    return PlacementOptions(options.seed, build_points(preset, profile, options, f"placement {preset.placement}"))


def _for_burst_tolerance(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> PlacementOptions:
    memory_bytes, token_bytes = options.memory_bytes, options.kv_token_bytes
    if not (memory_bytes and token_bytes):
        known = _needed(profile, "placement dlora needs a profile with the memory of a replica and of a token's KV")
        memory_bytes = memory_bytes or known.pool_bytes
        token_bytes = token_bytes or known.geometry.block_bytes(1)
    request_bytes = (options.prompt_tokens + options.output_tokens) * token_bytes
    # The reserve is part of co-migration (dLoRA, section 5.2); placement alone (5.1) has none.
    return PlacementOptions(
        options.seed,
        memory_bytes=memory_bytes,
        request_bytes=request_bytes,
        reserved_share=RESERVED_SHARE if preset.comigration else 0.0,
    )


_FOR_ROUTING: dict[str, Callable[[Preset, CostProfile | None, ClusterOptions], RoutingOptions]] = {
    "toppings": _for_toppings,
    "toppings:empty-free": _for_toppings,
    "dlora": _for_pending_time,
}
_FOR_PLACEMENT: dict[str, Callable[[Preset, CostProfile | None, ClusterOptions], PlacementOptions]] = {
    "loraserve": _for_loraserve,
    "rank-groups": _for_loraserve,
    "dlora": _for_burst_tolerance,
}
"""Builders of the options of policies that need more than a seed."""


def _policy(option: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise ConfigError(f"unknown {option} policy {name!r}; choose one of: {', '.join(table)}")
    return table[name]


def _needed(profile: CostProfile | None, why: str) -> CostProfile:
    if profile is None:
        raise ConfigError(f"{why}: run `lorikeet profile` and pass its file with --profile")
    return profile


def _no_points(preset: Preset, profile: CostProfile | None, slo: Slo, what_for: str) -> str:
    what = f"for kernel form {preset.kernel_form} under {format_slo(slo)}" if slo != Slo() else "and so an SLO"
    known = "" if profile is None else f"; profile {profile.name} has {', '.join(_kinds(profile)) or 'none'}"
    return (
        f"{what_for} needs operating points {what}{known}: run `lorikeet profile --operating-points` and pass its file "
        "with --profile"
    )


def _kinds(profile: CostProfile) -> Iterable[str]:
    return dict.fromkeys(f"{loads.kernel_form} under {format_slo(loads.slo)}" for loads in profile.operating_points)
