"""``lorikeet train-predictor``: from a server's request log to a file that its predictor process reads."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lorikeet.cli.app import app
from lorikeet.core.events import RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.length_predictor_process import BatchPredictor
from lorikeet.engine.length_predictor_training import file_sha256, read_logs
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.request_log import RequestLog
from lorikeet.scheduling.prediction.learned import LengthModel
from lorikeet.scheduling.prediction.messages import PredictionRequest, PredictorSetup
from tests.models.checkpoints import make_checkpoint
from tests.support.api_server import TOKENIZER

SHORT = "What is the capital of France? Name the city."
LONG = "Please write a long poem about the sea and its waves."


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    make_checkpoint(folder, "llama", vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=512)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


def write_log(path: Path, requests: int, *, text: bool = True) -> Path:
    """A log of questions with answers of 5 tokens and of 100, and of one whose client hung up."""
    log = RequestLog(path, max_bytes=10**7, keep=1, text=text)
    for number in range(requests + 1):
        prompt = TOKENIZER.encode(f"{LONG if number % 2 else SHORT} ({number})").ids
        request = Request(RequestId(f"r{number}"), prompt, SamplingParams(200), 0.0)
        reason = "stop" if number else "abort"
        tokens = 100 if number % 2 else 5
        log.on_ended(EndedRequest(request, RequestTimings(0.0), tokens, reason, 1.0, text="text"))
    log.close()
    return path


def run(model: Path, log: Path, output: Path) -> Result:
    return CliRunner().invoke(app, ["train-predictor", str(log), "--model", str(model), "--output", str(output)])


@pytest.mark.slow
def test_predictor_process_answers_as_trained_from_a_log(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "head.safetensors"
    ran = run(model, write_log(tmp_path / "log.jsonl", 120), output)
    assert ran.exit_code == 0, ran.output
    assert "24 requests held out of 120" in ran.output
    assert "auto uses the learned model" in ran.output
    about = LengthModel.read(output).about
    assert about.tokenizer_sha256 == file_sha256(model / "tokenizer.json")
    assert about.learned.mean_tokens < 10 < 40 < about.history.mean_tokens

    answerer = BatchPredictor(PredictorSetup(str(output), str(model / "tokenizer.json")))
    later = time.monotonic() + 60
    prompts = [TOKENIZER.encode(f"{text} (200)").ids for text in (SHORT, LONG, SHORT)]
    asks = [
        PredictionRequest(number, prompt, len(prompt), None, until_s)
        for number, (prompt, until_s) in enumerate(zip(prompts, (later, later, 0.0), strict=True))
    ]
    told = answerer.answer(asks)
    assert told.taken == 3
    assert [number for number, _ in told.predictions] == [0, 1], "the third question was too late already"
    (_, short), (_, long) = told.predictions
    assert short < 20 < 60 < long


def test_log_without_prompts_is_refused_with_a_hint(model: Path, tmp_path: Path) -> None:
    ran = run(model, write_log(tmp_path / "log.jsonl", 3, text=False), tmp_path / "head")
    assert ran.exit_code == 1
    assert "line 1: there is no prompt" in " ".join(ran.output.split())
    assert "--request-log-text" in ran.output


def test_too_few_requests_and_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text('{"a": 1}\nnothing\n')
    (tmp_path / "wrong").write_text(json.dumps({"prompt_token_ids": [1], "output_tokens": "many"}) + "\n")
    for log, words in (
        (write_log(tmp_path / "log.jsonl", 3), "3 requests are too few"),
        (tmp_path / "other", "there is no prompt"),
        (tmp_path / "wrong", "not a line of a request log"),
        (tmp_path / "none", "none"),
    ):
        ran = run(model, log, tmp_path / "head")
        assert ran.exit_code == 1
        assert words in " ".join(ran.output.split())


def test_logs_are_read_in_order_and_truncated_lines_are_skipped(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / name, count) for name, count in (("first", 2), ("second", 1))]
    assert [request.output_tokens for request in read_logs(logs)] == [100, 5, 100]
