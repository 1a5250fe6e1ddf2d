"""Predicted lengths in a workload that is run in this process."""

import pytest

from lorikeet.bench.in_process import RunObserver, run_workload
from lorikeet.bench.replicas import modelled_replica
from lorikeet.config import EngineSettings, Settings
from lorikeet.core.request import Request
from lorikeet.workloads.predictors import make_predictor
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.synthetic import synthetic_adapters
from lorikeet.workloads.workload import OptionError, WorkloadRequest
from tests.support.profiles import round_profile

WORKLOAD = [
    WorkloadRequest(
        arrival_s=10.0 * number, adapter=f"a{number % 2}", input_tokens=8, output_tokens=3 + 7 * (number % 2)
    )
    for number in range(60)
]


class Arrived(RunObserver):
    """Notes what was predicted, and what policies make of it."""

    def __init__(self) -> None:
        self.predicted: list[int | None] = []
        self.expected: list[int] = []

    def on_arrival(self, request: Request) -> None:
        self.predicted.append(request.predicted_tokens)
        self.expected.append(request.expected_tokens)


def run(predictor: str) -> Arrived:
    profile, watch = round_profile(), Arrived()
    (engine, *_), clock, coalesced = modelled_replica(Settings(engine=EngineSettings(num_scheduler_steps=1)), profile)
    refs = synthetic_adapters(2, [1], profile.geometry)
    workload = [
        WorkloadRequest(
            arrival_s=asked.arrival_s,
            adapter=refs[int(str(asked.adapter)[1:])].name,
            input_tokens=asked.input_tokens,
            output_tokens=asked.output_tokens,
        )
        for asked in WORKLOAD
    ]
    run_workload(
        engine,
        clock,
        workload,
        {ref.name: ref for ref in refs},
        Prompts(0, 0, DEFAULT_IDS, 32),
        coalesced=coalesced,
        observer=watch,
        predictor=make_predictor(predictor, workload),
    )
    return watch


TRUE = [request.output_tokens for request in WORKLOAD]


def test_without_a_predictor_policies_see_the_most_that_a_request_may_have() -> None:
    assert (run("none").predicted, run("none").expected) == ([None] * 60, TRUE)


@pytest.mark.slow
def test_an_oracle_is_seeded_by_the_requests_place_and_may_be_wrong_upwards() -> None:
    found = run("oracle:0.5")
    assert found.predicted == run("oracle:0.5").predicted
    assert found.expected == found.predicted, "a limit that is the true length would give it away"
    assert 0 < sum(tokens != true for tokens, true in zip(found.expected, TRUE, strict=True)) < 60
    assert any(tokens > true for tokens, true in zip(found.expected, TRUE, strict=True))
    assert run("oracle:1").predicted == TRUE


def test_history_learns_from_answers_as_they_end() -> None:
    predicted = run("history").predicted
    assert predicted[0] is None
    assert predicted[1] == 3, "all that has ended is one answer of the other adapter"
    assert predicted[45:] == TRUE[45:]


@pytest.mark.parametrize("text", ["oracle", "oracle:2", "oracle:x", "learned", ""])
def test_other_predictors_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="predictor"):
        make_predictor(text, WORKLOAD)
