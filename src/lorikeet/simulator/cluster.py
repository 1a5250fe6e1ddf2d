"""Simulates a workload on many modelled engines on one virtual clock.

The engines run behind the dispatcher and the orchestrator of a live cluster. The agenda orders the events.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count, cycle
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from lorikeet.bench.in_process import MissBudget, RecordCollector, WorkloadArrivals
from lorikeet.bench.replicas import build_modelled
from lorikeet.cluster.adapters.copy_times import CopyCosts, CopyTimes, FetchForm
from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.build import (
    MigrationCosts,
    build_cluster_policies,
    build_migration,
    build_move_times,
    needs_operating_points,
    replica_costs,
)
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher, Provision
from lorikeet.cluster.controller.learned_costs import LearnedCosts
from lorikeet.cluster.migration.problem import CoMigrationSettings
from lorikeet.cluster.migration.review import CoMigration, observe
from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.demand import EARLY_PLACEMENTS
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.cluster.routing.fleet import replica_gauges
from lorikeet.cluster.routing.request import RoutingRequest, routing_request
from lorikeet.cluster.setup import ClusterOptions, loads_that_fit
from lorikeet.cluster.tables import RoutingTable
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import DropAdapter, ExportedKv, ImportKv, RegisterAdapters, StepOutputs, Submit
from lorikeet.core.process_tuning import rare_gc
from lorikeet.core.request import Request, Slo
from lorikeet.costs.profile import Constant, CostProfile, Link
from lorikeet.costs.transfer_model import LinkDirection
from lorikeet.policies import ROUTING
from lorikeet.presets import resolve_preset
from lorikeet.simulator.operating_points import Show, operating_points_for
from lorikeet.simulator.replica import EPOCH, EngineMessage, PendingMove, SimulatedReplica
from lorikeet.simulator.run import ClusterFigures, ClusterTally, Simulated
from lorikeet.worker.modelled import transfer_model
from lorikeet.workloads.predictors import Predictor
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.workload import WorkloadRequest

REVIEW_S = 1.0
"""Seconds between two reviews of co-migration (docs/decisions/comigration.md)."""

SOLVER_LIMIT_S = 30.0
"""Time limit of each run of co-migration's solver.

