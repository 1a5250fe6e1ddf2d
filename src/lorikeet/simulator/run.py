"""Runs a workload through an engine on a virtual clock."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lorikeet.bench.in_process import Run, run_workload
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.config import Settings, resolve_row
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.messages import EngineStats
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.build import assemble
from lorikeet.engine.modelled_build import build_modelled_executor


class Simulated(NamedTuple):
    """A simulated run, and the engine's gauges and counters after it."""

    run: Run
    stats: EngineStats
    notes: tuple[str, ...]


def simulate(
    settings: Settings,
    profile: CostProfile,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    *,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> Simulated:
    """Run ``workload`` on one modelled replica.

    With ``engine.max_repeat`` 1 the engine decides anew after every step, and steps that come out alike are run
    together; with more it makes plans of several steps as a live engine with these settings does.

    Args:
        settings: of the engine; ``engine.executor`` is not looked at.
        profile: what things cost.
        workload: by arrival.
        adapters: by the names in the workload.
        prompts: makes the prompts.
        on_finished: called with the number of requests that have ended.

    Raises:
        ConfigError: a setting does not fit the profile.
        ProfileError: the profile lacks something that the workload needs.
        UnknownAdapter: the workload names an adapter that there is not.
    """
    clock = VirtualClock()
    coalesced = settings.engine.max_repeat == 1
    _, row = resolve_row(settings.engine.row)
    executor, sizes = build_modelled_executor(settings, profile, row.kernel_form, clock, coalesced=coalesced)
    engine, _, notes = assemble(settings, executor, sizes, clock)
    run = run_workload(engine, clock, workload, adapters, prompts, coalesced=coalesced, on_finished=on_finished)
    return Simulated(run, engine.stats(), notes)
