"""Starts replicas in this process, live or on a virtual clock, from the same settings."""

from collections.abc import Callable
from typing import NamedTuple

from lorikeet.config import Settings
from lorikeet.core.clock import MonotonicClock, VirtualClock, WaitableClock
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.build import Replica, assemble, build_replica
from lorikeet.presets import resolve_preset
from lorikeet.worker.modelled import ModelledExecutor, build_modelled_executor


class StartedReplica(NamedTuple):
    """Holds a replica, its clock, and whether it runs identical steps together (``Engine.step``)."""

    replica: Replica
    clock: WaitableClock
    coalesced: bool


def live_replica(
    settings: Settings,
    clock: WaitableClock | None = None,
    on_ran: Callable[[StepPlan, StepResult], None] | None = None,
) -> StartedReplica:
    """Build a replica that computes, on the real clock or another clock; see ``build_replica``."""
    clock = clock or MonotonicClock()
    return StartedReplica(build_replica(settings, clock=clock, on_ran=on_ran), clock, coalesced=False)


class ModelledReplica(NamedTuple):
    """Holds a replica on a virtual clock and its executor, which knows when transfers end; see ``StartedReplica``."""

    replica: Replica
    clock: VirtualClock
    executor: ModelledExecutor
    coalesced: bool


def modelled_replica(settings: Settings, profile: CostProfile) -> StartedReplica:
    """Build a replica on a virtual clock, with times from a profile; see ``build_modelled``."""
    replica, clock, _, coalesced = build_modelled(settings, profile)
    return StartedReplica(replica, clock, coalesced)


def build_modelled(settings: Settings, profile: CostProfile) -> ModelledReplica:
    """Build a replica on a virtual clock, with times from a profile.

    With ``engine.num_scheduler_steps`` 1, the engine decides after every step, and identical steps are run together.
    With a larger number, the engine makes plans of several steps, like a live engine with these settings.

    Args:
        settings: the engine's settings; ``engine.executor`` is ignored.
        profile: cost profile.

    Raises:
        ConfigError: a setting does not fit the profile.
    """
    clock = VirtualClock()
    coalesced = settings.engine.num_scheduler_steps == 1
    _, preset = resolve_preset(settings.engine.preset)
    executor, sizes = build_modelled_executor(settings, profile, preset, clock, coalesced=coalesced)
    return ModelledReplica(assemble(settings, executor, sizes, clock), clock, executor, coalesced)