The limit is in real time, which must not affect the result of a simulation. A live cluster gives up after 50 ms;
problems that exceed this longer limit stay unsolved in a simulation too.
"""


class ClusterChoice(NamedTuple):
    """Holds the options of a cluster that a scenario sets. The preset sets the others.

    Attributes:
        replicas: number of engines, all alike.
        seed: seed of the random draws of policies.
        slo: SLO that policies should meet.
        fetch, provisioned: see ``CopyCosts`` and ``ClusterSetup``.
        routing_parameters: arguments of the routing policy that a preset cannot set.
        history: requests of earlier periods, oldest first, which count as demand but do not run.
    """

    replicas: int
    seed: int = 0
    slo: Slo = Slo()
    fetch: FetchForm = FetchForm.PIPELINED
    provisioned: bool = True
    routing_parameters: Mapping[str, Any] = {}
    history: Sequence[Sequence[WorkloadRequest]] = ()


@rare_gc()
def simulate_cluster(
    settings: Settings,
    profile: CostProfile,
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    prompts: Prompts,
    choice: ClusterChoice,
    *,
    predictor: Predictor | None = None,
    on_finished: Callable[[int], None] = lambda finished: None,
    show: Show = lambda stage, done, total: None,
    budget: MissBudget | None = None,
) -> Simulated:
    """Run ``workload`` on modelled replicas behind the preset's routing and placement.

    Args:
        settings: settings of every engine.
        profile: cost profile. A replica reads adapter copies from its host's memory. If the preset's placement needs
            operating points and the profile has none, they are searched first (see ``operating_points_for``).
        workload: requests in the order of their arrival, at least one.
        adapters: adapters by their names in the workload.
        prompts: makes the prompts.
        choice: options of the cluster.
        predictor: predicts the lengths of answers, see ``run_workload``.
        on_finished: called with the number of requests that have ended.
        show: called with (stage, done, total) while operating points are searched.
        budget: see ``run_workload``.

    Raises:
        ConfigError: a setting does not fit the profile, or a policy lacks a required value.
        OperatingPointError: no operating point could be found.
        ProfileError: the profile lacks a constant that the workload needs.
        WorkloadAdapterUnknown: the workload names an unknown adapter.
    """
    name, preset = resolve_preset(settings.engine.preset)
    link = transfer_model(settings.engine, profile).link(LinkDirection.IN)
    profile = _with_copies_on_host(profile, link)
    arrivals = WorkloadArrivals(workload, adapters, prompts, 0.0, predictor=predictor)
    collector = RecordCollector(workload, arrivals, on_finished, budget)
    replicas = [
        SimulatedReplica(ReplicaId(f"replica-{n}"), build_modelled(settings, profile), settings.engine.max_num_seqs)
        for n in range(choice.replicas)
    ]
    options = _options(settings, profile, workload, adapters, choice, replicas[0], show)
    routing, placement = build_cluster_policies(preset, profile, options, **choice.routing_parameters)
    copies = CopyCosts(choice.fetch, link.bandwidth.value / profile.tensor_parallel, ranks=profile.tensor_parallel)
    times = build_move_times(settings.engine, profile, lambda: copies.kv_bytes_per_s, copies)
    migration = build_migration(settings.engine, times)
    learns = "learned_costs" in ROUTING.load(preset.routing).needs
    setup = ClusterSetup(
        routing,
        placement,
        period_s=preset.placement_period_s,
        prefetch=preset.pool_prefetch,
        held_share=preset.pool_share,
        copies=copies,
        provisioned=choice.provisioned,
        migration=migration,
        learned=LearnedCosts(replica_costs(preset, profile, options)) if learns else None,
        history=tuple(_report(period, adapters) for period in choice.history),
    )
    cluster = ClusterRun(replicas, setup, list(adapters.values()), arrivals, collector).run()
    note = f"{choice.replicas} replicas of {name}: placement {preset.placement}, routing {preset.routing}"
    stats = tuple(replica.engine.stats() for replica in replicas)
    return Simulated(collector.run(), stats, (note, *replicas[0].notes), cluster)


def _report(requests: Sequence[WorkloadRequest], adapters: Mapping[str, AdapterRef]) -> DemandReport:
    digests = [None if each.adapter is None else adapters[each.adapter].digest for each in requests]
    return DemandReport(
        tuple((digest, each.input_tokens) for digest, each in zip(digests, requests, strict=True)),
        tuple((digest, each.output_tokens) for digest, each in zip(digests, requests, strict=True)),
    )


def _with_copies_on_host(profile: CostProfile, link: Link) -> CostProfile:
    """Return the profile of a replica's engine, whose adapter files are in its host's memory.

    The cluster counts the time of copies to the host, over the network or from a drive (``CopyCosts``), before the
    engine receives them. The time must not count again. So a load takes the time of the ``link`` to the device, and
    reading into the host tier takes no time.
    """
    no_time = Link(Constant(0.0, "s"), Constant(inf, "bytes/s"))
    transfers = msgspec.structs.replace(profile.transfers, source_to_device=link, source_to_host=no_time)
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
    """Return the options of the policies, with the mean lengths of the workload's requests."""
    _, preset = resolve_preset(settings.engine.preset)
    info = replica.info()
    slo = choice.slo
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
        max_batch=settings.engine.max_num_seqs,
    )
    lengths = prompt_tokens, output_tokens
    if (
        not needs_operating_points(preset)
        or loads_that_fit(profile, preset.kernel_form, options.slo, *lengths) is not None
    ):
        return options
    points = operating_points_for(
        profile, settings.engine.preset, options.slo, lengths, choice.seed, engine=settings.engine, show=show
    )
    ranks = {ref.max_rank for ref in adapters.values()}
    return msgspec.structs.replace(options, tokens_per_s={rank: points[rank] for rank in sorted(ranks)})


