"""Builds the policies of a cluster from a preset: routing, placement and co-migration."""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from lorikeet.cluster.adapters.copy_times import CopyCosts
from lorikeet.cluster.migration.problem import CoMigrationSettings, MoveTimes
from lorikeet.cluster.placement import PLACEMENT, PlacementOptions
from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.burst import RESERVED_SHARE
from lorikeet.cluster.placement.operating_points import EstimatedPoints, OperatingPoints, Points
from lorikeet.cluster.routing import ROUTING
from lorikeet.cluster.routing.base import PerformanceModel, RoutingOptions, RoutingPolicy, fit_models, models_of_costs
from lorikeet.config import ConfigError, EngineSettings
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.core.request import Slo
from lorikeet.core.text import install_command
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile, OperatingLoads, ProfileError
from lorikeet.costs.replica_estimates import profile_costs
from lorikeet.costs.transfer_model import LinkDirection, TransferModel
from lorikeet.presets import HostKv, MigrationProblem, Preset, resolve_preset

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""Lengths of a mean request where nothing better is known; from LoRAServe's motivation."""

GENERIC = ReplicaCosts(0.008, 1e-4, 1e-4, 5e-4, 5e-7, 2e-6, 1e-4, 25e9)
"""Of a model of 8 billion parameters on an A100, roughly: for replicas of which nothing is known."""
GENERIC_MEMORY_BYTES, GENERIC_TOKEN_BYTES = 50 * 2**30, 2**17
"""The same for memory beside the weights, and for KV of a token."""

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
        costs: of a replica, where there is no profile.
        max_batch: most sequences in a step.
        has_default_slo: whether a target that is not set is ``UNLOADED_TIMES`` what an unloaded replica reaches;
            otherwise there is no limit.
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
    costs: ReplicaCosts = GENERIC
    max_batch: int = 64
    has_default_slo: bool = False

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
    preset: Preset, profile: CostProfile | None, options: ClusterOptions
) -> tuple[RoutingPolicy, PlacementPolicy]:
    """Build the routing and the placement policy; see :func:`build_routing` and :func:`build_placement`."""
    return build_routing(preset, profile, options), build_placement(preset, profile, options)


