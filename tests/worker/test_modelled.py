"""The modelled executor on a virtual clock: times by the profile, tokens by (seed, position)."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.events import Finished, FirstToken, RequestEvent
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, AdapterName, BlockId, RequestId
from lorikeet.core.messages import StepOutputs, TokenOutput
from lorikeet.core.plan import (
    SequenceStart,
    SequenceStep,
    StepPlan,
    StepResult,
    Tier,
    Transfer,
    TransferDone,
)
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.profile import CostProfile, ProfileError
from lorikeet.engine.build import assemble
from lorikeet.engine.driver import ScheduledRequests, drive
from lorikeet.presets import Preset
from lorikeet.scheduling.scheduler import MAX_UNINTERRUPTED_STEPS
from lorikeet.worker.modelled import build_modelled_executor, sizes_of
from tests.support.profiles import round_profile


class Said:
    """All that an engine said, and its plans."""

    def __init__(self) -> None:
        self.tokens: list[TokenOutput] = []
        self.events: list[RequestEvent] = []
        self.plans: list[StepPlan] = []

    def take(self, outputs: StepOutputs) -> None:
        self.tokens += outputs.tokens
        self.events += outputs.events

    def at(self, kind: type, name: str) -> float:
        """When an event of a request happened."""
        return next(e.at_s for e in self.events if isinstance(e, kind) and e.request_id == name)

    def answer(self, name: str) -> list[int]:
        return [token.token_id for output in self.tokens if output.request_id == name for token in output.tokens]


def request(
    name: str, prompt: int, answer: int, arrival_s: float = 0.0, adapter: AdapterRef | None = None, seed: int = 0
) -> Request:
    sampling = SamplingParams(max_tokens=answer, seed=seed)
    return Request(RequestId(name), [hash(name) % 997] * prompt, sampling, arrival_s, adapter)


def adapter(name: str, rank: int) -> AdapterRef:
    return AdapterRef(AdapterName(name), AdapterDigest(f"digest-{name}"), "", {"q": (rank, rank)}, 0)


def run(
    requests: Sequence[Request], profile: CostProfile | None = None, *, coalesced: bool = True, **engine: object
) -> Said:
    settings = Settings(
        ModelSettings(max_model_len=500),
        EngineSettings(**{"num_scheduler_steps": 1, "preset": "lorikeet:plain", "host_memory_bytes": 0, **engine}),  # type: ignore[arg-type]
    )
    clock = VirtualClock()
    said = Said()
    profile = profile or round_profile()
    executor, sizes = build_modelled_executor(settings, profile, Preset(), clock, coalesced=coalesced)
    replica = assemble(settings, executor, sizes, clock, lambda plan, result: said.plans.append(plan))
    for outputs in drive(replica.engine, clock, ScheduledRequests(requests), coalesced=coalesced):
        said.take(outputs)
    return said


def test_a_step_takes_the_time_of_the_profile() -> None:
    said = run([request("a", prompt=5, answer=3)])
    assert said.at(FirstToken, "a") == pytest.approx(0.014)  # 10 ms and 1 ms for each of four more tokens
    # Two decodes that read 6 and 7 tokens.
    assert said.at(Finished, "a") == pytest.approx(0.014 + 0.0106 + 0.0107)


def test_ranks_of_rows_and_the_load_add_their_time() -> None:
    said = run([request("a", prompt=5, answer=2, adapter=adapter("x", 4))])
    assert said.at(FirstToken, "a") == pytest.approx(0.050 + 0.014 + 5 * 4 * 0.001)
    assert said.at(Finished, "a") - said.at(FirstToken, "a") == pytest.approx(0.0106 + 4 * 0.001)


def test_loads_follow_one_another_on_one_link() -> None:
    said = run([request(name, 1, 1, adapter=adapter(name, 1)) for name in "ab"])
    assert said.at(FirstToken, "a") == pytest.approx(0.050 + 0.010 + 0.001)
    assert said.at(FirstToken, "b") == pytest.approx(0.100 + 0.010 + 0.001)


def test_identical_steps_are_one_plan_that_ends_with_the_next_arrival() -> None:
    said = run([request("a", 1, 30), request("b", 1, 5, arrival_s=0.1)])
    decodes = [plan for plan in said.plans if plan.repeat > 1]
    assert decodes[0].repeat == 29
    assert decodes[0].max_duration_s == pytest.approx(0.1 - 0.010)
    # b arrives in the middle of a step and is admitted with the next.
    assert 0.1 < said.at(FirstToken, "b") < 0.1 + 2 * 0.013


def test_overlapping_device_leaves_time_for_the_loop_and_takes_arrivals() -> None:
    profile = round_profile()
    slow_loop = msgspec.structs.replace(profile.step, loop=msgspec.structs.replace(profile.step.loop, value=0.004))
    profile = msgspec.structs.replace(profile, step=slow_loop)
    first_s: dict[bool, float] = {}
    steps: dict[bool, list[tuple[int, bool]]] = {}
    for overlapped in (False, True):
        given = msgspec.structs.replace(profile, overlapped=overlapped)
        requests = [request("a", 1, 14), request("b", 1, 1, arrival_s=0.030)]
        said = run(requests, given, coalesced=False, num_scheduler_steps=6, multi_step_limit_s=1.0)
        first_s[overlapped] = said.at(FirstToken, "b")
        steps[overlapped] = [(plan.repeat, plan.continues) for plan in said.plans if plan.sequences]
    assert steps[False] == [(1, False), (6, False), (1, False), (6, False)]
    alone = [(1, False), (13, False), (12, True), (1, True)]
    with_b = [(1, False)]
    after = [(9, False), *((left, True) for left in range(8, 0, -1))]
    assert steps[True] == alone + with_b + after
    # 10 ms of prefill and 4 of the loop; three decodes of 10.2 ms and longer, and the loop; b beside a, and the loop.
    assert first_s[True] == pytest.approx(0.014 + 0.0102 + 0.0103 + 0.0104 + 0.004 + 0.0115 + 0.004)
    assert first_s[False] == pytest.approx(first_s[True] + 0.0105 + 0.0106 + 0.0107 + 0.0003)


def test_steps_without_graphs_do_not_overlap() -> None:
    profile = msgspec.structs.replace(round_profile(), overlapped=True)
    limits = {"num_scheduler_steps": 6, "multi_step_limit_s": 1.0}
    plans = run([request("a", 1, 9)], profile, coalesced=False, preset="lorikeet:plain-einsum", **limits).plans
    assert [(plan.repeat, plan.overlapped) for plan in plans if plan.sequences] == [(1, False), (6, False), (2, False)]
    for engine in (EngineSettings(enforce_eager=True), EngineSettings(tensor_parallel=2)):
        assert not sizes_of(Settings(engine=engine), profile, "modelled").async_scheduling
    assert sizes_of(Settings(), profile, "modelled").async_scheduling


def test_coalesced_steps_yield_the_tokens_of_single_steps() -> None:
    requests = [
        request(f"r{i}", 1 + 7 * i % 40, 1 + 11 * i % 60, arrival_s=0.037 * i, adapter=adapter(f"x{i % 5}", 2 + i % 3))
        for i in range(40)
    ]
    one = run(requests)
    many = run(requests, coalesced=False)
    assert len(one.plans) < len(many.plans)
    for name in (r.request_id for r in requests):
        assert one.answer(name) == many.answer(name)
        for kind in (FirstToken, Finished):
            assert one.at(kind, name) == pytest.approx(many.at(kind, name), abs=1e-9)


def test_tokens_are_a_function_of_seed_and_position() -> None:
    alone = run([request("a", 9, 20, seed=7)]).answer("a")
    said = run([request("b", 30, 20), request("a", 9, 20, seed=7), request("c", 9, 20, seed=8)], max_num_seqs=2)
    assert said.answer("a") == alone != said.answer("c")


def test_a_profile_without_loads_is_named_when_one_is_needed() -> None:
    profile = round_profile(transfers=type(round_profile().transfers)())
    with pytest.raises(ProfileError, match=r"profile round has no transfers\.source_to_device"):
        run([request("a", 1, 1, adapter=adapter("x", 1))], profile)


def test_a_step_with_adapters_needs_the_costs_of_its_form() -> None:
    with pytest.raises(ProfileError, match=r"lora\.unpadded"):
        run([request("a", 1, 1, adapter=adapter("x", 1))], round_profile(lora={}))


def test_an_answer_longer_than_a_plan_is_as_long_as_its_steps() -> None:
    said = run([request("a", 1, 100)])
    assert max(plan.repeat for plan in said.plans) == MAX_UNINTERRUPTED_STEPS
    assert said.at(Finished, "a") == pytest.approx(0.010 + sum(0.010 + 0.0001 * context for context in range(2, 101)))


# --- plans by hand ------------------------------------------------------------------------------------

X = adapter("x", 4)
BLOCKS = tuple(BlockId(block) for block in range(8))


class Hand:
    """A modelled executor driven by hand, with one sequence of five tokens."""

    def __init__(self, *, coalesced: bool = True, **engine: object) -> None:
        settings = Settings(ModelSettings(max_model_len=500), EngineSettings(**engine))  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self.executor, self.sizes = build_modelled_executor(
            settings, round_profile(), Preset(), self.clock, coalesced=coalesced
        )

    def move(self, *transfers: Transfer, urgent: tuple[int, ...] = ()) -> None:
        self.executor.execute(StepPlan(0, transfers=transfers, urgent=urgent))

    def start(self, ref: AdapterRef | None = None) -> float:
        """Prefill the sequence; return how long that took."""
        digest = None if ref is None else ref.digest
        start = SequenceStart(RequestId("a"), [1] * 5, 5, SamplingParams(max_tokens=100), digest)
        step = SequenceStep(RequestId("a"), 0, 5, BLOCKS[:1], samples=True)
        return self.executor.execute(StepPlan(0, sequences=(step,), starts=(start,))).duration_s

    def decode(self, repeat: int, *transfers: Transfer) -> StepResult:
        """Decode some tokens while transfers go on."""
        step = SequenceStep(RequestId("a"), 5, 1, (), samples=True)
        plan = StepPlan(1, sequences=(step,), transfers=transfers, repeat=repeat, max_duration_s=math.inf)
        return self.executor.execute(plan)

    def next_done(self) -> tuple[float, list[TransferDone]]:
        """Wait for the next end; return when it was and what ended."""
        self.executor.wait_for_transfer(None)
        return self.clock.now(), self.executor.completed_transfers()


def load(number: int, *, demand: bool = True) -> Transfer:
    """Read an adapter into a block; 50 ms."""
    return Transfer(number, Tier.SOURCE, Tier.DEVICE, (), BLOCKS[:1], X, demand)


def fetch(number: int, blocks: int, ref: AdapterRef | None = None, *, demand: bool = True) -> Transfer:
    """Copy blocks to the device; 1 ms each."""
    return Transfer(number, Tier.HOST, Tier.DEVICE, BLOCKS[:blocks], BLOCKS[:blocks], ref, demand)


def store(number: int, blocks: int) -> Transfer:
    """Copy blocks to the host; 2 ms each."""
    return Transfer(number, Tier.DEVICE, Tier.HOST, BLOCKS[:blocks], BLOCKS[:blocks])


def test_a_repeat_that_stands_for_single_steps_ends_with_a_transfer() -> None:
    hand = Hand(coalesced=True)
    hand.start()
    result = hand.decode(20, load(1))
    # 10.6, 10.7, 10.8 and 10.9 ms are less than 50 ms.
    assert result.steps_run == 5
    assert result.duration_s == pytest.approx(0.054)


def test_a_live_repeat_does_not_look_at_transfers() -> None:
    hand = Hand(coalesced=False)
    hand.start()
    assert hand.decode(20, load(1)).steps_run == 20


@pytest.mark.parametrize(
    "routes",
    [(load(1),), (Transfer(1, Tier.SOURCE, Tier.HOST, BLOCKS[:1], (), X), fetch(2, 1, X))],
    ids=["at once", "from the host"],
)
def test_an_adapter_counts_by_its_rank_wherever_it_came_from(routes: tuple[Transfer, ...]) -> None:
    hand = Hand()
    for transfer in routes:
        hand.move(transfer)
        hand.next_done()
    assert hand.start(X) == pytest.approx(0.014 + 5 * 4 * 0.001)


def test_both_directions_and_reads_run_at_the_same_time() -> None:
    hand = Hand()
    hand.move(load(1), fetch(2, 3), store(3, 4))
    assert [hand.next_done() for _ in range(3)] == [
        (pytest.approx(0.003), [TransferDone(2, None, pytest.approx(0.003))]),  # type: ignore[arg-type]
        (pytest.approx(0.008), [TransferDone(3, None, pytest.approx(0.008))]),  # type: ignore[arg-type]
        (pytest.approx(0.050), [TransferDone(1, None, pytest.approx(0.050))]),  # type: ignore[arg-type]
    ]


def test_a_plan_can_make_an_earlier_prefetch_urgent() -> None:
    hand = Hand()
    hand.move(fetch(1, 4, demand=False), fetch(2, 1, demand=False))
    hand.clock.advance(0.002)
    hand.move(fetch(3, 1), urgent=(2,))
    ends = [hand.next_done() for _ in range(3)]
    assert [(end_s, done[0].transfer_id) for end_s, done in ends] == [
        (pytest.approx(0.003), 2),
        (pytest.approx(0.004), 3),
        (pytest.approx(0.006), 1),
    ]


def test_a_declared_link_takes_the_place_of_the_profiles() -> None:
    hand = Hand(link_bytes_per_s=51_200.0)
    hand.move(fetch(1, 2))
    assert hand.next_done()[0] == pytest.approx(0.020)


def test_the_host_tier_has_as_many_blocks_as_fit_its_bytes() -> None:
    assert Hand(host_memory_bytes=0).sizes.host_blocks == 0
    assert Hand().sizes.host_blocks == 2 * Hand().sizes.total_blocks
    assert Hand(host_memory_bytes=5 * 512 + 511).sizes.host_blocks == 5


def test_waiting_without_running_transfers_is_an_error() -> None:
    with pytest.raises(ExecutorError, match="no transfer is in flight"):
        Hand().executor.wait_for_transfer(None)
