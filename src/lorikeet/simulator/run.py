"""Runs a workload through one engine on a virtual clock."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lorikeet.bench.in_process import Run, run_workload
from lorikeet.bench.predictors import Predictor
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.replicas import modelled_replica
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.garbage import rarely_searched
from lorikeet.core.messages import EngineStats
from lorikeet.costs.profile import CostProfile
from lorikeet.simulator.cluster_figures import ClusterFigures


class Simulated(NamedTuple):
    """A simulated run.

    Attributes:
        run: what became of the requests.
        stats: gauges and counters of each engine after it.
        notes: what was chosen, in words.
        cluster: what several replicas did; None for one engine alone.
    """

    run: Run
    stats: tuple[EngineStats, ...]
    notes: tuple[str, ...]
    cluster: ClusterFigures | None = None


@rarely_searched()
def simulate(
    settings: Settings,
    profile: CostProfile,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    *,
    predict: Predictor | None = None,
    on_finished: Callable[[int], None] = lambda finished: None,
) -> Simulated:
    """Run ``workload`` on one modelled replica (see ``modelled_replica``).

    Args:
        settings: of the engine.
        profile: what things cost.
        workload: by arrival.
        adapters: by the names in the workload.
        prompts: makes the prompts.
        predict: predicts the lengths of answers, see ``run_workload``.
        on_finished: called with the number of requests that have ended.

    Raises:
        ConfigError: a setting does not fit the profile.
        ProfileError: the profile lacks something that the workload needs.
        UnknownAdapter: the workload names an adapter that there is not.
    """
    (engine, _, notes), clock, coalesced = modelled_replica(settings, profile)
    run = run_workload(
        engine, clock, workload, adapters, prompts, coalesced=coalesced, on_finished=on_finished, predict=predict
    )
    return Simulated(run, (engine.stats(),), notes)
