"""Greedy fp32 answers do not depend on any mechanism, whenever it acts: each is forced on and off at random."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished, FinishReason, Mechanism
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import PACKING_ORDER, LoadOrder
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.scheduling.batching.mode import ALL_REQUESTS, BatchingChoice, BatchingMode, LiveRequest, allow
from tests.support.driver import AMPLE, SCARCE, Models, answer, make_models, random_tokens, tight_settings

pytestmark = pytest.mark.slow

PROMPTS, ANSWER_TOKENS = 4, 10
EVERYTHING = "lorikeet:merge-paid,cold_start=assist"
"""The default, merging, and host cores that assist wherever they can."""


class Running(NamedTuple):
    """An engine with every mechanism, and what the plain preset answers."""

    engine: Engine
    adapters: list[AdapterRef | None]
    answers: dict[tuple[int, int], list[int]]
    forced: dict[str, bool]
    seen: set[str]


def request(name: str, adapters: list[AdapterRef | None], which: int, prompt: int) -> Request:
    tokens = random_tokens(5 + 7 * prompt, seed=prompt)
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    return Request(RequestId(name), tokens, sampling, 0.0, adapters[which])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    models: Models = make_models(tmp_path_factory.mktemp("models"))
    adapters: list[AdapterRef | None] = [None, *models.adapters.values()]
    cases = [(which, prompt) for which in range(len(adapters)) for prompt in range(PROMPTS)]
    plain = build_replica(tight_settings(models.folder, preset="lorikeet:plain", memory_bytes=AMPLE)).engine
    try:
        outputs = answer(plain, [request(f"{which} {prompt}", adapters, which, prompt) for which, prompt in cases])
    finally:
        plain.close()
    tokens: dict[str, list[int]] = {}
    for output in (each for turn in outputs for each in turn.tokens):
        tokens.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
    answers = {case: tokens[f"{case[0]} {case[1]}"] for case in cases}
    with_everything = tight_settings(
        models.folder, preset=EVERYTHING, memory_bytes=SCARCE, host_memory_bytes=1_000_000, link_bytes_per_s=2e6
    )
    engine = build_replica(with_everything).engine
    forced = {"merge": False, "assist": True}
    _force(engine, forced)
    try:
        yield Running(engine, adapters, answers, forced, set())
    finally:
        engine.close()


class Forced(BatchingMode):
    """Merges the adapter of the oldest request that has one on the device, whenever it is told to; others wait."""

    def __init__(self, forced: dict[str, bool]) -> None:
        self._forced = forced

    def choose(self, live: Sequence[LiveRequest]) -> BatchingChoice:
        legal = [each for each in live if each.is_legal and each.adapter is not None]
        if not (self._forced["merge"] and legal):
            return ALL_REQUESTS
        adapter = legal[0].adapter
        return allow([each for each in live if each.adapter == adapter], live, adapter)

    def steps_until_review(self) -> float:
        return 1


def _force(engine: Engine, forced: dict[str, bool]) -> None:
    """Let ``forced`` say what the engine's measurements would: whether merging and assistance pay."""
    scheduler = engine._scheduler
    scheduler.selector._mode = Forced(forced)
    planned: Callable[[AdapterRef, int], LoadOrder] = scheduler._load_order
    scheduler._load_order = lambda ref, tokens: planned(ref, tokens) if forced["assist"] else PACKING_ORDER


class Anything(RuleBasedStateMachine):
    """Requests, steps, and mechanisms that come and go."""

    running: Running

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[RequestId, tuple[int, int]] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, FinishReason] = {}

    @rule(which=st.integers(0, 3), prompt=st.integers(0, PROMPTS - 1))
    def ask(self, which: int, prompt: int) -> None:
        which %= len(self.running.adapters)
        name = RequestId(f"{id(self)} {len(self.asked)}")
        self.asked[name] = which, prompt
        self.running.engine.submit(request(name, self.running.adapters, which, prompt))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule(assist=st.sampled_from([True, True, False]))
    def force(self, assist: bool) -> None:
        forced = self.running.forced
        forced.update(merge=not forced["merge"], assist=assist)

    @rule(seed=st.integers(0, 100))
    def resume(self, seed: int) -> None:
        """Preempt a request, as if it came from another replica."""
        unfinished = sorted(self.asked.keys() - self.ended.keys())
        if unfinished:
            name = random.Random(seed).choice(unfinished)
            engine = self.running.engine
            engine.submit(engine.export_request(name))

    @rule(which=st.integers(1, 3))
    def forget(self, which: int) -> None:
        """Free an adapter and its KV as soon as no request needs it."""
        ref = self.running.adapters[which % len(self.running.adapters)]
        if ref is not None:
            self.running.engine.drop_adapter(ref.digest)

    def teardown(self) -> None:
        engine = self.running.engine
        while engine.has_requests:
            self._step()
        for name, case in self.asked.items():
            assert self.ended[name] is FinishReason.LENGTH
            assert self.tokens[name] == self.running.answers[case], (name, case)

    def _step(self) -> None:
        engine = self.running.engine
        outputs = engine.step()
        for output in outputs.tokens:
            known = self.tokens.setdefault(output.request_id, [])
            assert output.index == len(known)
            known += [token.token_id for token in output.tokens]
        for event in outputs.events:
            if isinstance(event, Finished):
                self.ended[event.request_id] = event.reason
        modes = engine.stats().modes
        self.running.seen.update(["merge"] if modes.merged_steps else [], ["assist"] if modes.assisted_steps else [])
        if not engine.is_busy and engine.has_transfers:
            engine.wait_for_transfer(1.0)


def test_greedy_answers_do_not_depend_on_mechanisms(running: Running) -> None:
    Anything.running = running
    few = settings(max_examples=6, stateful_step_count=20, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(Anything, settings=few)  # type: ignore[no-untyped-call]
    assert running.seen == {Mechanism.ASSIST.value, "merge"}
