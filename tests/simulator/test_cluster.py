"""Simulated clusters: the information of decisions, the charged times, and one replica as one engine."""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from lorikeet.bench.in_process import RunObserver, run_workload
from lorikeet.bench.load_report import RequestResult
from lorikeet.bench.replicas import ModelledReplica, build_modelled
from lorikeet.cluster.adapters.copy_times import CopyCosts, FetchForm
from lorikeet.cluster.build import MigrationCosts
from lorikeet.cluster.migration.problem import (
    CoMigrationSettings,
    MigrationPlan,
    MovableRequest,
    MoveTimes,
    ReplicaLoad,
    RequestMove,
    ReviewOutcome,
)
from lorikeet.cluster.placement.orchestrator import DemandReport
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy
from lorikeet.cluster.routing.by_table import ByTable
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.plain import LeastLoaded, RoundRobin
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.config import Settings
from lorikeet.core.clock import VirtualClock
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.request import Request
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.devices import COPY_S, DEVICES
from lorikeet.costs.profile import Constant, CostProfile, Link, Transfers
from lorikeet.engine.build import assemble
from lorikeet.papers.loraserve.placement import RandomPlacement
from lorikeet.papers.loraserve.routing import FewestTokens
from lorikeet.papers.toppings.first_fit import FirstFit
from lorikeet.presets import resolve_preset
from lorikeet.simulator import cluster
from lorikeet.simulator.cluster import ClusterChoice, simulate_cluster
from lorikeet.worker.modelled import build_modelled_executor
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.synthetic import synthetic_adapters
from lorikeet.workloads.workload import WorkloadRequest
from tests.support.clusters import BLOCK, Always, Fixed, names, settings, simulated, some_adapters
from tests.support.profiles import round_profile, seconds

PCIE = DEVICES["a100-40"].host_bytes_per_s * DEVICES["a100-40"].host_share.value


def asks(arrival_s: float, adapter: str | None = None, prompt: int = 5, answer: int = 3) -> WorkloadRequest:
    return WorkloadRequest(arrival_s, adapter, prompt, answer)


def some_requests(
    count: int, rate: float, seed: int, adapters: Sequence[str | None] = (None,)
) -> list[WorkloadRequest]:
    """Poisson arrivals of 1 to 40 tokens and answers of 1 to 60."""
    generator = np.random.default_rng(seed)
    times_s = np.cumsum(generator.exponential(1 / rate, count)).tolist()
    return [
        asks(at_s, adapters[generator.integers(len(adapters))], *generator.integers(1, [41, 61]).tolist())
        for at_s in times_s
    ]


def level_profile() -> CostProfile:
    """The round profile, but context costs nothing: all decode steps of a repeat take the same time."""
    profile = round_profile()
    return msgspec.structs.replace(profile, step=msgspec.structs.replace(profile.step, decode_attention=seconds(0.0)))


def single_steps(of: Settings, profile: CostProfile) -> ModelledReplica:
    """A replica each of whose turns is one step."""
    clock = VirtualClock()
    _, preset = resolve_preset(of.engine.preset)
    executor, sizes = build_modelled_executor(of, profile, preset, clock, coalesced=False)
    return ModelledReplica(assemble(of, executor, sizes, clock), clock, executor, coalesced=False)


def times(exchanges: Sequence[RequestResult]) -> list[float]:
    return [at_s for each in exchanges for at_s in (each.sent_s, *each.token_times_s, each.ended_s)]


def talk(conversation: str, start_s: float) -> list[WorkloadRequest]:
    """Three turns, each of which is due before the one before it can have been answered."""
    return [
        WorkloadRequest(start_s, None, 16, 20, (0,), conversation),
        WorkloadRequest(start_s + 0.01, None, 40, 20, (0, 1), conversation),
        WorkloadRequest(start_s + 0.02, None, 64, 20, (0, 1, 2, 3), conversation),
    ]


class Told(RunObserver):
    """Remembers who answered what."""

    def __init__(self) -> None:
        self.answers: dict[RequestId, list[int]] = {}

    def on_finished(self, request: Request, token_ids: Sequence[int]) -> None:
        self.answers[request.request_id] = list(token_ids)


