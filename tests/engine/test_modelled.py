"""The modelled executor on a virtual clock: times by the profile, tokens by (seed, position)."""

from collections.abc import Sequence

import pytest

from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import VirtualClock
from lorikeet.core.events import Finished, FirstToken, RequestEvent
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.core.messages import StepOutputs, TokenOutput
from lorikeet.core.plan import KernelForm, StepPlan
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.profile import CostProfile, ProfileError
from lorikeet.engine.build import assemble
from lorikeet.engine.driver import drive
from lorikeet.engine.modelled_build import build_modelled_executor
from lorikeet.scheduling.scheduler import COALESCED_STEPS
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
        return [output.token.token_id for output in self.tokens if output.request_id == name]


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
        ModelSettings(max_model_tokens=500),
        EngineSettings(max_repeat=1, **engine),  # type: ignore[arg-type]
    )
    clock, said = VirtualClock(), Said()
    profile = profile or round_profile()
    executor, sizes = build_modelled_executor(settings, profile, KernelForm.UNPADDED, clock, coalesced=coalesced)
    replica = assemble(settings, executor, sizes, clock, said.plans.append)
    drive(replica.engine, clock, requests, said.take, coalesced=coalesced)
    return said


def test_a_step_takes_as_long_as_the_profile_says() -> None:
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


def test_coalesced_steps_bring_what_single_steps_bring() -> None:
    requests = [
        request(f"r{i}", 1 + 7 * i % 40, 1 + 11 * i % 60, arrival_s=0.037 * i, adapter=adapter(f"x{i % 5}", 2 + i % 3))
        for i in range(40)
    ]
    one, many = run(requests), run(requests, coalesced=False)
    assert len(one.plans) < len(many.plans)
    for name in (r.request_id for r in requests):
        assert one.answer(name) == many.answer(name)
        for kind in (FirstToken, Finished):
            assert one.at(kind, name) == pytest.approx(many.at(kind, name), abs=1e-9)


def test_tokens_are_a_function_of_seed_and_position() -> None:
    alone = run([request("a", 9, 20, seed=7)]).answer("a")
    said = run([request("b", 30, 20), request("a", 9, 20, seed=7), request("c", 9, 20, seed=8)], max_running=2)
    assert said.answer("a") == alone != said.answer("c")


def test_a_profile_without_loads_is_named_when_one_is_needed() -> None:
    profile = round_profile(transfers=type(round_profile().transfers)())
    with pytest.raises(ProfileError, match=r"profile round knows no transfers\.source_to_device"):
        run([request("a", 1, 1, adapter=adapter("x", 1))], profile)


def test_a_step_with_adapters_needs_the_costs_of_its_form() -> None:
    with pytest.raises(ProfileError, match=r"lora\.unpadded"):
        run([request("a", 1, 1, adapter=adapter("x", 1))], round_profile(lora={}))


def test_an_answer_longer_than_a_plan_is_as_long_as_its_steps() -> None:
    said = run([request("a", 1, 100)])
    assert max(plan.repeat for plan in said.plans) == COALESCED_STEPS
    assert said.at(Finished, "a") == pytest.approx(0.010 + sum(0.010 + 0.0001 * context for context in range(2, 101)))
