"""Simulates a workload on one engine on a virtual clock, and computes the figures of simulated runs."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from lorikeet.bench.in_process import MissBudget, WorkloadRun, run_workload
from lorikeet.bench.replicas import modelled_replica
from lorikeet.cluster.tables import RoutingTable
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import EngineStats
from lorikeet.core.process_tuning import rare_gc
from lorikeet.costs.profile import CostProfile
from lorikeet.workloads.predictors import Predictor
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.workload import WorkloadRequest


class TimeWeightedLevel:
    """Tracks a number that changes over time, with its mean over time and its maximum.

    Args:
        now: start of the measurement.

    Attributes:
        value: current value.
        most: largest value so far.
    """

    def __init__(self, now: float) -> None:
        self.value = self.most = 0
        self._start_s = self._since_s = now
        self._area = 0.0

    def add(self, change: int, now: float) -> None:
        """Change the value."""
        self._area += self.value * (now - self._since_s)
        self._since_s = now
        self.value += change
        self.most = max(self.most, self.value)

    def mean(self, now: float) -> float:
        """Return the mean over the time until ``now``; the current value if no time has passed."""
        length_s = now - self._start_s
        return (self._area + self.value * (now - self._since_s)) / length_s if length_s else self.value


class ReplicaFigures(msgspec.Struct, frozen=True):
    """Holds the figures of one replica. Means are over the time of the run.

    Attributes:
        replica: id of the replica.
        requests: number of requests sent to the replica, including requests that were moved away.
        output_tokens: number of tokens that the replica generated.
        busy_share: share of the time in which the replica was busy.
        routed_mean, routed_most: mean and largest number of adapters that placements assigned to the replica.
        routed_bytes_most: largest number of bytes of these adapters.
        held_mean, held_most: mean and largest number of adapters of which the replica had a copy.
        held_bytes_mean, held_bytes_most: mean and largest number of bytes of these copies.
        fetches, fetched_bytes: number and bytes of copies from other replicas.
        provisions, provided_bytes: number and bytes of copies from source files.
    """

    replica: ReplicaId
    requests: int
    output_tokens: int
    busy_share: float
    routed_mean: float
    routed_most: int
    routed_bytes_most: int
    held_mean: float
    held_most: int
    held_bytes_mean: float
    held_bytes_most: int
    fetches: int
    fetched_bytes: int
    provisions: int
    provided_bytes: int


class ClusterFigures(msgspec.Struct, frozen=True):
    """Holds the figures of all replicas.

    Attributes:
        duration_s: duration of the run.
        adapters, adapter_bytes: number of adapters, and bytes of their weights, which each replica would hold under
            full replication.
        held_share: mean of ``held_bytes_mean`` over the replicas, as a share of ``adapter_bytes``; None without
            adapters.
        placements: number of placements that changed the table after the start.
        fetches, fetched_bytes, provisions, provided_bytes: sums over the replicas.
        deletes: number of deleted copies.
        moves: number of requests that co-migration moved.
        replicas: figures of each replica.
    """

    duration_s: float
    adapters: int
    adapter_bytes: int
    held_share: float | None
    placements: int
    fetches: int
    fetched_bytes: int
    provisions: int
    provided_bytes: int
    deletes: int
    moves: int
    replicas: tuple[ReplicaFigures, ...]


class ReplicaTally:
    """Counts the events of one replica; see :class:`ReplicaFigures`.

    Args:
        now: start of the run.
    """

    def __init__(self, now: float) -> None:
        self.requests = self.output_tokens = 0
        self.fetches = self.fetched_bytes = self.provisions = self.provided_bytes = 0
        self.routed = TimeWeightedLevel(now)
        self.routed_bytes_most = 0
        self.held = TimeWeightedLevel(now)
        self.held_bytes = TimeWeightedLevel(now)

    def hold(self, copies: int, size_bytes: int, now: float) -> None:
        """Add ``copies`` copies (-1 to remove one) of an adapter with a size."""
        self.held.add(copies, now)
        self.held_bytes.add(copies * size_bytes, now)

    def figures(self, replica: ReplicaId, busy_s: float, duration_s: float, now: float) -> ReplicaFigures:
        """Return the figures at the end of the run."""
        return ReplicaFigures(
            replica=replica,
            requests=self.requests,
            output_tokens=self.output_tokens,
            busy_share=busy_s / duration_s if duration_s else 0.0,
            routed_mean=self.routed.mean(now),
            routed_most=self.routed.most,
            routed_bytes_most=self.routed_bytes_most,
            held_mean=self.held.mean(now),
            held_most=self.held.most,
            held_bytes_mean=self.held_bytes.mean(now),
            held_bytes_most=self.held_bytes.most,
            fetches=self.fetches,
            fetched_bytes=self.fetched_bytes,
            provisions=self.provisions,
            provided_bytes=self.provided_bytes,
        )


class ClusterTally:
    """Counts the events of a simulated cluster.

    Args:
        replicas: all replicas.
        sizes_bytes: sizes of all adapters' weights.
        now: start of the run.

    Attributes:
        of: counters of each replica.
        placements, deletes, moves: see :class:`ClusterFigures`.
    """

    def __init__(self, replicas: Sequence[ReplicaId], sizes_bytes: Mapping[AdapterDigest, int], now: float) -> None:
        self._start_s = now
        self._sizes_bytes = sizes_bytes
        self.of = {replica: ReplicaTally(now) for replica in replicas}
        self.placements = self.deletes = self.moves = 0

    def routed(self, table: RoutingTable, now: float) -> None:
        """Record a new placement."""
        there, sizes_bytes = table.adapters_by_replica(), table.bytes_by_replica(self._sizes_bytes)
        for replica, tally in self.of.items():
            tally.routed.add(there[replica] - tally.routed.value, now)
            tally.routed_bytes_most = max(tally.routed_bytes_most, sizes_bytes[replica])

    def seeded(self, adapter: AdapterDigest, replica: ReplicaId, now: float) -> None:
        """Record a copy that exists at the start."""
        self.of[replica].hold(1, self._sizes_bytes[adapter], now)

    def fetched(self, adapter: AdapterDigest, replica: ReplicaId, now: float) -> None:
        """Record a copy from another replica."""
        tally = self.of[replica]
        size_bytes = self._sizes_bytes[adapter]
        tally.fetches += 1
        tally.fetched_bytes += size_bytes
        tally.hold(1, size_bytes, now)

    def provided(self, adapter: AdapterDigest, replica: ReplicaId, now: float) -> None:
        """Record a copy from source files."""
        tally = self.of[replica]
        size_bytes = self._sizes_bytes[adapter]
        tally.provisions += 1
        tally.provided_bytes += size_bytes
        tally.hold(1, size_bytes, now)

    def deleted(self, adapter: AdapterDigest, replica: ReplicaId, now: float) -> None:
        """Record that a copy was deleted."""
        self.deletes += 1
        self.of[replica].hold(-1, self._sizes_bytes[adapter], now)

    def figures(self, busy_s: Mapping[ReplicaId, float], now: float) -> ClusterFigures:
        """Return the figures of a run that ends now. ``busy_s`` is the busy time of each replica."""
        duration_s = now - self._start_s
        adapter_bytes = sum(self._sizes_bytes.values())
        replicas = tuple(tally.figures(replica, busy_s[replica], duration_s, now) for replica, tally in self.of.items())
        held_bytes = fmean(each.held_bytes_mean for each in replicas)
        return ClusterFigures(
            duration_s=duration_s,
            adapters=len(self._sizes_bytes),
            adapter_bytes=adapter_bytes,
            held_share=held_bytes / adapter_bytes if adapter_bytes else None,
            placements=self.placements,
            fetches=sum(each.fetches for each in replicas),
            fetched_bytes=sum(each.fetched_bytes for each in replicas),
            provisions=sum(each.provisions for each in replicas),
            provided_bytes=sum(each.provided_bytes for each in replicas),
            deletes=self.deletes,
            moves=self.moves,
            replicas=replicas,
        )


class Simulated(NamedTuple):
    """Holds a simulated run.

    Attributes:
        run: records of the requests.
        stats: gauges and counters of each engine at the end.
        notes: settings that were chosen automatically, in words.
        cluster: figures of several replicas; None for a single engine.
    """

    run: WorkloadRun
    stats: tuple[EngineStats, ...]
    notes: tuple[str, ...]
    cluster: ClusterFigures | None = None


@rare_gc()
def simulate(
    settings: Settings,
    profile: CostProfile,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    *,
    predictor: Predictor | None = None,
    on_finished: Callable[[int], None] = lambda finished: None,
    budget: MissBudget | None = None,
) -> Simulated:
    """Run ``workload`` on one modelled replica (see ``modelled_replica``).

    Args:
        settings: settings of the engine.
        profile: cost profile.
        workload: requests in the order of their arrival.
        adapters: adapters by their names in the workload.
        prompts: makes the prompts.
        predictor: predicts the lengths of answers, see ``run_workload``.
        on_finished: called with the number of requests that have ended.
        budget: see ``run_workload``.

    Raises:
        ConfigError: a setting does not fit the profile.
        ProfileError: the profile lacks something that the workload needs.
        WorkloadAdapterUnknown: the workload names an unknown adapter.
    """
    (engine, _, notes, *_), clock, coalesced = modelled_replica(settings, profile)
    run = run_workload(
        engine,
        clock,
        workload,
        adapters,
        prompts,
        coalesced=coalesced,
        on_finished=on_finished,
        predictor=predictor,
        budget=budget,
    )
    return Simulated(run, (engine.stats(),), notes)