# --- times -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [build_modelled, single_steps])
def test_one_replica_does_what_an_engine_alone_does(make) -> None:
    adapters = some_adapters(4)
    workload = sorted(
        [*some_requests(60, 8.0, 1, [None, *(ref.name for ref in adapters)]), *talk("a", 0.3), *talk("b", 2.0)],
        key=lambda request: request.arrival_s,
    )
    of = settings(max_num_seqs=6)
    (engine, *_), clock, _, coalesced = make(of, round_profile())
    prompts = Prompts(0, 0, DEFAULT_IDS, BLOCK)
    alone = run_workload(
        engine, clock, workload, {ref.name: ref for ref in adapters}, prompts, coalesced=coalesced
    ).exchanges
    found = simulated(workload, 1, adapters, of=of, make=make).run.exchanges
    assert times(found) == pytest.approx(times(alone), rel=1e-9)
    assert [each.cached_tokens for each in found] == [each.cached_tokens for each in alone]


@pytest.mark.slow
@pytest.mark.parametrize("routing", [FewestTokens, FirstFit, RoundRobin])
def test_repeats_change_neither_times_nor_where_requests_go(routing: type[RoutingPolicy]) -> None:
    workload = sorted(
        [*some_requests(80, 12.0, 2), *talk("a", 1.0), *talk("b", 1.1)], key=lambda request: request.arrival_s
    )
    of, profile = settings(max_num_seqs=3), level_profile()
    together = simulated(workload, 3, of=of, profile=profile, routing=routing())
    single = simulated(workload, 3, of=of, profile=profile, routing=routing(), make=single_steps)
    assert times(together.run.exchanges) == pytest.approx(times(single.run.exchanges), rel=1e-9)
    sent = [[each.requests for each in found.figures.replicas] for found in (together, single)]
    assert sent[0] == sent[1]


def test_two_idle_replicas_take_a_simultaneous_pair_at_once() -> None:
    of = settings(max_num_seqs=1)
    pair = [asks(0.0), asks(0.0)]
    one = [each.ttft_s for each in simulated(pair, 1, of=of).run.exchanges]
    two = [each.ttft_s for each in simulated(pair, 2, of=of).run.exchanges]
    assert two == pytest.approx([0.014, 0.014])
    assert one[0] == pytest.approx(0.014)
    assert one[1] == pytest.approx(0.014 + 0.0106 + 0.0107 + 0.014)


def test_a_request_that_comes_during_a_turn_waits_for_its_end() -> None:
    _, second = simulated([asks(0.0, prompt=100, answer=1), asks(0.05, answer=1)], 1).run.exchanges
    assert second.ttft_s == pytest.approx(0.109 - 0.05 + 0.014), "its arrival is when it came, not when it was received"


# --- what is known when ------------------------------------------------------------------------------


