"""Workloads through an engine in this process, on the modelled executor."""

from collections.abc import Sequence

import pytest

from lorikeet.bench.in_process import RunObserver, WorkloadRun, run_workload
from lorikeet.bench.replicas import StartedReplica, modelled_replica
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.workload import WorkloadRequest
from tests.support.profiles import round_profile

BLOCK = 16


class Seen(RunObserver):
    """Remembers everything."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.arrivals_s: dict[str, float] = {}
        self.answers: dict[str, list[int]] = {}
        self.tokens = 0

    def on_arrival(self, request: Request) -> None:
        self.prompts[request.request_id] = request.prompt_token_ids
        self.arrivals_s[request.request_id] = request.arrival_s

    def on_outputs(self, outputs: StepOutputs) -> None:
        self.tokens += sum(len(output.tokens) for output in outputs.tokens)

    def on_finished(self, request: Request, token_ids: Sequence[int]) -> None:
        self.answers[request.request_id] = list(token_ids)


def replica(**engine: object) -> StartedReplica:
    given = {"num_scheduler_steps": 1, "host_memory_bytes": 0, **engine}
    return modelled_replica(Settings(ModelSettings(), EngineSettings(**given)), round_profile())  # type: ignore[arg-type]


def run(workload: list[WorkloadRequest], seen: Seen, **engine: object) -> WorkloadRun:
    built, clock, coalesced = replica(**engine)
    prompts = Prompts(0, 0, DEFAULT_IDS, BLOCK)
    return run_workload(built.engine, clock, workload, {}, prompts, coalesced=coalesced, observer=seen)


def talk(second_s: float) -> list[WorkloadRequest]:
    """Two turns: 40 tokens and an answer of 30, then 100 tokens that go on from there."""
    return [
        WorkloadRequest(0.0, None, 40, 30, (0, 1, 2), "c"),
        WorkloadRequest(second_s, None, 100, 5, (0, 1, 3, 4, 5, 6, 7), "c"),
    ]


@pytest.mark.parametrize("num_scheduler_steps", [1, 8])
def test_a_turn_holds_the_answer_before_it_and_finds_it_in_the_cache(num_scheduler_steps: int) -> None:
    seen = Seen()
    done = run(talk(10.0), seen, num_scheduler_steps=num_scheduler_steps)
    assert seen.prompts["1"][:70] == seen.prompts["0"] + seen.answers["0"]
    assert [len(seen.prompts[name]) for name in "01"] == [40, 100]
    # 69 tokens of the first turn have KV: four blocks of 16.
    assert [exchange.cached_tokens for exchange in done.exchanges] == [0, 64]
    assert [exchange.held_s for exchange in done.exchanges] == [0, 0]
    assert seen.tokens == 35


def test_a_turn_waits_for_the_answer_before_it_and_is_sent_then() -> None:
    seen = Seen()
    first, second = run(talk(0.1), seen).exchanges
    assert first.ended_s > 0.3
    assert (second.due_s, second.sent_s) == (0.1, first.ended_s)
    assert second.held_s == pytest.approx(first.ended_s - 0.1)
    assert second.lateness_s == pytest.approx(0.0)
    assert seen.arrivals_s["1"] == first.ended_s
    assert second.ttft_s == pytest.approx(second.token_times_s[0] - first.ended_s)


def test_other_requests_do_not_wait_for_a_conversation() -> None:
    beside = WorkloadRequest(0.15, None, 16, 2)
    exchanges = run([*talk(0.1), beside], Seen()).exchanges
    assert exchanges[2].sent_s == 0.15
    assert exchanges[2].ended_s < exchanges[1].sent_s


def test_a_turn_after_one_that_failed_still_comes() -> None:
    workload = [
        WorkloadRequest(0.0, None, 40, 30, (), "c"),
        WorkloadRequest(0.1, None, 2000, 5, (), "c"),
        WorkloadRequest(0.2, None, 2100, 5, (), "c"),
        WorkloadRequest(0.3, None, 90, 5, (), "c"),
    ]
    exchanges = run(workload, Seen()).exchanges
    assert [exchange.error for exchange in exchanges] == [None, "error", "error", None]


def test_a_last_request_that_can_never_run_is_told_of() -> None:
    exchanges = run([WorkloadRequest(0.0, None, 40, 3), WorkloadRequest(9.0, None, 2000, 5)], Seen()).exchanges
    assert [exchange.error for exchange in exchanges] == [None, "error"]
