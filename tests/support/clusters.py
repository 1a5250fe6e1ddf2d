"""Builders for simulated clusters of a profile in which all is easy to add up."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lorikeet.bench.in_process import RecordCollector, RunObserver, WorkloadArrivals, WorkloadRun
from lorikeet.bench.replicas import ModelledReplica, build_modelled
from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.plain import LeastLoaded
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import ReplicaId
from lorikeet.costs.profile import CostProfile
from lorikeet.simulator.cluster import ClusterRun, ClusterSetup
from lorikeet.simulator.replica import SimulatedReplica
from lorikeet.simulator.run import ClusterFigures
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.synthetic import synthetic_adapters
from lorikeet.workloads.workload import WorkloadRequest
from tests.support.profiles import GEOMETRY, round_profile

BLOCK = 16
"""Tokens of prefix blocks."""


class Always(RoutingPolicy):
    """Sends everything to one replica."""

    def __init__(self, replica: str) -> None:
        self._replica = ReplicaId(replica)

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        return Choice(self._replica)


class Fixed(PlacementPolicy):
    """Has everything on one replica."""

    def __init__(self, home: str) -> None:
        super().__init__()
        self._home = ReplicaId(home)

    def place(self, demands: Sequence[AdapterDemand], replicas: Sequence[ReplicaId], now: float) -> RoutingTable:
        return self._replaced({demand.adapter: (ReplicaShare(self._home, 1.0),) for demand in demands})


def names(count: int) -> list[ReplicaId]:
    return [ReplicaId(f"replica-{number}") for number in range(count)]


def settings(**engine: object) -> Settings:
    given = {"num_scheduler_steps": 1, "preset": "lorikeet:plain", "host_memory_bytes": 0, **engine}
    return Settings(ModelSettings(), EngineSettings(**given))  # type: ignore[arg-type]


def some_adapters(count: int, ranks: Sequence[int] = (1, 2)) -> list[AdapterRef]:
    return synthetic_adapters(count, ranks, GEOMETRY)


class Simulation(NamedTuple):
    """A cluster that has run."""

    run: WorkloadRun
    figures: ClusterFigures
    cluster: ClusterRun
    replicas: list[SimulatedReplica]
    finished: list[int]


def simulated(
    workload: Sequence[WorkloadRequest],
    replicas: int = 2,
    adapters: Sequence[AdapterRef] = (),
    *,
    profile: CostProfile | None = None,
    of: Settings | None = None,
    make: Callable[[Settings, CostProfile], ModelledReplica] = build_modelled,
    watch: RunObserver | None = None,
    **setup: object,
) -> Simulation:
    """Run a workload on a cluster: of least load and full replication, unless ``setup`` says otherwise."""
    known, built = profile or round_profile(), of or settings()
    engines = [SimulatedReplica(name, make(built, known), built.engine.max_num_seqs) for name in names(replicas)]
    prompts = Prompts(0, 0, DEFAULT_IDS, BLOCK)
    arrivals = WorkloadArrivals(workload, {ref.name: ref for ref in adapters}, prompts, 0.0, watch)
    finished: list[int] = []
    collector = RecordCollector(workload, arrivals, finished.append)
    made = {"routing": LeastLoaded(), "placement": FullReplication(), **setup}
    cluster = ClusterRun(engines, ClusterSetup(**made), adapters, arrivals, collector)  # type: ignore[arg-type]
    figures = cluster.run()
    return Simulation(collector.run(), figures, cluster, engines, finished)