def build_routing(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> RoutingPolicy:
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


def build_placement(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> PlacementPolicy:
    """Build the preset's placement policy.

    Args:
        preset: of all replicas.
        profile: of one of them; None if there is none.
        options: everything else.

    Raises:
        ConfigError: unknown policy, or profile and options lack something that it needs.
    """
    make = _policy("placement", preset.placement, PLACEMENT)
    needed = _FOR_PLACEMENT.get(preset.placement)
    return make(PlacementOptions(options.seed) if needed is None else needed(preset, profile, options))


def build_move_times(
    settings: EngineSettings,
    profile: CostProfile | None,
    kv_bytes_per_s: Callable[[], float],
    copies: CopyCosts | None = None,
    *,
    costs: Callable[[], ReplicaCosts] = lambda: GENERIC,
    kv_token_bytes: int = GENERIC_TOKEN_BYTES,
) -> MoveTimes:
    """Return how long requests take to move between replicas.

    KV is sent through the host tiers, and only where one rank holds all of it.

    Args:
        settings: of all replicas.
        profile: of one of them; None if there is none.
        kv_bytes_per_s: returns how fast KV is transferred between replicas.
        copies: says how fast the network between replicas is.
        costs: returns the present costs of a replica, where there is no profile.
        kv_token_bytes: KV of one token, where there is no profile.
    """
    _, preset = resolve_preset(settings.preset)
    prefill_s = _prefill_s(preset, profile) if profile is not None else lambda tokens: costs().unloaded_ttft_s(tokens)
    token_bytes = kv_token_bytes if profile is None else profile.geometry.block_bytes(1)
    link_bytes_per_s = (copies or CopyCosts()).network_bytes_per_s
    is_one_rank = settings.ranks == 1 and (profile is None or profile.tensor_parallel == 1)
    can_export_kv = preset.host_kv is not HostKv.NONE and settings.host_memory_bytes != 0 and is_one_rank
    return MoveTimes(prefill_s, link_bytes_per_s, token_bytes, kv_bytes_per_s if can_export_kv else None)


def build_migration(settings: EngineSettings, times: MoveTimes) -> MigrationCosts | None:
    """Return the costs that co-migration needs; None if the preset has no co-migration.

    Args:
        settings: of all replicas.
        times: of moves; see :func:`build_move_times`.
    """
    _, preset = resolve_preset(settings.preset)
    if not preset.comigration:
        return None
    reserves = _FOR_PLACEMENT.get(preset.placement) is _for_burst_tolerance
    problem = preset.comigration_problem
    is_full, is_literal = problem is MigrationProblem.FULL, problem is MigrationProblem.PRINTED_FACTOR
    review = CoMigrationSettings(full=is_full, literal=is_literal)
    return MigrationCosts(times, RESERVED_SHARE if reserves else 0.0, review)


def _prefill_s(preset: Preset, profile: CostProfile) -> Callable[[int], float]:
    model = CostModel(profile, preset.kernel_form)

    def seconds(tokens: int) -> float:
        return model.step_s(step_work([SequenceWork(0, tokens, True, None, 0.0)], preset.kernel_form))

    return seconds


def replica_costs(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> ReplicaCosts:
    """Return the costs of a replica: the profile's if there is one."""
    if profile is None:
        return options.costs
    return profile_costs(profile, preset.kernel_form, options.link_bytes_per_s)


def build_points(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> Points:
    """Return the operating points of a replica: those that were searched, else estimates from its costs.

    Args:
        preset: of all replicas.
        profile: of one of them; None if there is none.
        options: everything else. Its points take precedence over the profile's.

    Raises:
        ConfigError: they cannot be used, or SciPy is not installed.
    """
    lengths = options.prompt_tokens, options.output_tokens
    tokens_per_s = options.tokens_per_s
    if not tokens_per_s and profile is not None:
        loads = loads_that_fit(profile, preset.kernel_form, options.slo, *lengths)
        tokens_per_s = {} if loads is None else loads.tokens_per_s
    if not tokens_per_s:
        costs = replica_costs(preset, profile, options)
        return EstimatedPoints(costs, *lengths, options.max_batch, options.tpot_s)
    try:
        return OperatingPoints(tokens_per_s)
    except ValueError as error:
        raise ConfigError(f"operating points: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"operating points need {error.name}: run `{install_command('cluster')}`") from error


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
    context_tokens, model = prompt_tokens + output_tokens // 2, CostModel(profile, form)

    def prefill_s(batch: int, rank: int) -> float:
        sequences = (SequenceWork(0, prompt_tokens, True, adapter, rank) for adapter in range(batch))
        return model.step_s(step_work(sequences, form))

    def decode_s(batch: int, rank: int) -> float:
        sequences = (SequenceWork(context_tokens, 1, True, adapter, rank) for adapter in range(batch))
        return model.step_s(step_work(sequences, form))

    return fit_models(form, prefill_s, decode_s)


def _for_toppings(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> RoutingOptions:
    lengths = options.prompt_tokens, options.output_tokens
    try:
        if options.step_models is not None:
            prefill, decode = options.step_models
        elif profile is not None:
            prefill, decode = performance_models(profile, preset.kernel_form, *lengths)
        else:
            prefill, decode = models_of_costs(options.costs, preset.kernel_form, options.prompt_tokens)
    except ValueError as error:
        raise ConfigError(f"routing toppings: {error}") from error
    slo_s = options.tpot_s or (0.0 if options.has_default_slo else inf)
    return RoutingOptions(options.seed, prefill, decode, slo_s=slo_s, mean_tokens=lengths)


def _for_pending_time(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> RoutingOptions:
    if profile is None:
        costs = options.costs
        return RoutingOptions(options.seed, load_s=costs.load_s, load_bytes_per_s=costs.load_bytes_per_s)
    try:
        link = TransferModel(profile, 1, options.link_bytes_per_s).link(LinkDirection.IN)
    except ProfileError as error:
        raise ConfigError(f"routing dlora: {error}") from error
    return RoutingOptions(options.seed, load_s=link.fixed.value, load_bytes_per_s=link.bandwidth.value)


def _for_seconds(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> RoutingOptions:
    costs = replica_costs(preset, profile, options)
    return RoutingOptions(options.seed, costs=costs, kernel_form=preset.kernel_form)


def _for_loraserve(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> PlacementOptions:
    return PlacementOptions(options.seed, build_points(preset, profile, options))


def _for_burst_tolerance(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> PlacementOptions:
    memory_bytes, token_bytes = options.memory_bytes, options.kv_token_bytes
    memory_bytes = memory_bytes or (GENERIC_MEMORY_BYTES if profile is None else profile.pool_bytes)
    token_bytes = token_bytes or (GENERIC_TOKEN_BYTES if profile is None else profile.geometry.block_bytes(1))
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
    "seconds": _for_seconds,
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
