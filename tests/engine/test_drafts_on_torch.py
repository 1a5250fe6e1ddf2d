"""Answers are the same tokens with any draft: right, wrong, or not allowed at all, whatever a request asks for."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import replay
from lorikeet.scheduling.drafts import Drafter
from lorikeet.scheduling.state import Sequence
from tests.engine.grammar_cases import CLOSING, VOCABULARY, cases_of
from tests.support.api_server import END
from tests.support.live import live_settings

ANSWER_TOKENS = 60
Answer = list[Token]


class Guesses(Drafter):
    """Drafts what will come, but for mistakes."""

    def __init__(self, answers: dict[RequestId, Answer], choose: random.Random) -> None:
        super().__init__(8)
        self._answers, self._choose = answers, choose

    def draft(self, sequences: Iterable[Sequence], budget_tokens: int, cost: float) -> dict[RequestId, tuple[int, ...]]:
        drafts = {}
        for sequence in sequences:
            done, stops = sequence.output_tokens, sequence.request.sampling.stop_token_ids
            most = min(budget_tokens, sequence.tokens_left - 1, self._choose.randrange(8))
            draft = [token.token_id for token in self._answers[sequence.request_id]][done : done + most]
            if draft and self._choose.random() < 0.5:
                draft[self._choose.randrange(len(draft))] = self._choose.randrange(VOCABULARY)
            if draft and not set(draft) & set(stops):
                drafts[sequence.request_id] = tuple(draft)
                budget_tokens -= len(draft)
        return drafts

    def note(self, sequence: Sequence, drafted: int, kept: int, tokens: int) -> None:
        self.drafted_tokens += drafted
        self.kept_tokens += kept


def asked(owners: list[AdapterRef | None]) -> list[Request]:
    """Requests that ask for everything that changes what a step yields."""
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
        {"top_k": 20, "top_p": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"min_p": 0.01, "logprobs": 0, "logprob_token_ids": (3, 5, 7)},
        {"stop_token_ids": (END, *range(10, 60)), "min_tokens": 9},
        {"bad_words": ((11, 12), (4,), (40,)), "logit_bias": ((9, 4.0), (11, 3.0), (12, 3.0)), "logprobs": 2},
        {"allowed_token_ids": tuple(range(5, 25)), "frequency_penalty": 1.5},
        {"prompt_logprobs": 2, "temperature": 0.0},
    ]
    wishes += [
        {"grammar": case.grammar, "logit_bias": CLOSING, "stop_token_ids": (END,), **more}
        for case in cases_of(1)
        for more in ({}, {"logprobs": 1, "presence_penalty": 0.5})
    ]
    return [
        Request(
            RequestId(f"{number}"),
            [5, 6, 7, number % VOCABULARY],
            SamplingParams(**{"max_tokens": ANSWER_TOKENS, "seed": number, **wish}),
            0.0,
            owners[number % len(owners)],
        )
        for number, wish in enumerate(wishes)
    ]


def run(engine: Engine, requests: list[Request], choose: random.Random | None = None) -> dict[RequestId, Answer]:
    """Return the answers; with ``choose`` requests come one after the other, and are taken out and resumed."""
    answers: dict[RequestId, Answer] = {request.request_id: [] for request in requests}
    waiting, ended = list(reversed(requests)), set[RequestId]()
    while waiting or engine.has_requests:
        while waiting and (choose is None or choose.random() < 0.5):
            engine.submit(waiting.pop())
        live = [each for each in answers if each not in ended and answers[each]]
        if choose is not None and live and choose.random() < 0.2:
            engine.submit(engine.export_request(choose.choice(live)))
        outputs = engine.step()
        for output in outputs.tokens:
            assert output.index == len(answers[output.request_id])
            answers[output.request_id] += output.tokens
        for event in outputs.events:
            if isinstance(event, Finished):
                assert event.reason is not FinishReason.ERROR, event
                ended.add(event.request_id)
        if not engine.is_busy and engine.has_requests:
            engine.wait_for_transfer(1.0)
    return answers


def check_same(answers: dict[RequestId, Answer], expected: dict[RequestId, Answer]) -> None:
    for request_id, tokens in expected.items():
        assert [each.token_id for each in answers[request_id]] == [each.token_id for each in tokens], request_id
        for one, other in zip(answers[request_id], tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-4)


@pytest.fixture(scope="module")
def expected(model: Path, owners: list[AdapterRef | None]) -> Iterator[dict[RequestId, Answer]]:
    engine = build_replica(live_settings(model, draft_tokens=0)).engine
    try:
        yield run(engine, asked(owners))
        assert engine.stats().drafted_tokens == 0
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_answers_do_not_depend_on_drafts(
    model: Path,
    owners: list[AdapterRef | None],
    expected: dict[RequestId, Answer],
    seed: int,
) -> None:
    engine = build_replica(live_settings(model, memory_bytes=400_000)).engine
    choose = random.Random(seed)
    engine._scheduler.drafter = drafter = Guesses(expected, choose)
    try:
        check_same(run(engine, asked(owners), choose), expected)
        engine._memory.check_integrity()
    finally:
        engine.close()
    assert 100 < drafter.kept_tokens < drafter.drafted_tokens - 100


@pytest.mark.slow
def test_adapter_with_repeated_answers_takes_fewer_steps(
    model: Path,
    owners: list[AdapterRef | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = Drafter.draft  # what a drafted token costs is measured, and on a busy machine it may be too much
    monkeypatch.setattr(Drafter, "draft", lambda self, sequences, budget, cost: draft(self, sequences, budget, 0.0))
    one = Request(RequestId("a"), [5, 6, 7], SamplingParams(ANSWER_TOKENS, temperature=0.0), 0.0, owners[1])
    recording, steps = tmp_path / "recording", []
    engine = build_replica(live_settings(model, record=str(recording))).engine
    try:
        answers = []
        for name in "abc":
            before = engine.stats().steps
            again = msgspec.structs.replace(one, request_id=RequestId(name))
            answers.append(next(iter(run(engine, [again]).values())))
            steps.append(engine.stats().steps - before)
    finally:
        engine.close()
    assert answers[0] == answers[1] == answers[2]
    assert steps[2] < 0.6 * steps[0]
    assert replay(Recording(recording)).difference is None