class Probe(LeastLoaded):
    """Notes at every choice of whom the fleet knew, and of which of them it knew a first token."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, dict[RequestId, bool]]] = []
        self._asked: list[RequestId] = []

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        entries = ((each, fleet.entry(each)) for each in self._asked)
        self.seen.append((now, {each: entry.is_prefilled for each, entry in entries if entry is not None}))
        self._asked.append(request.request_id)
        return super().route(request, fleet, places, now)


@pytest.mark.slow
@pytest.mark.parametrize("num_scheduler_steps", [1, 8])
def test_choice_uses_only_outputs_reported_before_it(num_scheduler_steps: int) -> None:
    probe = Probe()
    of = settings(num_scheduler_steps=num_scheduler_steps, multi_step_limit_s=0.5)
    exchanges = simulated(some_requests(120, 20.0, 3), 3, of=of, routing=probe).run.exchanges
    assert len(probe.seen) == 120
    for number, (now, known) in enumerate(probe.seen):
        there = {
            RequestId(str(index)): each.token_times_s[0] <= now
            for index, each in enumerate(exchanges[:number])
            if each.ended_s > now
        }
        assert known == there


# --- adapters ----------------------------------------------------------------------------------------


def slow(form: FetchForm = FetchForm.STORE_AND_FORWARD) -> CopyCosts:
    """256 bytes, an adapter of rank 1, take a second between hosts, a second to the device and two from files."""
    return CopyCosts(form, host_bytes_per_s=256.0, network_bytes_per_s=256.0, drive_bytes_per_s=128.0, latency_s=0.0)


def test_a_fetch_is_charged_once_for_two_that_wait_for_it() -> None:
    adapters = some_adapters(1)
    pair = [asks(0.0, adapters[0].name), asks(0.5, adapters[0].name)]
    found = simulated(pair, 2, adapters, routing=Always("replica-1"), placement=Fixed("replica-0"), copies=slow())
    # Fetched in a second, loaded in 50 ms, prefilled together: 10 tokens, and each 4 ms for the ranks of q, k, v and o.
    assert [each.ttft_s for each in found.run.exchanges] == pytest.approx([1.05 + 0.019 + 0.04, 0.55 + 0.019 + 0.04])
    source, destination = found.figures.replicas
    assert (found.figures.fetches, found.figures.fetched_bytes, destination.fetches) == (1, 256, 1)
    assert found.figures.deletes == 1, "nobody is sent there"
    assert (source.held_mean, source.held_most) == (1.0, 1)
    assert destination.held_most == 1
    assert destination.held_mean == pytest.approx(1 - 1.0 / found.figures.duration_s)


def test_pipelined_fetch_costs_only_the_time_beyond_the_load() -> None:
    adapters = some_adapters(1)
    load = Link(seconds(0.0), Constant(256.0, "bytes/s"))
    found = simulated(
        [asks(0.0, adapters[0].name)],
        2,
        adapters,
        profile=round_profile(transfers=Transfers(source_to_device=load)),
        routing=Always("replica-1"),
        placement=Fixed("replica-0"),
        copies=slow(FetchForm.PIPELINED),
    )
    assert found.run.exchanges[0].ttft_s == pytest.approx(1.0 + 0.014 + 0.02), "both at once, as fast as either"
    assert found.figures.fetches == 1


@pytest.mark.parametrize("host_memory_bytes", [0, 100 * 10**9])
@pytest.mark.parametrize(
    ("fetch", "taken_s"),
    [
        (FetchForm.PIPELINED, lambda part: 50e-6 + part / 24e9),
        (FetchForm.STORE_AND_FORWARD, lambda part: 50e-6 + part / 24e9 + part / PCIE),
    ],
)
def test_fetched_adapter_is_loaded_from_its_new_host_not_from_disk(
    fetch: FetchForm, taken_s: Callable[[float], float], host_memory_bytes: int
) -> None:
    """Two requests at once, one of which overflows, in LoRAServe's setting: rank 128 over four devices."""
    profile = load_profile("a100-40x4-llama-2-7b")
    (ref,) = synthetic_adapters(1, (128,), profile.geometry)
    of = settings(preset="lorikeet:plain,placement=random,routing=placed-work", host_memory_bytes=host_memory_bytes)
    workload = [asks(at_s, ref.name, 512) for at_s in (0.0, 0.0, 9.0)]
    found = simulate_cluster(of, profile, workload, {ref.name: ref}, Prompts(0), ClusterChoice(2, fetch=fetch))
    assert found.cluster is not None
    assert found.cluster.fetches == 1
    (at_home, elsewhere, warm), part = found.run.exchanges, ref.weight_bytes / 4
    assert at_home.ttft_s == pytest.approx(warm.ttft_s + COPY_S.value + part / PCIE)
    assert elsewhere.ttft_s == pytest.approx(warm.ttft_s + taken_s(part), abs=2 * COPY_S.value)


def test_an_adapter_that_was_read_from_its_files_is_not_read_again() -> None:
    profile = load_profile("a100-40x4-llama-2-7b")
    (ref,) = synthetic_adapters(1, (128,), profile.geometry)
    twice = [asks(0.0, ref.name, 512), asks(9.0, ref.name, 512)]
    choice = ClusterChoice(2, provisioned=False)
    found = simulate_cluster(settings(), profile, twice, {ref.name: ref}, Prompts(0), choice)
    (cold, warm), part = found.run.exchanges, ref.weight_bytes / 4
    assert cold.ttft_s == pytest.approx(warm.ttft_s + 50e-6 + part / 2e9 + COPY_S.value + part / PCIE)


def test_adapter_without_a_holder_is_read_from_its_files_once() -> None:
    adapters = some_adapters(1)
    twice = [asks(0.0, adapters[0].name), asks(9.0, adapters[0].name)]
    found = simulated(
        twice, 2, adapters, placement=Fixed("replica-1"), routing=ByTable(), copies=slow(), provisioned=False
    )
    assert [each.ttft_s for each in found.run.exchanges] == pytest.approx([2.05 + 0.034, 0.034])
    assert (found.figures.provisions, found.figures.provided_bytes, found.figures.fetches) == (1, 256, 0)
    assert found.figures.placements == 0, "the first one is not counted"


