"""Runs a workload through many modelled engines on one virtual clock.

They stand behind the dispatcher and the orchestrator of a live cluster. The agenda orders what is still to happen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import fmean
from typing import NamedTuple

import msgspec

from lorikeet.bench.in_process import RecordCollector, WorkloadArrivals
from lorikeet.bench.predictors import Predictor
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.replicas import build_modelled
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.cluster.adapters.copy_times import CopyCosts, CopyTimes, FetchForm
from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.build import (
    ClusterOptions,
    MigrationCosts,
    build_cluster_policies,
    build_migration,
    loads_that_fit,
    needs_operating_points,
)
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher, Provision
from lorikeet.cluster.migration.problem import CoMigrationSettings
from lorikeet.cluster.migration.review import CoMigration, observe
from lorikeet.cluster.placement.base import Placement
from lorikeet.cluster.placement.demand import LOOKS
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.routing.base import Router
from lorikeet.cluster.routing.fleet import replica_gauges
from lorikeet.cluster.routing.request import RoutingRequest, routing_request
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
from lorikeet.costs.transfers import LinkDirection
from lorikeet.presets import resolve_preset
from lorikeet.simulator.operating_points import Show, operating_points_for
from lorikeet.simulator.replica import EPOCH, EngineMessage, PendingMove, SimulatedReplica
from lorikeet.simulator.run import ClusterFigures, ClusterTally, Simulated
from lorikeet.worker.modelled import transfer_model


class EventKind(IntEnum):
    """What happens; of several things at one time the first here comes first.

    What became known is heard before anything is decided by it, and engines begin their turns when all else is done:
    a request that comes at that very moment is part of the turn.
    """

    HEARD = 0
    """An engine has ended a turn, and tells."""
    COPIED = 1
    """A copy of an adapter has come."""
    PERIOD = 2
    """A period of demand ends."""
    REVIEW = 3
    """Co-migration looks at the cluster."""
    ARRIVAL = 4
    """A request arrives. These are not kept here, but with the workload."""
    TURN = 5
    """An engine begins a turn."""


class Event(NamedTuple):
    """Something to happen. Earlier ones are smaller; no two are equal, by their numbers.

    Attributes:
        at_s: when.
        kind: what.
        number: in the order in which they were added.
        act: does it; called with the time.
    """

    at_s: float
    kind: EventKind
    number: int
    act: Callable[[float], None]


class Agenda:
    """See the module."""

    def __init__(self) -> None:
        self._of_engines: list[Event] = []
        self._others: list[Event] = []
        self._numbers = count()

    def add(self, at_s: float, kind: EventKind, act: Callable[[float], None]) -> None:
        """Note something to happen at a time that is not past."""
        events = self._of_engines if kind in (EventKind.HEARD, EventKind.TURN) else self._others
        heappush(events, Event(at_s, kind, next(self._numbers), act))

    def pop_before(self, arrival_s: float) -> Event | None:
        """Take and return what happens next, None if it is an arrival at ``arrival_s``, or if there is nothing."""
        heaps = [events for events in (self._of_engines, self._others) if events]
        events = min(heaps, key=lambda events: events[0], default=None)
        if events is None or events[0][:2] > (arrival_s, EventKind.ARRIVAL):
            return None
        return heappop(events)

    @property
    def engine_s(self) -> float:
        """When an engine begins a turn or tells of one next; infinity if none does."""
        return self._of_engines[0].at_s if self._of_engines else math.inf

    @property
    def other_s(self) -> float:
        """When anything else happens next, arrivals apart."""
        return self._others[0].at_s if self._others else math.inf


REVIEW_S = 1.0
"""Time between two reviews of co-migration (docs/decisions/comigration.md)."""

SOLVER_LIMIT_S = 30.0
"""For each run of co-migration's solver, on this machine's clock, which must not decide what a simulation finds: a live
cluster gives up after 50 ms. What takes longer than this stays unsolved here, too."""


class ClusterSetup(msgspec.Struct, frozen=True):
    """What a cluster is made of beside its replicas.

    Attributes:
        router, placement: policies, fresh ones.
        period_s: time between two placements, but for looks at the first period.
        prefetch: replicas fetch what a new placement gives them at once.
        copies: what copies between replicas take.
        provisioned: at the start every adapter is where the first placement has it; else nowhere, and its first request
            has it read from its files.
        migration: what co-migration must know; None for no co-migration.
    """

    router: Router
    placement: Placement
    period_s: float = 10.0
    prefetch: bool = False
    copies: CopyCosts = CopyCosts()
    provisioned: bool = True
    migration: MigrationCosts | None = None


class ClusterRun:
    """One run of a workload; see the module.

    Args:
        replicas: on clocks that stand where the workload starts.
        setup: of the cluster.
        adapters: all that requests may ask for.
        arrivals: the workload.
        collector: of the same.
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
        self._dispatcher = Dispatcher(setup.router, prefetch=setup.prefetch)
        self._began_s = max(now, arrivals.next_s())  # the first request begins a period
        self._orchestrator = Orchestrator(setup.placement, self._began_s)
        self._comigration = CoMigration(CoMigrationSettings(time_limit_s=SOLVER_LIMIT_S))
        self._copy_times = CopyTimes(setup.copies)
        self._copies = 0
        self._agenda = Agenda()
        self._requests: dict[RequestId, Request] = {}
        self._sent_s: dict[RequestId, float] = {}
        self._moved_s: dict[RequestId, float] = {}
        self._targets: dict[RequestId, ReplicaId] = {}
        self._brought: dict[RequestId, ExportedKv] = {}
        self._seen_arrivals: list[tuple[AdapterDigest, int]] = []
        self._seen_answers: list[tuple[AdapterDigest, int]] = []
        self._tally = ClusterTally(list(self._replicas), {ref.digest: ref.weight_bytes for ref in adapters}, now)

    def run(self) -> ClusterFigures:
        """Run until all requests have ended.

        Raises:
            ExecutorError: a step failed, or requests wait and nothing is under way that could let one go on.
        """
        now = self._arrivals.start_s
        self._begin(now)
        while (arrival_s := self._arrivals.next_s()) < math.inf or self._arrivals.under_way:
            event = self._agenda.pop_before(arrival_s)
            if event is None:
                now = max(now, arrival_s)  # one may follow an answer that failed before its turn ended
                self._arrive(self._arrivals.take(), now)
            elif arrival_s == math.inf and self._is_stuck(event.kind):
                raise ExecutorError("requests wait, and nothing is under way that could let one go on")
            else:
                now = event.at_s
                event.act(now)
        return self._tally.figures({replica.id: replica.busy_s for replica in self._replicas.values()}, now)

    def _begin(self, now: float) -> None:
        """Place all adapters, and bring them there at no cost."""
        known = [AdapterInfo(ref.digest, ref.max_rank, ref.weight_bytes) for ref in self._refs.values()]
        table = self._orchestrator.know(known, now)
        there: dict[ReplicaId, list[AdapterDigest]] = {each: [] for each in self._replicas}
        for adapter, each in table.pairs() if self._setup.provisioned else ():
            there[each].append(adapter)
            self._tally.seeded(adapter, each, now)
        for replica in self._replicas.values():
            held = there[replica.id]
            self._perform(self._dispatcher.join(replica.info(), now, held), now)
            self._tell(replica, RegisterAdapters(tuple(map(self._refs.__getitem__, held))), now)
        self._place(table, now)
        for part in LOOKS:
            self._agenda.add(self._began_s + part * self._setup.period_s, EventKind.PERIOD, self._look)
        self._agenda.add(self._began_s + self._setup.period_s, EventKind.PERIOD, self._end_period)
        if self._setup.migration is not None:
            self._agenda.add(now + REVIEW_S, EventKind.REVIEW, partial(self._review, self._setup.migration))

    def _is_stuck(self, kind: EventKind) -> bool:
        """Whether nothing goes on but what goes on for ever; the next event is of that kind."""
        return kind in (EventKind.PERIOD, EventKind.REVIEW) and not self._copies and self._agenda.engine_s == math.inf

    # --- requests ------------------------------------------------------------------------------------

    def _arrive(self, request: Request, now: float) -> None:
        self._requests[request.request_id] = request
        if request.digest is not None:
            self._seen_arrivals.append((request.digest, len(request.prompt_token_ids)))
        self._perform(self._dispatcher.arrive(self._asked(request), now), now)

    def _asked(self, request: Request) -> RoutingRequest:
        block_size = next(iter(self._replicas.values())).sizes.block_size
        return routing_request(request, block_size if self._setup.router.wants_keys else None)

    def _perform(self, actions: Actions, now: float) -> None:
        """Do what the dispatcher asks for."""
        assert not actions.failed, "no copy fails here"
        for request_id, replica in actions.sends:
            self._sent_s[request_id] = now
            self._tally.of[replica].requests += 1
            request, brought = self._requests[request_id], self._brought.pop(request_id, None)
            if brought is not None:
                self._tell(self._replicas[replica], ImportKv(request.adapter, brought.keys, brought.blocks), now)
            self._tell(self._replicas[replica], Submit(request), now)
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
            self._tell(self._replicas[replica], DropAdapter(adapter), now)

    def _fetched(self, fetch: Fetch, now: float) -> None:
        self._copies -= 1
        self._tally.fetched(fetch.adapter, fetch.destination, now)
        self._tell(self._replicas[fetch.destination], RegisterAdapters((self._refs[fetch.adapter],)), now)
        self._perform(self._dispatcher.fetched(fetch), now)

    def _provided(self, provision: Provision, now: float) -> None:
        self._copies -= 1
        self._tally.provided(provision.adapter, provision.replica, now)
        self._tell(self._replicas[provision.replica], RegisterAdapters((self._refs[provision.adapter],)), now)
        self._perform(self._dispatcher.provided(provision), now)

    # --- engines -------------------------------------------------------------------------------------

    def _tell(self, replica: SimulatedReplica, message: EngineMessage, now: float) -> None:
        replica.tell(message)
        self._give_turn(replica, now)

    def _give_turn(self, replica: SimulatedReplica, at_s: float) -> None:
        """Let an engine begin a turn then, unless it does so before, or looks for itself when its turn has ended."""
        if not replica.is_turning and at_s < replica.turn_s:
            replica.turn_s = at_s
            self._agenda.add(at_s, EventKind.TURN, partial(self._turn, replica))

    def _turn(self, replica: SimulatedReplica, now: float) -> None:
        if now != replica.turn_s:
            return  # it was given an earlier turn since
        replica.turn_s, replica.is_turning = math.inf, True
        outputs, end_s = replica.turn(now, self._until_s())
        self._agenda.add(end_s, EventKind.HEARD, partial(self._heard, replica, outputs))

    def _until_s(self) -> float:
        """Return until when nothing can reach an engine that begins a turn now (see the module)."""
        until_s = min(self._arrivals.next_s(), self._agenda.other_s)
        is_leaving = any(replica.leaving for replica in self._replicas.values())
        if self._dispatcher.waiting or self._arrivals.follow_answers or is_leaving:
            until_s = min(until_s, self._agenda.engine_s)
        return until_s

    def _heard(self, replica: SimulatedReplica, outputs: StepOutputs, now: float) -> None:
        """A turn has ended: all that it has to tell is heard, and whoever is to leave leaves."""
        replica.is_turning = False
        self._collector.take(outputs, now)
        self._tally.of[replica.id].output_tokens += sum(len(output.tokens) for output in outputs.tokens)
        self._perform(self._dispatcher.apply_outputs(replica.id, outputs, now), now)
        for event in outputs.events:
            if isinstance(event, Finished):
                self._ended(event.request_id)
        if outputs.stats is not None:
            told = replica_gauges(replica.id, EPOCH, outputs.stats, replica.sizes.block_size)
            self._perform(self._dispatcher.gauges(told, now), now)
        for exported_kv in outputs.exported_kv:
            self._departed(replica, exported_kv, now)
        all_leaving, replica.leaving = replica.leaving, []
        for leaving in all_leaving:
            self._move(leaving, now)
        self._give_turn(replica, replica.next_turn_s(now))

    def _ended(self, request_id: RequestId) -> None:
        request = self._requests.pop(request_id)
        del self._sent_s[request_id]
        self._moved_s.pop(request_id, None)
        exchange = self._collector.exchange(request_id)
        if request.digest is not None and exchange.error is None:
            self._seen_answers.append((request.digest, exchange.output_tokens))

    # --- placement and migration ---------------------------------------------------------------------

    def _place(self, table: RoutingTable, now: float) -> None:
        self._tally.routed(table, now)
        self._perform(self._dispatcher.swap(table, now), now)

    def _look(self, now: float) -> None:
        self._tell_seen(now, is_over=False)

    def _end_period(self, now: float) -> None:
        self._tell_seen(now, is_over=True)
        self._agenda.add(now + self._setup.period_s, EventKind.PERIOD, self._end_period)

    def _tell_seen(self, now: float, is_over: bool) -> None:
        before = self._orchestrator.table.epoch
        seen = DemandReport(tuple(self._seen_arrivals), tuple(self._seen_answers), is_over)
        self._seen_arrivals.clear()
        self._seen_answers.clear()
        table = self._orchestrator.period(seen, now)
        if table.epoch != before:
            self._tally.placements += 1
            self._place(table, now)

    def _review(self, migration: MigrationCosts, now: float) -> None:
        times, reserved_share = migration
        observed = observe(self._dispatcher.fleet, self._sent_s, self._moved_s, times, now, reserved_share)
        requests = {request.request_id: request for request in observed.requests}
        for move in self._comigration.review(*observed).moves:
            source, leaving = self._replicas[move.source], PendingMove(requests[move.request_id], move.target)
            if source.is_turning:
                source.leaving.append(leaving)
            else:
                self._move(leaving, now)
        self._agenda.add(now + REVIEW_S, EventKind.REVIEW, partial(self._review, migration))

    def _move(self, leaving: PendingMove, now: float) -> None:
        """Take a request out of its engine and give it to another, unless it has ended or left since the review."""
        seen, target = leaving
        request_id, source = seen.request_id, self._replicas[seen.replica]
        if self._dispatcher.fleet.where(request_id) != seen.replica or request_id in self._targets:
            return
        export_with_kv = source.export_with_kv(request_id, now) if seen.carries_kv else None
        self._requests[request_id] = export_with_kv or source.withdraw(request_id, now)
        self._give_turn(source, now)
        del self._sent_s[request_id]
        self._moved_s[request_id] = self._moved_s.get(request_id, 0.0) + seen.move_s
        self._tally.moves += 1
        if export_with_kv is None:
            self._go_on(request_id, target, now)
        else:
            self._targets[request_id] = target

    def _departed(self, replica: SimulatedReplica, exported_kv: ExportedKv, now: float) -> None:
        """The KV of a request that was let go is in its host's memory, and goes on to another's."""
        size_bytes = len(exported_kv.keys) * replica.sizes.block_bytes
        self._copies += 1
        end_s = self._copy_times.carried_s(replica.id, size_bytes, now)
        self._agenda.add(end_s, EventKind.COPIED, partial(self._carried, exported_kv))

    def _carried(self, exported_kv: ExportedKv, now: float) -> None:
        self._copies -= 1
        self._brought[exported_kv.request_id] = exported_kv
        self._go_on(exported_kv.request_id, self._targets.pop(exported_kv.request_id), now)

    def _go_on(self, request_id: RequestId, target: ReplicaId, now: float) -> None:
        self._perform(self._dispatcher.move(self._asked(self._requests[request_id]), target, now), now)


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


@rare_gc()
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
    link = transfer_model(settings.engine, profile).link(LinkDirection.IN)
    profile = _with_copies_on_host(profile, link)
    arrivals = WorkloadArrivals(workload, adapters, prompts, 0.0, predict=predict)
    collector = RecordCollector(workload, arrivals, on_finished)
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
    at_once = Link(Constant(0.0, "s"), Constant(inf, "bytes/s"))
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
