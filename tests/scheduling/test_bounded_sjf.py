"""Bounded shortest-job-first: what passes what, and how long anyone waits."""

import random
from collections import defaultdict

import msgspec
import numpy as np
import pytest

from lorikeet.bench.in_process import RunObserver, run_workload
from lorikeet.bench.replicas import modelled_replica
from lorikeet.core.events import Admitted, Preempted, Queued
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.costs.catalog import load_profile
from lorikeet.memory.blocks import WaitReason
from lorikeet.memory.tree import Scores
from lorikeet.scheduling.admission import AdmissionQueue
from lorikeet.scheduling.policies.bounded_sjf import BoundedShortestFirst
from lorikeet.scheduling.state import StepTimeEstimator
from lorikeet.simulator.scenario import Scenario
from lorikeet.workloads.predictors import Predictor
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.workload import WorkloadRequest
from tests.support.admission_queues import View, made


class Timed(View):
    """An engine whose steps take 1 ms for each prompt token, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.step_times = StepTimeEstimator()
        for tokens in (100, 200, 400):
            self.step_times.note(tokens, 0, tokens / 1000)


def admitted_at(queue: AdmissionQueue, now: float, outcomes: dict[str, WaitReason] | None = None) -> list[str]:
    """Return which requests a queue admits at a time, in order."""
    found, policy = [], queue.admit(now)
    candidate = next(policy, None)
    while candidate is not None:
        named = candidate.request
        outcome = (outcomes or {}).get(named.request_id)
        if outcome is None:
            found.append(str(named.request_id))
        try:
            candidate = policy.send(outcome)
        except StopIteration:
            break
    return found


def queue_of(*requests: tuple[str, float, int]) -> BoundedShortestFirst:
    """A queue of requests: name, arrival and prompt tokens."""
    queue = BoundedShortestFirst(Timed())
    for name, arrival_s, tokens in requests:
        queue.add(made(name, arrival_s, prompt_tokens=tokens), arrival_s)
    return queue


def test_is_first_come_first_served_before_step_times_are_known() -> None:
    queue = BoundedShortestFirst(View())
    for name, tokens in (("long", 500), ("short", 1)):
        queue.add(made(name, prompt_tokens=tokens), 0.0)
    assert admitted_at(queue, 5.0) == ["long", "short"]


def test_short_request_passes_older_one_within_its_allowance() -> None:
    # The oldest has waited 10 s, so 6 s are nothing unusual, and the middle one can be delayed by 0.1 s.
    queue = queue_of(("oldest", 0.0, 50), ("long", 4.0, 400), ("short", 5.0, 100))
    assert admitted_at(queue, 10.0) == ["oldest", "short", "long"]


def test_the_request_that_has_waited_longest_is_not_passed() -> None:
    queue = queue_of(("oldest", 0.0, 400), ("short", 9.0, 10))
    assert admitted_at(queue, 10.0) == ["oldest", "short"]


def test_delays_add_up_until_an_older_request_cannot_afford_more() -> None:
    # Nothing was admitted for long, so each of the others takes three times its 60 ms, of 0.1 s and 0.15 times 2 s.
    shorts = [(f"short-{index}", 1.0 + index / 100, 60) for index in range(5)]
    queue = queue_of(("oldest", -20.0, 10), ("long", 0.0, 400), *shorts)
    assert admitted_at(queue, 2.0) == ["oldest", "short-0", "short-1", "long", "short-2", "short-3", "short-4"]


def test_one_that_lacks_blocks_keeps_its_turn() -> None:
    queue = queue_of(("large", 0.0, 400), ("short", 9.0, 10))
    assert admitted_at(queue, 10.0, {"large": WaitReason.KV_BLOCKS}) == []
    assert admitted_at(queue, 10.0, {"large": WaitReason.TRANSFER}) == ["short"]


def test_nobody_passes_a_request_that_was_preempted() -> None:
    queue = queue_of(("oldest", -20.0, 10), ("long", 0.0, 600), ("short", 1.0, 100))
    assert admitted_at(queue, 2.0) == ["oldest", "short", "long"]
    queue.add(made("long", 0.0, prompt_tokens=600), 3.0)
    queue.add(made("next", 2.5, prompt_tokens=10), 3.0)
    assert admitted_at(queue, 3.0) == ["long", "next"]
    assert len(queue) == 0


def test_longer_answers_than_predicted_delay_older_requests() -> None:
    queue = queue_of(("oldest", -20.0, 10), ("long", 0.0, 400), ("short", 1.0, 100))
    assert admitted_at(queue, 2.0, {"long": WaitReason.TRANSFER}) == ["oldest", "short"]
    short = made("short", 1.0, prompt_tokens=100)
    queue.view.answers["short"] = (short, 3)  # type: ignore[attr-defined]  # of one token that was predicted
    queue.add(made("next", 1.5, prompt_tokens=10), 2.5)
    assert admitted_at(queue, 2.5) == ["long", "next"]


class Waits(RunObserver):
    """Adds up how long each request waited, preemptions included."""

    def __init__(self) -> None:
        self.seconds: defaultdict[RequestId, float] = defaultdict(float)
        self._since: dict[RequestId, float] = {}

    def on_outputs(self, outputs: StepOutputs) -> None:
        for event in outputs.events:
            match event:
                case Queued() | Preempted():
                    self._since[event.request_id] = event.at_s
                case Admitted():
                    self.seconds[event.request_id] += event.at_s - self._since.pop(event.request_id)


class Guess(Predictor):
    """Predicts lengths: right, right for 60 %, or the opposite."""

    def __init__(self, kind: str) -> None:
        self._kind, self._random = kind, random.Random(1)

    def predict(self, planned: WorkloadRequest, index: int) -> int:
        if self._kind == "right" or (self._kind == "60 %" and self._random.random() < 0.6):
            return planned.output_tokens
        return self._random.choice((8, 32, 64)) if self._kind == "60 %" else 72 - planned.output_tokens

    def ended(self, planned: WorkloadRequest, tokens: int) -> None:
        pass


def waits(scenario: Scenario, admission: str, guess: str) -> Scores:
    """Return how long each request waited."""
    profile, observer = load_profile(scenario.profile), Waits()
    workload, settings = scenario.recipe().requests(), scenario.settings()
    (engine, *_), clock, coalesced = modelled_replica(settings, profile)
    assert settings.engine.preset.endswith(admission)
    adapters = scenario.adapter_refs(profile.geometry, workload)
    run_workload(
        engine,
        clock,
        workload,
        adapters,
        Prompts(0, 0, DEFAULT_IDS, 16),
        coalesced=coalesced,
        observer=observer,
        predictor=Guess(guess),
    )
    return np.array([observer.seconds[RequestId(str(index))] for index in range(len(workload))])


@pytest.mark.slow
@pytest.mark.parametrize("guess", ["right", "60 %", "opposite"])
@pytest.mark.parametrize(("rate", "seed"), [("10.5", 2), ("25", 4)])
@pytest.mark.sampled(2)
def test_nobody_waits_much_longer_than_first_come_first_served(rate: str, seed: int, guess: str) -> None:
    """At the second rate the last request waits for 15 s under FIFO."""
    base = Scenario(
        profile="a40-llama-2-7b",
        adapters=50,
        ranks="8-64",
        prompt_tokens="16-400",
        output_tokens="8-64",
        arrivals="gamma",
        cv=3.0,
        rate=rate,
        count=250,
        seed=seed,
        engine={"memory_bytes": 3 * 10**9, "host_memory_bytes": 40 * 10**9},
    )
    found = {
        name: waits(msgspec.structs.replace(base, preset=f"auto,admission={name}"), name, guess)
        for name in ("fifo", "bounded-sjf")
    }
    assert (found["bounded-sjf"] <= 1.5 * found["fifo"] + 1).all()
    if guess == "right":
        assert found["bounded-sjf"].mean() < 0.9 * found["fifo"].mean()
