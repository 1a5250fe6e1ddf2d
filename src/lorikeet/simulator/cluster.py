"""Runs a workload through several engines on a virtual clock, as a scenario says."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import NamedTuple

import msgspec

from lorikeet.bench.in_process import Collector, WorkloadArrivals
from lorikeet.bench.predictors import Predictor
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.replicas import build_modelled
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.cluster.build import (
    ClusterOptions,
    build_cluster_policies,
    build_migration,
    loads_that_fit,
    needs_operating_points,
)
from lorikeet.cluster.fetch_times import CopyCosts, FetchForm
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.garbage import rarely_searched
from lorikeet.core.ids import ReplicaId
from lorikeet.core.slo import Slo
from lorikeet.costs.profile import CostProfile, Figure, Link
from lorikeet.costs.transfers import Way
from lorikeet.engine.modelled_build import transfer_model
from lorikeet.presets import resolve_preset
from lorikeet.simulator.cluster_run import ClusterRun, ClusterSetup
from lorikeet.simulator.operating_points import Show, operating_points_for
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet.simulator.run import Simulated


class ClusterChoice(NamedTuple):
    """What a scenario says of its cluster; the preset says the rest.

    Attributes:
        replicas: engines, all alike.
        seed: of what policies draw.
        slo: that policies are to keep.
        fetch, provisioned: see ``CopyCosts`` and ``ClusterSetup``.
    """

    replicas: int
    seed: int = 0
    slo: Slo = Slo()
    fetch: FetchForm = FetchForm.PIPELINED
    provisioned: bool = True


@rarely_searched()
def simulate_cluster(
    settings: Settings,
    profile: CostProfile,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    choice: ClusterChoice,
    *,
    predict: Predictor | None = None,
    on_finished: Callable[[int], None] = lambda finished: None,
    show: Show = lambda stage, done, total: None,
) -> Simulated:
    """Run ``workload`` on modelled replicas behind the preset's routing and placement (see ``cluster_run``).

    Args:
        settings: of every engine.
        profile: what things cost; what a replica holds comes from its host's memory. If the preset's placement needs
            operating points and the profile has none, they are searched first (see ``operating_points_for``).
        workload: by arrival, at least one request.
        adapters: by the names in the workload.
        prompts: makes the prompts.
        choice: of the cluster.
        predict: predicts the lengths of answers, see ``run_workload``.
        on_finished: called with the number of requests that have ended.
        show: called with (stage, done, total) while operating points are searched.

    Raises:
        ConfigError: a setting does not fit the profile, or a policy lacks something.
        OperatingPointError: no operating point could be found.
        ProfileError: the profile lacks something that the workload needs.
        UnknownAdapter: the workload names an adapter that there is not.
    """
    name, preset = resolve_preset(settings.engine.preset)
    link = transfer_model(settings.engine, profile).link(Way.IN)
    profile = _with_copies_on_host(profile, link)
    arrivals = WorkloadArrivals(workload, adapters, prompts, 0.0, predict=predict)
    collector = Collector(workload, arrivals, on_finished)
    replicas = [
        SimulatedReplica(ReplicaId(f"replica-{n}"), build_modelled(settings, profile), settings.engine.max_num_seqs)
        for n in range(choice.replicas)
    ]
    options = _options(settings, profile, workload, adapters, choice, replicas[0], show)
    router, placement = build_cluster_policies(preset, [replica.id for replica in replicas], profile, options)
    copies = CopyCosts(choice.fetch, link.bandwidth.value / profile.tensor_parallel, ranks=profile.tensor_parallel)
    migration = build_migration(settings.engine, profile, lambda: copies.carried_bytes_per_s, copies)
    setup = ClusterSetup(
        router,
        placement,
        period_s=preset.placement_period_s,
        prefetch=preset.pool_prefetch,
        copies=copies,
        provisioned=choice.provisioned,
        migration=migration,
    )
    cluster = ClusterRun(replicas, setup, list(adapters.values()), arrivals, collector).run()
    note = f"{choice.replicas} replicas of {name}: placement {preset.placement}, routing {preset.routing}"
    stats = tuple(replica.engine.stats() for replica in replicas)
    return Simulated(collector.run(), stats, (note, *replicas[0].notes), cluster)


def _with_copies_on_host(profile: CostProfile, link: Link) -> CostProfile:
    """Return the profile of an engine whose adapters' files lie in its host's memory, as those of a replica do.

    What brings them there, over the network or from a drive, is charged by the cluster (``CopyCosts``) before the
    engine hears of them, and must not be charged again. So a load takes what the ``link`` to the device takes, and what
    is read into the host tier is there at once.
    """
    at_once = Link(Figure(0.0, "s"), Figure(inf, "bytes/s"))
    transfers = msgspec.structs.replace(profile.transfers, source_to_device=link, source_to_host=at_once)
    return msgspec.structs.replace(profile, transfers=transfers)


def _options(
    settings: Settings,
    profile: CostProfile,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    choice: ClusterChoice,
    replica: SimulatedReplica,
    show: Show,
) -> ClusterOptions:
    """Return what policies are made with: mean requests are those of the workload."""
    _, preset = resolve_preset(settings.engine.preset)
    info, slo = replica.info(), choice.slo
    prompt_tokens = max(1, round(fmean(request.input_tokens for request in workload)))
    output_tokens = max(1, round(fmean(request.output_tokens for request in workload)))
    options = ClusterOptions(
        seed=choice.seed,
        ttft_s=slo.ttft_s or 0.0,
        tpot_s=slo.tpot_s or 0.0,
        e2e_s=slo.e2e_s or 0.0,
        memory_bytes=replica.sizes.total_blocks * replica.sizes.block_bytes,
        kv_token_bytes=info.kv_token_bytes,
        link_bytes_per_s=settings.engine.link_bytes_per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    lengths = prompt_tokens, output_tokens
    if not needs_operating_points(preset) or loads_that_fit(profile, preset.kernel_form, options.slo, *lengths) is not None:
        return options
    points = operating_points_for(
        profile, settings.engine.preset, options.slo, lengths, choice.seed, engine=settings.engine, show=show
    )
    ranks = {ref.max_rank for ref in adapters.values()}
    return msgspec.structs.replace(options, tokens_per_s={rank: points[rank] for rank in sorted(ranks)})