class ClusterSetup(msgspec.Struct, frozen=True):
    """Holds the parts of a cluster besides its replicas.

    Attributes:
        routing, placement: new policies.
        period_s: seconds between two placements, except for early placements in the first period.
        prefetch: whether replicas fetch the adapters of a new placement immediately.
        held_share: see ``Dispatcher``.
        copies: times of copies between replicas.
        provisioned: whether every adapter starts at the replicas of the first placement, or, if not all copies may be
            held, at one replica in turn. If False, adapters start without copies, and are read from their source files
            for their first request.
        migration: costs that co-migration needs; None for no co-migration.
        learned: learned costs of steps and loads; None if routing keeps its initial costs, as in papers.
        history: demand of earlier periods, oldest first.
    """

    routing: RoutingPolicy
    placement: PlacementPolicy
    period_s: float = 10.0
    prefetch: bool = False
    held_share: float = 1.0
    copies: CopyCosts = CopyCosts()
    provisioned: bool = True
    migration: MigrationCosts | None = None
    learned: LearnedCosts | None = None
    history: tuple[DemandReport, ...] = ()


class EventKind(IntEnum):
    """Names the kinds of events. Among events at one time, the kind listed first comes first.

    State changes come before decisions that use them. Engines begin their turns last, so a turn includes a request that
    arrives at the same time.
    """

    TURN_END = 0
    """An engine has ended a turn and reports its outputs."""
    COPIED = 1
    """A copy of an adapter, or of KV, has arrived."""
    PERIOD = 2
    """A period of demand ends."""
    REVIEW = 3
    """Co-migration reviews the cluster."""
    ARRIVAL = 4
    """A request arrives. These events are in the workload, not in the agenda."""
    TURN = 5
    """An engine begins a turn."""


class Event(NamedTuple):
    """Describes a future event. Events are ordered by time, kind and number.

    Attributes:
        at_s: time of the event.
        kind: kind of event.
        number: number of the event, in the order of creation.
        act: function that carries out the event; called with the time.
    """

    at_s: float
    kind: EventKind
    number: int
    act: Callable[[float], None]


class Agenda:
    """Holds the future events in order."""

    def __init__(self) -> None:
        self._of_engines: list[Event] = []
        self._others: list[Event] = []
        self._numbers = count()

    def add(self, at_s: float, kind: EventKind, act: Callable[[float], None]) -> None:
        """Add an event that is not in the past."""
        events = self._of_engines if kind in (EventKind.TURN_END, EventKind.TURN) else self._others
        heappush(events, Event(at_s, kind, next(self._numbers), act))

    def pop_before(self, arrival_s: float) -> Event | None:
        """Remove and return the next event.

        Return None if an arrival at ``arrival_s`` comes first, or no event is left.
        """
        heaps = [events for events in (self._of_engines, self._others) if events]
        events = min(heaps, key=lambda events: events[0], default=None)
        if events is None or events[0][:2] > (arrival_s, EventKind.ARRIVAL):
            return None
        return heappop(events)

    @property
    def engine_s(self) -> float:
        """Time at which an engine next begins or ends a turn; infinity if no turn is scheduled."""
        return self._of_engines[0].at_s if self._of_engines else math.inf

    @property
    def other_s(self) -> float:
        """Time of the next other event, without arrivals; infinity if there is none."""
        return self._others[0].at_s if self._others else math.inf


