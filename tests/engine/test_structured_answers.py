"""Every answer that ends by itself follows its grammar, on base and adapters in one batch, whatever happens."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from lorikeet.chat.grammar_process import GrammarKind, GrammarSpec
from lorikeet.client.client import EngineClient, RequestHandle
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import replay
from tests.engine.grammar_cases import CLOSING, READER, VOCABULARY, Case, cases_of, schema_case
from tests.support.api_server import END, TOKENIZER
from tests.support.live import engine_process, live_settings
from tests.support.outputs import outputs_of
from tests.support.schemas import published_schemas
from tests.support.waiting import until


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    made = build_replica(live_settings(model, num_scheduler_steps=4)).engine
    yield made
    made.close()


def requests(cases: Sequence[Case], owners: list[AdapterRef | None], max_tokens: int = 250) -> list[Request]:
    """One for each case, and two without a grammar."""
    free = [Case(""), Case("")]
    return [
        Request(
            RequestId(f"{number}"),
            [5, 6, 7, number % VOCABULARY],
            SamplingParams(max_tokens, number, logit_bias=CLOSING, stop_token_ids=(END,), grammar=case.grammar),
            0.0,
            owners[number % len(owners)],
        )
        for number, case in enumerate([*cases, *free])
    ]


def run(engine: Engine, asked: list[Request]) -> dict[str, str]:
    """Return the answers that ended with an end token."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    reasons: dict[str, FinishReason] = {}
    for request in asked:
        engine.submit(request)
    while engine.has_requests:
        outputs = engine.step()
        for output in outputs.tokens:
            tokens[output.request_id] += [token.token_id for token in output.tokens]
        for event in outputs.events:
            if hasattr(event, "reason"):
                assert event.reason is not FinishReason.ERROR, event
                reasons[event.request_id] = event.reason
        if not engine.is_busy:
            engine.wait_for_transfer()
    return {each: TOKENIZER.decode(tokens[each]) for each, why in reasons.items() if why is FinishReason.STOP}


def judge_all(cases: Sequence[Case], answers: dict[str, str]) -> int:
    """Judge the answers; return how many of those with a grammar ended by themselves."""
    for number, case in enumerate(cases):
        if str(number) in answers:
            case.judge(answers[str(number)])
    return sum(str(number) in answers for number in range(len(cases)))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("third", range(2))
@pytest.mark.parametrize("second", range(5))
@pytest.mark.parametrize("first", range(5))
def test_random_grammars_on_base_and_adapters_in_one_batch(
    engine: Engine, owners: list[AdapterRef | None], first: int, second: int, third: int
) -> None:
    """500 schemas and 100 regexes in all."""
    cases = cases_of((first * 5 + second) * 2 + third)
    assert all(case.grammar for case in cases)
    assert judge_all(cases, run(engine, requests(cases, owners))) >= len(cases) / 2


@pytest.mark.slow
def test_schemas_that_packages_publish(engine: Engine, owners: list[AdapterRef | None]) -> None:
    published = [schema_case(schema) for schema in published_schemas()]
    cases = [case for case in published if case.grammar]
    assert len(cases) >= 25
    assert judge_all(cases, run(engine, requests(cases, owners))) >= len(cases) / 2


@pytest.mark.slow
def test_tokens_that_must_come_are_taken_at_once(model: Path, owners: list[AdapterRef | None], tmp_path: Path) -> None:
    """An answer that is one text takes few steps, except where its log probabilities are wanted."""
    text = "the lorikeet is a small parrot"
    choice = READER.check(GrammarSpec(GrammarKind.CHOICE, json.dumps([text]), "p"))
    quick, *_ = requests([Case(choice.grammar)], owners)
    slow = msgspec.structs.replace(quick, sampling=msgspec.structs.replace(quick.sampling, logprobs=0))
    steps = []
    for request in (quick, slow):
        recording = tmp_path / str(len(steps))
        engine = build_replica(live_settings(model, record=str(recording))).engine
        try:
            answers = run(engine, [request])
            steps.append(engine.stats().steps)
        finally:
            engine.close()
        assert answers["0"] == text
        assert replay(Recording(recording)).difference is None
    assert steps[0] <= 3 < steps[1]


@pytest.mark.slow
def test_preempted_sequences_go_on_with_their_grammar(model: Path, owners: list[AdapterRef | None]) -> None:
    cases = [case for group in (0, 1) for case in cases_of(group)]
    settings = live_settings(model, memory_bytes=180_000, max_num_seqs=24)
    settings = msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, max_model_len=120))
    engine = build_replica(settings).engine
    try:
        asked = requests(cases, owners, 110)
        answers = run(engine, asked)
        assert engine.stats().preemptions >= 3
    finally:
        engine.close()
    assert judge_all(cases, answers) >= len(cases) / 3


@pytest.mark.slow
def test_ranks_follow_what_rank_0_samples_under_grammars(model: Path, owners: list[AdapterRef | None]) -> None:
    cases = cases_of(7)
    engine = build_replica(live_settings(model, tensor_parallel=2)).engine
    try:
        asked = [
            msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, prompt_logprobs=1))
            for each in requests(cases, owners)
        ]
        answers = run(engine, asked)
    finally:
        engine.close()
    assert judge_all(cases, answers) >= len(cases) / 2


@pytest.mark.slow
async def test_answers_follow_their_grammars_across_the_death_of_an_engine(
    model: Path, owners: list[AdapterRef | None]
) -> None:
    cases = cases_of(3)
    async with engine_process(live_settings(model)) as client:
        handles = [client.submit(request) for request in requests(cases, owners)]
        await until(lambda: sum(len(handle.token_ids) > 3 for handle in handles) > 5, "answers have begun")
        await kill(client)
        answers = dict(filter(None, await asyncio.gather(*map(read, handles))))
    assert any(handle.deaths for handle in handles)
    assert judge_all(cases, answers) >= len(cases) / 2


async def kill(client: EngineClient) -> None:
    """Kill the engine and wait until another one is ready."""
    assert client.process_id is not None
    os.kill(client.process_id, signal.SIGKILL)
    await until(lambda: client.restarts > 0 and client.alive, "another engine is ready")


async def read(handle: RequestHandle) -> tuple[str, str] | None:
    """Return id and answer of a request that ended with an end token."""
    async for output in outputs_of(handle):
        if output.finished is not None:
            assert output.finished.reason is not FinishReason.ERROR, output.finished
            if output.finished.reason is FinishReason.STOP:
                return handle.request.request_id, TOKENIZER.decode(handle.token_ids)
    return None