def test_the_start_costs_nothing() -> None:
    adapters = some_adapters(4)
    found = simulated([asks(0.0, ref.name) for ref in adapters], 2, adapters, routing=ByTable(), copies=slow())
    assert (found.figures.fetches, found.figures.provisions) == (0, 0)
    assert found.figures.held_share == 1.0
    assert [each.routed_most for each in found.figures.replicas] == [4, 4]
    assert [each.routed_bytes_most for each in found.figures.replicas] == [found.figures.adapter_bytes] * 2


def test_placements_change_and_moved_adapters_are_fetched_on_first_request() -> None:
    class Turning(Fixed):
        """The first replica, then the other."""

        def place(self, demands, replicas, now):  # type: ignore[no-untyped-def]
            self._home = ReplicaId(f"replica-{int(now >= 10)}")
            return super().place(demands, replicas, now)

    adapters = some_adapters(1)
    workload = [asks(at_s, adapters[0].name) for at_s in (0.0, 11.0, 21.0, 31.0)]
    placement = Turning("replica-0")
    found = simulated(workload, 2, adapters, routing=ByTable(), placement=placement, copies=slow()).figures
    assert [each.requests for each in found.replicas] == [1, 3]
    assert (found.placements, found.fetches, found.deletes) == (1, 1, 1)
    assert found.replicas[0].routed_mean == pytest.approx(10 / found.duration_s)
    assert found.replicas[0].held_mean == pytest.approx(12 / found.duration_s), "until it has come to the other"


def test_placement_gets_the_demand_of_its_period() -> None:
    class Listening(Fixed):
        def place(self, demands, replicas, now):  # type: ignore[no-untyped-def]
            heard.append((now, {demand.adapter: demand.tokens_per_s for demand in demands}))
            return super().place(demands, replicas, now)

    heard: list[tuple[float, dict[str, float]]] = []
    adapters = some_adapters(2)
    workload = [asks(float(at_s), adapters[0].name, 5, 3) for at_s in range(10)]
    simulated(workload, 1, adapters, placement=Listening("replica-0"), period_s=5.0)
    mine, other = (adapter.digest for adapter in adapters)
    assert [at_s for at_s, _ in heard[:5]] == [0.0, 0.625, 1.25, 2.5, 5.0], "it looks at the first one, as it goes"
    looks = [demand for _, demand in heard[1:5]]
    # Requests at 0, 1, 2, 3 and 4 by then; the one at 5 comes after the period's end. Each has its answer at once.
    assert [demand[mine] for demand in looks] == pytest.approx([8 / 0.625, 16 / 1.25, 24 / 2.5, 40 / 5])
    assert [demand[other] for demand in looks] == [0.0] * 4
    heard.clear()
    before = DemandReport(5 * ((mine, 5), (other, 5)), 5 * ((mine, 3), (other, 13)))
    listening = Listening("replica-0")
    simulated(workload[:1], 1, adapters, placement=listening, period_s=2.0, history=(before,) * 3)
    demand = {mine: 5 * 8 / 2, other: 5 * 18 / 2}
    assert heard[1:4] == [(at_s, pytest.approx(demand)) for at_s in (-4.0, -2.0, 0.0)], "and of earlier periods"


# --- migration ---------------------------------------------------------------------------------------


def test_requests_that_wait_too_long_move_and_go_on_with_the_same_tokens() -> None:
    adapters = some_adapters(2, (1,))
    workload = [asks(0.01 * number, adapters[number % 2].name, 20, 60) for number in range(24)]
    of = settings(max_num_seqs=2)
    stayed, moved = Told(), Told()
    choice = {"routing": Always("replica-0"), "of": of}
    before = simulated(workload, 2, adapters, watch=stayed, **choice)
    after = simulated(workload, 2, adapters, watch=moved, migration=moves(None), **choice)
    assert before.figures.moves == 0
    assert after.figures.moves > 0
    assert 0 < after.figures.replicas[1].requests <= after.figures.moves
    assert moved.answers == stayed.answers
    assert all(len(answer) == 60 for answer in moved.answers.values())
    assert max(each.ended_s for each in after.run.exchanges) < 0.8 * max(each.ended_s for each in before.run.exchanges)