class ClusterRun:
    """Runs a workload on a simulated cluster.

    Args:
        replicas: replicas whose clocks are at the start of the workload.
        setup: setup of the cluster.
        adapters: all adapters that requests may name.
        arrivals: the workload.
        collector: collector of the same workload.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        setup: ClusterSetup,
        adapters: Sequence[AdapterRef],
        arrivals: WorkloadArrivals,
        collector: RecordCollector,
    ) -> None:
        now = arrivals.start_s
        self._replicas = {replica.id: replica for replica in replicas}
        self._setup = setup
        self._refs = {ref.digest: ref for ref in adapters}
        self._arrivals = arrivals
        self._collector = collector
        self._dispatcher = Dispatcher(setup.routing, prefetch=setup.prefetch, held_share=setup.held_share)
        for ref in adapters:
            self._dispatcher.register(ref.digest, size_bytes=ref.weight_bytes)
        self._began_s = max(now, arrivals.next_s())  # The first request starts a period.
        self._orchestrator = Orchestrator(
            setup.placement, list(self._replicas), self._began_s - len(setup.history) * setup.period_s
        )
        review = CoMigrationSettings() if setup.migration is None else setup.migration.settings
        self._comigration = CoMigration(review._replace(time_limit_s=SOLVER_LIMIT_S))
        self._copy_times = CopyTimes(setup.copies)
        self._copies = 0
        self._leaving = 0  # requests that leave their replicas at the end of a turn
        self._agenda = Agenda()
        self._requests: dict[RequestId, Request] = {}
        self._sent_s: dict[RequestId, float] = {}
        self._moved_s: dict[RequestId, float] = {}
        self._targets: dict[RequestId, ReplicaId] = {}
        self._imports: dict[RequestId, ExportedKv] = {}
        self._period_arrivals: list[tuple[AdapterDigest, int]] = []
        self._period_answers: list[tuple[AdapterDigest, int]] = []
        self._tally = ClusterTally(list(self._replicas), {ref.digest: ref.weight_bytes for ref in adapters}, now)

    def run(self) -> ClusterFigures:
        """Run until all requests have ended, or the collector's budget is exceeded.

        Raises:
            ExecutorError: a step failed, or requests wait although no event in flight can let a request continue.
        """
        now = self._arrivals.start_s
        self._start(now)
        while (arrival_s := self._arrivals.next_s()) < math.inf or self._arrivals.in_flight:
            if self._collector.is_over_budget:
                break
            event = self._agenda.pop_before(arrival_s)
            if event is None:
                now = max(now, arrival_s)  # The next turn of a conversation may follow an answer that failed early.
                self._arrive(self._arrivals.take(), now)
            elif arrival_s == math.inf and self._is_stalled(event.kind):
                raise ExecutorError("requests wait, and nothing is in flight that could let one continue")
            else:
                now = event.at_s
                event.act(now)
        return self._tally.figures({replica.id: replica.busy_s for replica in self._replicas.values()}, now)

    def _start(self, now: float) -> None:
        """Place all adapters, and copy them without cost."""
        known = [AdapterInfo(ref.digest, ref.max_rank, ref.weight_bytes) for ref in self._refs.values()]
        table = self._orchestrator.register(known, now)
        for after, report in enumerate(self._setup.history, start=1 - len(self._setup.history)):
            table = self._orchestrator.period(report, self._began_s + after * self._setup.period_s)
        there: dict[ReplicaId, list[AdapterDigest]] = {each: [] for each in self._replicas}
        pairs = list(table.pairs()) if self._setup.held_share >= 1 else list(zip(self._refs, cycle(there)))
        for adapter, each in pairs if self._setup.provisioned else ():
            there[each].append(adapter)
            self._tally.seeded(adapter, each, now)
        for replica in self._replicas.values():
            held = there[replica.id]
            self._apply(self._dispatcher.join(replica.info(), now, held), now)
            self._send(replica, RegisterAdapters(tuple(map(self._refs.__getitem__, held))), now)
        self._place(table, now)
        for part in EARLY_PLACEMENTS:
            self._agenda.add(self._began_s + part * self._setup.period_s, EventKind.PERIOD, self._place_early)
        self._agenda.add(self._began_s + self._setup.period_s, EventKind.PERIOD, self._end_period)
        if self._setup.migration is not None:
            self._agenda.add(now + REVIEW_S, EventKind.REVIEW, partial(self._review, self._setup.migration))

    def _is_stalled(self, kind: EventKind) -> bool:
        """Return whether only periodic events are left, given the kind of the next event."""
        return kind in (EventKind.PERIOD, EventKind.REVIEW) and not self._copies and self._agenda.engine_s == math.inf

    # --- requests ------------------------------------------------------------------------------------

    def _arrive(self, request: Request, now: float) -> None:
        self._requests[request.request_id] = request
        if request.digest is not None:
            self._period_arrivals.append((request.digest, len(request.prompt_token_ids)))
        self._apply(self._dispatcher.arrive(self._routing_request(request), now), now)

    def _routing_request(self, request: Request) -> RoutingRequest:
        block_size = next(iter(self._replicas.values())).sizes.block_size
        return routing_request(request, block_size if self._setup.routing.wants_keys else None)

    def _apply(self, actions: Actions, now: float) -> None:
        """Carry out the dispatcher's actions."""
        assert not actions.failed, "no copy fails here"
        for request_id, replica in actions.sends:
            self._sent_s[request_id] = now
            self._tally.of[replica].requests += 1
            request = self._requests[request_id]
            exported = self._imports.pop(request_id, None)
            if exported is not None:
                self._send(self._replicas[replica], ImportKv(request.adapter, exported.keys, exported.blocks), now)
            self._send(self._replicas[replica], Submit(request), now)
        for fetch in actions.fetches:
            end_s = self._copy_times.fetched_s(fetch.source, self._refs[fetch.adapter].weight_bytes, now)
            self._copies += 1
            self._agenda.add(end_s, EventKind.COPIED, partial(self._fetched, fetch))
        for provision in actions.provisions:
            end_s = self._copy_times.provided_s(provision.replica, self._refs[provision.adapter].weight_bytes, now)
            self._copies += 1
            self._agenda.add(end_s, EventKind.COPIED, partial(self._provided, provision))
        for adapter, replica in actions.deletes:
            self._tally.deleted(adapter, replica, now)
            self._send(self._replicas[replica], DropAdapter(adapter), now)

    def _fetched(self, fetch: Fetch, now: float) -> None:
        self._copies -= 1
        self._tally.fetched(fetch.adapter, fetch.destination, now)
        self._send(self._replicas[fetch.destination], RegisterAdapters((self._refs[fetch.adapter],)), now)
        self._apply(self._dispatcher.fetched(fetch), now)

    def _provided(self, provision: Provision, now: float) -> None:
        self._copies -= 1
        self._tally.provided(provision.adapter, provision.replica, now)
        self._send(self._replicas[provision.replica], RegisterAdapters((self._refs[provision.adapter],)), now)
        self._apply(self._dispatcher.provided(provision), now)

    # --- engines -------------------------------------------------------------------------------------

    def _send(self, replica: SimulatedReplica, message: EngineMessage, now: float) -> None:
        replica.send(message)
        self._schedule_turn(replica, now)

    def _schedule_turn(self, replica: SimulatedReplica, at_s: float) -> None:
        """Schedule a turn of an engine, unless an earlier turn is scheduled.

        During a turn, the turn's end schedules the next.
        """
        if not replica.is_turning and at_s < replica.turn_s:
            replica.turn_s = at_s
            self._agenda.add(at_s, EventKind.TURN, partial(self._turn, replica))

    def _turn(self, replica: SimulatedReplica, now: float) -> None:
        if now != replica.turn_s:
            return  # An earlier turn has been scheduled since then.
        replica.turn_s = math.inf
        replica.is_turning = True
        outputs, end_s = replica.turn(now, self._until_s())
        self._agenda.add(end_s, EventKind.TURN_END, partial(self._on_turn_end, replica, outputs))

    def _until_s(self) -> float:
        """Return the time until which no message can reach an engine that begins a turn now."""
        until_s = min(self._arrivals.next_s(), self._agenda.other_s)
        if self._dispatcher.waiting or self._arrivals.follow_answers or self._leaving:
            until_s = min(until_s, self._agenda.engine_s)
        return until_s

    def _on_turn_end(self, replica: SimulatedReplica, outputs: StepOutputs, now: float) -> None:
        """End a turn: apply its outputs, then move the requests that leave."""
        replica.is_turning = False
        self._collector.take(outputs, now)
        self._tally.of[replica.id].output_tokens += sum(len(output.tokens) for output in outputs.tokens)
        self._apply(self._dispatcher.apply_outputs(replica.id, outputs, now), now)
        for event in outputs.events:
            if isinstance(event, Finished):
                self._ended(event.request_id)
        if outputs.stats is not None:
            learned = self._setup.learned
            if learned is not None and learned.note(replica.id, outputs.stats):
                self._setup.routing.learn(learned.costs)
            gauges = replica_gauges(replica.id, EPOCH, outputs.stats, replica.sizes.block_size)
            self._apply(self._dispatcher.gauges(gauges, now), now)
        for exported in outputs.exported_kv:
            self._on_exported(replica, exported, now)
        all_leaving = replica.leaving
        replica.leaving = []
        self._leaving -= len(all_leaving)
        for leaving in all_leaving:
            self._move(leaving, now)
        self._schedule_turn(replica, replica.next_turn_s(now))

    def _ended(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id)
        del self._sent_s[request_id]
        self._moved_s.pop(request_id, None)
        exchange = self._collector.exchange(request_id)
        if request.digest is not None and exchange.error is None:
            self._period_answers.append((request.digest, exchange.output_tokens))

    # --- placement and migration ---------------------------------------------------------------------

    def _place(self, table: RoutingTable, now: float) -> None:
        self._tally.routed(table, now)
        self._apply(self._dispatcher.swap(table, now), now)

    def _place_early(self, now: float) -> None:
        self._report_demand(now, is_period_end=False)

    def _end_period(self, now: float) -> None:
        self._report_demand(now, is_period_end=True)
        self._agenda.add(now + self._setup.period_s, EventKind.PERIOD, self._end_period)

    def _report_demand(self, now: float, is_period_end: bool) -> None:
        before = self._orchestrator.table.epoch
        report = DemandReport(tuple(self._period_arrivals), tuple(self._period_answers), is_period_end)
        self._period_arrivals.clear()
        self._period_answers.clear()
        table = self._orchestrator.period(report, now)
        if table.epoch != before:
            self._tally.placements += 1
            self._place(table, now)

    def _review(self, migration: MigrationCosts, now: float) -> None:
        times, reserved_share, _ = migration
        observed = observe(self._dispatcher.fleet, self._sent_s, self._moved_s, times, now, reserved_share)
        requests = {request.request_id: request for request in observed.requests}
        for move in self._comigration.review(*observed).moves:
            source = self._replicas[move.source]
            leaving = PendingMove(requests[move.request_id], move.target)
            if source.is_turning:
                source.leaving.append(leaving)
                self._leaving += 1
            else:
                self._move(leaving, now)
        self._agenda.add(now + REVIEW_S, EventKind.REVIEW, partial(self._review, migration))

    def _move(self, leaving: PendingMove, now: float) -> None:
        """Export a request from its engine, unless it has ended or moved since the review."""
        request, target = leaving
        request_id = request.request_id
        source = self._replicas[request.replica]
        if self._dispatcher.fleet.where(request_id) != request.replica or request_id in self._targets:
            return
        exported = source.export_with_kv(request_id, now) if request.transfers_kv else None
        self._requests[request_id] = exported or source.withdraw(request_id, now)
        self._schedule_turn(source, now)
        del self._sent_s[request_id]
        self._moved_s[request_id] = self._moved_s.get(request_id, 0.0) + request.move_s
        self._tally.moves += 1
        if exported is None:
            self._redispatch(request_id, target, now)
        else:
            self._targets[request_id] = target

    def _on_exported(self, replica: SimulatedReplica, exported: ExportedKv, now: float) -> None:
        """Send the KV of an exported request from its host's memory to another host."""
        size_bytes = len(exported.keys) * replica.sizes.block_bytes
        self._copies += 1
        end_s = self._copy_times.kv_arrival_s(replica.id, size_bytes, now)
        self._agenda.add(end_s, EventKind.COPIED, partial(self._on_kv_arrived, exported))

    def _on_kv_arrived(self, exported: ExportedKv, now: float) -> None:
        self._copies -= 1
        self._imports[exported.request_id] = exported
        self._redispatch(exported.request_id, self._targets.pop(exported.request_id), now)

    def _redispatch(self, request_id: RequestId, target: ReplicaId, now: float) -> None:
        self._apply(self._dispatcher.move(self._routing_request(self._requests[request_id]), target, now), now)
