"""Predicted lengths in a server: who makes them, what happens to the predictor process, and what is told of both."""

import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lorikeet.config import ConfigError, LengthPredictor, ServerSettings
from lorikeet.engine.length_predictor_training import file_sha256
from lorikeet.engine.sentence_encoder import DIMENSIONS
from lorikeet.observe import length_prediction
from lorikeet.observe.length_prediction import AnswerLengthPredictor, PredictorProcess, open_length_predictor
from lorikeet.scheduling.prediction.history import LengthHistory
from lorikeet.scheduling.prediction.learned import LengthModel, LengthModelInfo, PredictionErrors
from lorikeet.scheduling.prediction.messages import PredictorSetup
from lorikeet.scheduling.prediction.training import Samples, train
from tests.support.api_server import TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.waiting import until

LEARNED = 40
"""The only length that the head has seen."""

ANSWER_TOKENS = len(TOKENIZER.encode("hello world").ids) + 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tokenizer.json"
    TOKENIZER.save(str(file))
    return file


@pytest.fixture(scope="module")
def head(tokenizer: Path) -> LengthModel:
    """Knows the base model alone."""
    vectors = np.random.default_rng(0).standard_normal((100, DIMENSIONS)).astype(np.float32)
    return train(Samples(vectors, [10] * 100, [LEARNED] * 100, [None] * 100), file_sha256(tokenizer))


@pytest.fixture
def head_file(head: LengthModel, tmp_path: Path) -> Path:
    head.write(tmp_path / "head.safetensors")
    return tmp_path / "head.safetensors"


@pytest.fixture
async def process(head_file: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PredictorProcess]:
    monkeypatch.setattr(length_prediction, "_FIRST_RESTART_DELAY_S", 0.0)
    process = PredictorProcess(PredictorSetup(str(head_file), str(tokenizer)), timeout_s=60.0)
    yield process
    await process.close()


async def predicted(server: Running, **changes: object) -> int | None:
    """Send a request and return what was predicted for it."""
    reply = await server.http.post(CHAT, json=body(**{"max_tokens": 100, **changes}))
    assert reply.status_code == 200
    return server.engine.submitted[-1].predicted_tokens


async def metric(server: Running, name: str) -> float:
    page = (await server.http.get("/metrics")).text
    found = re.search(rf"^lorikeet:{re.escape(name)}[,}}].* (\S+)$", page, re.MULTILINE)
    assert found, f"no {name} in {page}"
    return float(found[1])


@pytest.mark.slow
async def test_history_answers_until_the_process_is_there_and_when_it_has_died(
    start: Start, head: LengthModel, process: PredictorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(lengths=AnswerLengthPredictor(LengthHistory(), head, process)) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        assert await predicted(server) is None, "nobody knows anything yet"
        assert await predicted(server) == ANSWER_TOKENS, "history has seen an answer"
        await process.wait_until_ready()
        assert await predicted(server) == LEARNED
        assert await predicted(server, max_tokens=7) == 7, "no answer is longer than it may be"
        assert await predicted(server, model="formal") == ANSWER_TOKENS, "the head does not know this adapter"
        assert await predicted(server, n=2) == LEARNED
        cpu_s = await metric(server, 'predictor_cpu_seconds_total{engine="0"')
        assert cpu_s > 0

        first = process.process_id
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.process_id is None, "the predictor's end is noticed")
        assert await predicted(server) == ANSWER_TOKENS
        await process.wait_until_ready()
        assert await predicted(server) == LEARNED
        assert process.process_id != first
        assert await metric(server, 'predictor_cpu_seconds_total{engine="0"') > cpu_s, "those of both"
        assert await metric(server, 'predictor_restarts_total{engine="0"') == 1
        assert await metric(server, 'length_predictions_total{by="learned"') == 4
        assert await metric(server, 'length_predictions_total{by="history"') == 3
        assert await metric(server, 'length_predictions_total{by="none"') == 1

        os.kill(process.process_id, signal.SIGSTOP)
        process._timeout_s = 0.01
        assert await predicted(server) == ANSWER_TOKENS, "no answer in time"
        assert await metric(server, 'predictor_late_total{engine="0"') == 1
        for _ in range(length_prediction.MAX_PENDING):
            await predicted(server)
        assert await metric(server, 'predictor_refused_total{engine="0"') > 1, "it is busy, and is not asked any more"

        stopped = process.process_id
        monkeypatch.setattr(length_prediction, "_STUCK_S", 0.0)
        await predicted(server)
        await until(lambda: process.process_id is None, "the predictor's end is noticed")
        await process.wait_until_ready()
        process._timeout_s = 60.0
        assert await predicted(server) == LEARNED
        assert process.process_id != stopped


