"""Builds the policies of a cluster from a preset: routing, placement and co-migration."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lorikeet.cluster.adapters.copy_times import CopyCosts
from lorikeet.cluster.migration.problem import CoMigrationSettings, MoveTimes
from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.operating_points import Points
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.cluster.setup import GENERIC, GENERIC_TOKEN_BYTES, ClusterOptions, PolicySetup
from lorikeet.config import EngineSettings
from lorikeet.core.replica_costs import ReplicaCosts
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile
from lorikeet.policies import PLACEMENT, ROUTING
from lorikeet.presets import HostKv, MigrationProblem, Preset, resolve_preset


class MigrationCosts(NamedTuple):
    """Holds the costs that co-migration needs.

    Attributes:
        times: times of moving requests.
        reserved_share: share of each replica's memory that requests cannot use.
        settings: settings of the reviews.
    """

    times: MoveTimes
    reserved_share: float
    settings: CoMigrationSettings = CoMigrationSettings()


def build_cluster_policies(
    preset: Preset, profile: CostProfile | None, options: ClusterOptions, **parameters: Any
) -> tuple[RoutingPolicy, PlacementPolicy]:
    """Build the routing and the placement policy; see :func:`build_routing` and :func:`build_placement`."""
    return build_routing(preset, profile, options, **parameters), build_placement(preset, profile, options)


def build_routing(
    preset: Preset, profile: CostProfile | None, options: ClusterOptions, **parameters: Any
) -> RoutingPolicy:
    """Build the preset's routing policy.

    Args:
        preset: preset of all replicas.
        profile: profile of one replica; None if there is none.
        options: options of the cluster.
        parameters: arguments of the policy that a preset cannot set.

    Raises:
        ConfigError: unknown policy, or profile and options lack a value that the policy needs.
    """
    return ROUTING[preset.routing](PolicySetup(preset, profile, options), **parameters)


def build_placement(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> PlacementPolicy:
    """Build the preset's placement policy.

    Args:
        preset: preset of all replicas.
        profile: profile of one replica; None if there is none.
        options: options of the cluster.

    Raises:
        ConfigError: unknown policy, or profile and options lack a value that the policy needs.
    """
    return PLACEMENT[preset.placement](PolicySetup(preset, profile, options))


def build_move_times(
    settings: EngineSettings,
    profile: CostProfile | None,
    kv_bytes_per_s: Callable[[], float],
    copies: CopyCosts | None = None,
    *,
    costs: Callable[[], ReplicaCosts] = lambda: GENERIC,
    kv_token_bytes: int = GENERIC_TOKEN_BYTES,
) -> MoveTimes:
    """Return a model of the times to move requests between replicas.

    KV is sent through the host tiers, of all ranks.

    Args:
        settings: settings of all replicas.
        profile: profile of one replica; None if there is none.
        kv_bytes_per_s: returns the bandwidth of KV transfers between replicas.
        copies: copy costs, which include the bandwidth of the network between replicas.
        costs: returns the current costs of a replica; used without a profile.
        kv_token_bytes: bytes of one token's KV; used without a profile.
    """
    _, preset = resolve_preset(settings.preset)
    prefill_s = _prefill_s(preset, profile) if profile is not None else lambda tokens: costs().unloaded_ttft_s(tokens)
    token_bytes = kv_token_bytes if profile is None else profile.geometry.token_bytes
    link_bytes_per_s = (copies or CopyCosts()).network_bytes_per_s
    can_export_kv = preset.host_kv is not HostKv.NONE and settings.host_memory_bytes != 0
    return MoveTimes(prefill_s, link_bytes_per_s, token_bytes, kv_bytes_per_s if can_export_kv else None)


def build_migration(settings: EngineSettings, times: MoveTimes) -> MigrationCosts | None:
    """Return the costs that co-migration needs; None if the preset has no co-migration.

    Args:
        settings: settings of all replicas.
        times: times of moves; see :func:`build_move_times`.
    """
    _, preset = resolve_preset(settings.preset)
    if not preset.comigration:
        return None
    problem = preset.comigration_problem
    is_full = problem is MigrationProblem.FULL
    is_literal = problem is MigrationProblem.PRINTED_FACTOR
    review = CoMigrationSettings(full=is_full, literal=is_literal)
    return MigrationCosts(times, PLACEMENT.load(preset.placement).reserved_share, review)


def _prefill_s(preset: Preset, profile: CostProfile) -> Callable[[int], float]:
    model = CostModel(profile, preset.kernel_form)

    def seconds(tokens: int) -> float:
        return model.step_s(step_work([SequenceWork(0, tokens, True, None, 0.0)], preset.kernel_form))

    return seconds


def replica_costs(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> ReplicaCosts:
    """Return the costs of a replica, from the profile if there is one."""
    return PolicySetup(preset, profile, options).costs()


def build_points(preset: Preset, profile: CostProfile | None, options: ClusterOptions) -> Points:
    """Return the operating points of a replica; see :meth:`PolicySetup.points`."""
    return PolicySetup(preset, profile, options).points()


def needs_operating_points(preset: Preset) -> bool:
    """Return whether the preset's placement uses operating points."""
    return "operating_points" in PLACEMENT.load(preset.placement).needs