class Evict:
    """Moves all that is on the first replica to the second."""

    def __init__(self, settings: CoMigrationSettings) -> None:
        pass

    def review(self, replicas: list[ReplicaLoad], requests: list[MovableRequest], sizes: object) -> MigrationPlan:
        first, second = names(2)
        return MigrationPlan(
            ReviewOutcome.PLANNED,
            tuple(
                RequestMove(each.request_id, each.adapter, first, second) for each in requests if each.replica == first
            ),
        )


def test_moved_kv_is_charged_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests move while they run: with their KV or without it, and over a network that is fast or slow."""
    monkeypatch.setattr(cluster, "CoMigration", Evict)
    workload = [asks(0.01 * number, None, 40, 60) for number in range(4)]
    stayed = Told()
    choice = {"routing": Always("replica-0"), "of": settings(host_memory_bytes=32 * BLOCK * 200)}
    monkeypatch.setattr(cluster, "REVIEW_S", math.inf)
    simulated(workload, 2, watch=stayed, migration=moves(1e9), **choice)
    monkeypatch.setattr(cluster, "REVIEW_S", 1.0)
    hits, ends_s = [], []
    for kv_bytes_per_s, network_bytes_per_s in ((None, 1e9), (1e9, 1e9), (1e9, 1e3)):
        moved = Told()
        copies = CopyCosts(network_bytes_per_s=network_bytes_per_s, latency_s=0.0)
        found = simulated(workload, 2, watch=moved, migration=moves(kv_bytes_per_s), copies=copies, **choice)
        assert found.figures.moves == 4
        assert moved.answers == stayed.answers
        hits.append(found.replicas[1].engine.stats().prefix_hits_tokens)
        ends_s.append(max(each.ended_s for each in found.run.exchanges))
    assert hits[0] == 0
    assert hits[1] == hits[2] >= 4 * 40 // BLOCK * BLOCK
    # At least two blocks of 16 tokens of 32 bytes each, one request after the other.
    assert ends_s[2] > ends_s[1] + 4 * 2 * BLOCK * 32 / 1e3 / 2


def moves(kv_bytes_per_s: float | None) -> MigrationCosts:
    """A prefill takes a millisecond a token, and KV travels at that speed if it can."""
    kv = None if kv_bytes_per_s is None else lambda: kv_bytes_per_s
    return MigrationCosts(MoveTimes(lambda tokens: 1e-3 * tokens, math.inf, 32.0, kv), 0.0)


# --- the whole ---------------------------------------------------------------------------------------


def test_a_run_that_cannot_go_on_is_an_error() -> None:
    class Nowhere(RoutingPolicy):
        def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
            return None

    with pytest.raises(ExecutorError, match="nothing is in flight"):
        simulated([asks(0.0)], 2, routing=Nowhere())


def test_requests_that_no_engine_can_serve_end_with_their_error() -> None:
    exchanges = simulated([asks(0.0, prompt=2000), asks(1.0)], 2).run.exchanges
    assert [each.error for each in exchanges] == ["error", None]


def test_figures_add_up() -> None:
    adapters = some_adapters(6)
    workload = some_requests(100, 15.0, 5, [ref.name for ref in adapters])
    found = simulated(workload, 3, adapters, routing=ByTable(4), placement=RandomPlacement(4))
    figures = found.figures
    assert sum(each.requests for each in figures.replicas) == 100
    assert sum(each.output_tokens for each in figures.replicas) == sum(each.output_tokens for each in workload)
    assert sum(each.held_bytes_mean for each in figures.replicas) == pytest.approx(figures.adapter_bytes)
    assert figures.held_share == pytest.approx(1 / 3)
    assert [each.routed_most for each in figures.replicas] == [2, 2, 2]
    assert sum(each.routed_bytes_most for each in figures.replicas) == figures.adapter_bytes
    assert figures.duration_s == max(each.ended_s for each in found.run.exchanges)
    assert all(0 < each.busy_share <= 1 for each in figures.replicas)
    assert found.finished == list(range(1, 101))
    assert math.isfinite(sum(times(found.run.exchanges)))
