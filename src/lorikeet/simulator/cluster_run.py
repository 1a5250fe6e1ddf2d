"""Many modelled engines on one virtual time, behind the dispatcher and the orchestrator of a live cluster.

Every engine has a clock of its own. A turn that begins at s is computed at s and moves that clock to its end e; what
it has to tell is heard at e. So whoever decides at t knows what engines had told by t, and nothing else. What is sent
to an engine during its turn it receives with the next one, as a live engine does, and arrival times stay what they
are.

With ``num_scheduler_steps`` 1 steps that would be planned alike are run in one turn, as long as nothing can reach their engine:
until the next arrival, copy, placement or review. Where the turns of others may send something, too (requests wait to
be routed, to be moved, or for the answer to another), also until the next of these turns begins or ends. So repeats
change neither times nor what routers know of requests; only that a copy was deleted, for which nobody waits, an engine
hears after them.
"""

import math
from collections.abc import Sequence
from functools import partial

import msgspec

from lorikeet.bench.in_process import Collector, WorkloadArrivals
from lorikeet.cluster.actions import Actions, Provision
from lorikeet.cluster.asked import Asked, asked
from lorikeet.cluster.build import MigrationCosts
from lorikeet.cluster.comigration.observe import observe
from lorikeet.cluster.comigration.review import CoMigration
from lorikeet.cluster.comigration.state import CoMigrationSettings
from lorikeet.cluster.demand import LOOKS
from lorikeet.cluster.dispatcher import Dispatcher
from lorikeet.cluster.fetch_times import CopyCosts, CopyTimes
from lorikeet.cluster.hearing import gauges
from lorikeet.cluster.orchestrator import Known, Orchestrator, Seen
from lorikeet.cluster.placement.base import Placement
from lorikeet.cluster.pool import Fetch
from lorikeet.cluster.routing.base import Router
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import BringKv, Departed, DropAdapter, KnowAdapters, StepOutputs, Submit
from lorikeet.core.request import Request
from lorikeet.engine.executor import ExecutorError
from lorikeet.simulator.agenda import Agenda, Kind
from lorikeet.simulator.cluster_figures import ClusterFigures, Tally
from lorikeet.simulator.replica import EPOCH, Leaving, SimulatedReplica, Told

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
        collector: Collector,
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
        self._brought: dict[RequestId, Departed] = {}
        self._seen_arrivals: list[tuple[AdapterDigest, int]] = []
        self._seen_answers: list[tuple[AdapterDigest, int]] = []
        self._tally = Tally(list(self._replicas), {ref.digest: ref.weight_bytes for ref in adapters}, now)

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
        known = [Known(ref.digest, ref.max_rank, ref.weight_bytes) for ref in self._refs.values()]
        table = self._orchestrator.know(known, now)
        there: dict[ReplicaId, list[AdapterDigest]] = {each: [] for each in self._replicas}
        for adapter, each in table.pairs() if self._setup.provisioned else ():
            there[each].append(adapter)
            self._tally.seeded(adapter, each, now)
        for replica in self._replicas.values():
            held = there[replica.id]
            self._perform(self._dispatcher.join(replica.info(), now, held), now)
            self._tell(replica, KnowAdapters(tuple(map(self._refs.__getitem__, held))), now)
        self._place(table, now)
        for part in LOOKS:
            self._agenda.add(self._began_s + part * self._setup.period_s, Kind.PERIOD, self._look)
        self._agenda.add(self._began_s + self._setup.period_s, Kind.PERIOD, self._end_period)
        if self._setup.migration is not None:
            self._agenda.add(now + REVIEW_S, Kind.REVIEW, partial(self._review, self._setup.migration))

    def _is_stuck(self, kind: Kind) -> bool:
        """Whether nothing goes on but what goes on for ever; the next event is of that kind."""
        return kind in (Kind.PERIOD, Kind.REVIEW) and not self._copies and self._agenda.engine_s == math.inf

    # --- requests ------------------------------------------------------------------------------------

    def _arrive(self, request: Request, now: float) -> None:
        self._requests[request.request_id] = request
        if request.digest is not None:
            self._seen_arrivals.append((request.digest, len(request.prompt_token_ids)))
        self._perform(self._dispatcher.arrive(self._asked(request), now), now)

    def _asked(self, request: Request) -> Asked:
        block_size = next(iter(self._replicas.values())).sizes.block_size
        return asked(request, block_size if self._setup.router.wants_keys else None)

    def _perform(self, actions: Actions, now: float) -> None:
        """Do what the dispatcher asks for."""
        assert not actions.failed, "no copy fails here"
        for request_id, replica in actions.sends:
            self._sent_s[request_id] = now
            self._tally.of[replica].requests += 1
            request, brought = self._requests[request_id], self._brought.pop(request_id, None)
            if brought is not None:
                self._tell(self._replicas[replica], BringKv(request.adapter, brought.keys, brought.blocks), now)
            self._tell(self._replicas[replica], Submit(request), now)
        for fetch in actions.fetches:
            end_s = self._copy_times.fetched_s(fetch.source, self._refs[fetch.adapter].weight_bytes, now)
            self._copies += 1
            self._agenda.add(end_s, Kind.COPIED, partial(self._fetched, fetch))
        for provision in actions.provisions:
            end_s = self._copy_times.provided_s(provision.replica, self._refs[provision.adapter].weight_bytes, now)
            self._copies += 1
            self._agenda.add(end_s, Kind.COPIED, partial(self._provided, provision))
        for adapter, replica in actions.deletes:
            self._tally.deleted(adapter, replica, now)
            self._tell(self._replicas[replica], DropAdapter(adapter), now)

    def _fetched(self, fetch: Fetch, now: float) -> None:
        self._copies -= 1
        self._tally.fetched(fetch.adapter, fetch.destination, now)
        self._tell(self._replicas[fetch.destination], KnowAdapters((self._refs[fetch.adapter],)), now)
        self._perform(self._dispatcher.fetched(fetch), now)

    def _provided(self, provision: Provision, now: float) -> None:
        self._copies -= 1
        self._tally.provided(provision.adapter, provision.replica, now)
        self._tell(self._replicas[provision.replica], KnowAdapters((self._refs[provision.adapter],)), now)
        self._perform(self._dispatcher.provided(provision), now)

    # --- engines -------------------------------------------------------------------------------------

    def _tell(self, replica: SimulatedReplica, message: Told, now: float) -> None:
        replica.tell(message)
        self._give_turn(replica, now)

    def _give_turn(self, replica: SimulatedReplica, at_s: float) -> None:
        """Let an engine begin a turn then, unless it does so before, or looks for itself when its turn has ended."""
        if not replica.is_turning and at_s < replica.turn_s:
            replica.turn_s = at_s
            self._agenda.add(at_s, Kind.TURN, partial(self._turn, replica))

    def _turn(self, replica: SimulatedReplica, now: float) -> None:
        if now != replica.turn_s:
            return  # it was given an earlier turn since
        replica.turn_s, replica.is_turning = math.inf, True
        outputs, end_s = replica.turn(now, self._until_s())
        self._agenda.add(end_s, Kind.HEARD, partial(self._heard, replica, outputs))

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
        self._perform(self._dispatcher.hear(replica.id, outputs, now), now)
        for event in outputs.events:
            if isinstance(event, Finished):
                self._ended(event.request_id)
        if outputs.stats is not None:
            told = gauges(replica.id, EPOCH, outputs.stats, replica.sizes.block_size)
            self._perform(self._dispatcher.gauges(told, now), now)
        for departed in outputs.departed:
            self._departed(replica, departed, now)
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
        self._agenda.add(now + self._setup.period_s, Kind.PERIOD, self._end_period)

    def _tell_seen(self, now: float, is_over: bool) -> None:
        before = self._orchestrator.table.epoch
        seen = Seen(tuple(self._seen_arrivals), tuple(self._seen_answers), is_over)
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
            source, leaving = self._replicas[move.source], Leaving(requests[move.request_id], move.target)
            if source.is_turning:
                source.leaving.append(leaving)
            else:
                self._move(leaving, now)
        self._agenda.add(now + REVIEW_S, Kind.REVIEW, partial(self._review, migration))

    def _move(self, leaving: Leaving, now: float) -> None:
        """Take a request out of its engine and give it to another, unless it has ended or left since the review."""
        seen, target = leaving
        request_id, source = seen.request_id, self._replicas[seen.replica]
        if self._dispatcher.fleet.where(request_id) != seen.replica or request_id in self._targets:
            return
        let_go = source.let_go(request_id, now) if seen.carries_kv else None
        self._requests[request_id] = let_go or source.withdraw(request_id, now)
        self._give_turn(source, now)
        del self._sent_s[request_id]
        self._moved_s[request_id] = self._moved_s.get(request_id, 0.0) + seen.move_s
        self._tally.moves += 1
        if let_go is None:
            self._go_on(request_id, target, now)
        else:
            self._targets[request_id] = target

    def _departed(self, replica: SimulatedReplica, departed: Departed, now: float) -> None:
        """The KV of a request that was let go is in its host's memory, and goes on to another's."""
        size_bytes = len(departed.keys) * replica.sizes.block_bytes
        self._copies += 1
        end_s = self._copy_times.carried_s(replica.id, size_bytes, now)
        self._agenda.add(end_s, Kind.COPIED, partial(self._carried, departed))

    def _carried(self, departed: Departed, now: float) -> None:
        self._copies -= 1
        self._brought[departed.request_id] = departed
        self._go_on(departed.request_id, self._targets.pop(departed.request_id), now)

    def _go_on(self, request_id: RequestId, target: ReplicaId, now: float) -> None:
        self._perform(self._dispatcher.move(self._asked(self._requests[request_id]), target, now), now)