@pytest.mark.slow
async def test_answers_that_were_broken_off_teach_nothing_and_errors_are_summed(start: Start) -> None:
    async with start(lengths=AnswerLengthPredictor(LengthHistory())) as server:
        assert await predicted(server) is None
        assert await metric(server, 'length_predicted_answers_total{engine="0"') == 0
        server.engine.refusal = "no"
        await server.http.post(CHAT, json=body())
        server.engine.refusal = None
        assert await predicted(server) == ANSWER_TOKENS
        assert await predicted(server, max_tokens=1) == 1
        assert await predicted(server) == ANSWER_TOKENS
        assert await metric(server, 'length_predicted_answers_total{engine="0"') == 3
        assert await metric(server, 'length_prediction_error_tokens_total{engine="0"') == 0


async def test_without_a_predictor_nothing_is_predicted(start: Start) -> None:
    async with start() as server:
        assert [await predicted(server) for _ in range(2)] == [None, None]


def settings(kind: str, file: object = "") -> ServerSettings:
    return ServerSettings(length_predictor=LengthPredictor(kind), length_predictor_file=str(file))


def write_worse(head: LengthModel, to: Path) -> Path:
    """Write the head with errors that are not smaller than those of history."""
    same = PredictionErrors(20, 5.0, 0.5, 0.5)
    about: LengthModelInfo = msgspec.structs.replace(head.about, learned=same, history=same)
    LengthModel(about, head._centre, head._axes, head._typical, head._trees, head._base).write(to)
    return to


@pytest.mark.parametrize(
    ("kind", "words"), [("none", "not predicted"), ("history", "by history"), ("auto", "by history")]
)
def test_predictor_chosen_without_a_file(kind: str, words: str, tokenizer: Path) -> None:
    lengths, note = open_length_predictor(settings(kind), tokenizer)
    assert lengths.process is None
    assert words in note


async def test_auto_takes_the_better_one(head: LengthModel, tokenizer: Path, tmp_path: Path) -> None:
    worse = write_worse(head, tmp_path / "worse")
    lengths, note = open_length_predictor(settings("auto", worse), tokenizer)
    assert lengths.process is None
    assert f"by history, not by {worse}: held out, its mean error was 5.0 tokens, that of history 5.0" in note
    about: LengthModelInfo = msgspec.structs.replace(
        head.about, learned=PredictionErrors(20, 4.0, 0.5, 0.5), history=PredictionErrors(20, 5.0, 0, 0)
    )
    better = LengthModel(about, head._centre, head._axes, head._typical, head._trees, head._base)
    better.write(tmp_path / "better")
    for kind, file in (("auto", "better"), ("learned", "better"), ("learned", "worse")):
        lengths, note = open_length_predictor(settings(kind, tmp_path / file), tokenizer)
        assert lengths.process is not None
        assert f"predicted by {tmp_path / file}" in note
        await lengths.close()


def test_files_that_cannot_be_used_are_refused_at_the_start(head_file: Path, tokenizer: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    for asked, file, words in (
        (settings("learned"), tokenizer, "needs a length_predictor_file"),
        (settings("learned", tmp_path / "none"), tokenizer, "length_predictor_file: .*none"),
        (settings("auto", tokenizer), tokenizer, "not a file of lorikeet train-predictor"),
        (settings("learned", head_file), other, "another tokenizer"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_length_predictor(asked, file)
