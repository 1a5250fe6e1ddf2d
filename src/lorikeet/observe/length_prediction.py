"""Predicts the lengths of answers with a learned model in another process, or from the history of each adapter.

Also counts the errors of the predictions and their CPU time.
"""

import asyncio
import hashlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.config import ConfigError, LengthPredictor, ServerSettings
from lorikeet.http.logs import log
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.metric_families import MetricFamilies
from lorikeet.scheduling.prediction.history import LengthHistory
from lorikeet.scheduling.prediction.learned import LengthModel, LengthModelError
from lorikeet.scheduling.prediction.messages import (
    FROM_PROCESS,
    TEXT_TOKENS,
    PredictionBatch,
    PredictionRequest,
    PredictorReady,
    PredictorSetup,
    frame,
    take_frames,
)
from lorikeet.scheduling.prediction.sentence_model import SentenceModelError, find_sentence_model

MAX_PENDING = 32
"""Most requests queued at the predictor process; a busy process gets no more."""

_FIRST_RESTART_DELAY_S = 1.0
"""Seconds before a process that has ended is restarted; doubled each time until one has answered."""
_MAX_RESTART_DELAY_S = 60.0

_STUCK_S = 30.0
"""Seconds without progress after which a busy process is killed and restarted."""

_READ_BYTES = 2**16


class PredictorProcess:
    """Keeps a predictor process running and sends it requests.

    Args:
        setup: files of the model.
        timeout_s: time limit on a prediction, in seconds.

    Attributes:
        restarts: number of processes that replaced an ended one.
        late: number of requests that were not answered in time.
        refused: number of requests that were not sent, because the process was busy or not running.
    """

    def __init__(self, setup: PredictorSetup, timeout_s: float) -> None:
        self.restarts = 0
        self.late = 0
        self.refused = 0
        self._setup = setup
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[int | None]] = {}
        self._queued = 0
        self._progress_s = 0.0
        """When it last processed a request, or got one after being idle."""
        self._restart_delay_s = _FIRST_RESTART_DELAY_S
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._cpu_s = self._ended_cpu_s = 0.0
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes, up to their last messages, in seconds."""
        return self._ended_cpu_s + self._cpu_s

    @property
    def process_id(self) -> int | None:
        """Process id of the running process, None while none is ready."""
        return self._process.pid if self._process is not None and self._ready.is_set() else None

    async def wait_until_ready(self) -> None:
        """Wait until a process is ready."""
        await self._ready.wait()

    async def predict(self, prompt: list[int], adapter: str | None) -> int | None:
        """Predict the number of tokens of the answer to ``prompt``; None without a prediction in time.

        Args:
            prompt: the prompt's token ids.
            adapter: the adapter's name; None for the base model.
        """
        process = self._process
        if not self._ready.is_set() or self._queued >= MAX_PENDING or process is None or process.stdin is None:
            self.refused += 1
            if self._queued and time.monotonic() - self._progress_s > _STUCK_S and process is not None:
                log.error("the predictor process makes no progress", requests=self._queued)
                _kill(process)
            return None
        if not self._queued:
            self._progress_s = time.monotonic()
        request_number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answer = self._pending[request_number] = loop.create_future()
        self._queued += 1
        until_s = time.monotonic() + self._timeout_s
        process.stdin.write(
            frame(PredictionRequest(request_number, prompt[-TEXT_TOKENS:], len(prompt), adapter, until_s))
        )
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            self.late += 1
            return None
        finally:
            self._pending.pop(request_number, None)

    async def close(self) -> None:
        """End the process."""
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        if self._process is not None and self._process.returncode is None:
            _kill(self._process)
            await self._process.wait()

    async def _supervise(self) -> None:
        """Start a process, and start another whenever a process ends."""
        while True:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "lorikeet.engine.length_predictor_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # A Ctrl-C at the terminal should reach only the API process.
                )
            except OSError as error:
                log.error("the predictor process cannot be started", error=str(error), retry_in_s=self._restart_delay_s)
            else:
                await self._read_messages(process)
                log.error("the predictor process ended", code=await process.wait(), restart_in_s=self._restart_delay_s)
            self._fail_pending()
            await asyncio.sleep(self._restart_delay_s)
            self._restart_delay_s = min(2 * self._restart_delay_s, _MAX_RESTART_DELAY_S)
            self.restarts += 1

    async def _read_messages(self, process: asyncio.subprocess.Process) -> None:
        """Read a process's messages until the process ends. A process that sends an invalid message is killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frame(self._setup))
        received = bytearray()
        try:
            while content := await process.stdout.read(_READ_BYTES):
                received += content
                for message in map(FROM_PROCESS.decode, take_frames(received)):
                    self._cpu_s = message.cpu_s
                    match message:
                        case PredictorReady():
                            self._ready.set()
                        case PredictionBatch():
                            self._on_predictions(message)
        except msgspec.DecodeError as error:
            log.error("the predictor process sent an invalid message", error=str(error))
            _kill(process)
        self._ready.clear()  # The CPU time is updated before the next request is sent.

    def _on_predictions(self, batch: PredictionBatch) -> None:
        self._restart_delay_s = _FIRST_RESTART_DELAY_S
        self._progress_s = time.monotonic()
        self._queued -= batch.taken
        for request_number, tokens in batch.predictions:
            answer = self._pending.get(request_number)
            if answer is not None and not answer.done():
                answer.set_result(tokens)

    def _fail_pending(self) -> None:
        """Answer all pending requests with None, since their process has ended."""
        self._ready.clear()
        self._queued = 0
        self._ended_cpu_s += self._cpu_s
        self._cpu_s = 0.0
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(None)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


_COMPLETE_REASONS = frozenset({"stop", "length"})


class AnswerLengthPredictor:
    """Predicts the lengths of answers, and learns from ended answers.

    Args:
        history: lengths of past answers; None for no predictions.
        model: the process's model. Answers of adapters on which it was not trained are predicted from history.
        process: the predictor process, which is tried first; None to predict everything from history.

    Attributes:
        made: number of predictions by source: ``learned``, ``history`` or ``none``.
        answers: number of complete answers with a prediction.
        error_tokens: sum of the absolute errors of these predictions, in tokens.
    """

    def __init__(
        self,
        history: LengthHistory | None = None,
        model: LengthModel | None = None,
        process: PredictorProcess | None = None,
    ) -> None:
        self.process = process
        self.made = Counter[str]()
        self.answers = 0
        self.error_tokens = 0
        self._history = history
        self._model = model

    async def predict(self, prompts: Sequence[list[int]], adapter: str | None) -> list[int | None]:
        """Predict the number of tokens of the answer to each of ``prompts``; None without a prediction."""
        if self._history is None:
            return [None] * len(prompts)
        batch: Sequence[int | None] = [None] * len(prompts)
        if self.process is not None and self._model is not None and self._model.knows(adapter):
            batch = await asyncio.gather(*(self.process.predict(prompt, adapter) for prompt in prompts))
        self.made["learned"] += len(batch) - batch.count(None)
        return [self._by_history(adapter) if tokens is None else tokens for tokens in batch]

    def on_ended(self, ended: EndedRequest) -> None:
        """Learn from a complete answer. Vectors and aborted or failed answers are ignored."""
        if self._history is None or ended.reason not in _COMPLETE_REASONS or ended.request.pooling is not None:
            return
        self._history.add(ended.adapter, ended.completion_tokens)
        predicted = ended.request.predicted_tokens
        if predicted is not None:
            self.answers += 1
            self.error_tokens += abs(predicted - ended.completion_tokens)

    async def close(self) -> None:
        """End the process."""
        if self.process is not None:
            await self.process.close()

    def _by_history(self, adapter: str | None) -> int | None:
        assert self._history is not None
        tokens = self._history.predict(adapter)
        self.made["none" if tokens is None else "history"] += 1
        return tokens


def open_length_predictor(settings: ServerSettings, tokenizer_file: Path) -> tuple[AnswerLengthPredictor, str]:
    """Return the predictor that the settings choose, and a line for the log with its name.

    A predictor process starts in the background. History predicts until the process is ready.

    Args:
        settings: the server's settings.
        tokenizer_file: the base model's ``tokenizer.json``.

    Raises:
        ConfigError: the file is missing, was not written by `lorikeet train-predictor`, or was trained for another
            model; or the sentence model is not installed.
    """
    kind = settings.length_predictor
    file = settings.length_predictor_file
    if kind is LengthPredictor.NONE:
        return AnswerLengthPredictor(), "answer lengths are not predicted"
    if kind is LengthPredictor.HISTORY or (kind is LengthPredictor.AUTO and not file):
        return AnswerLengthPredictor(LengthHistory()), "answer lengths are predicted by history"
    if not file:
        raise ConfigError("length_predictor learned needs a length_predictor_file from lorikeet train-predictor")
    try:
        model = LengthModel.read(Path(file))
        find_sentence_model()
    except (LengthModelError, SentenceModelError) as error:
        raise ConfigError(f"length_predictor_file: {error}") from error
    if model.about.tokenizer_sha256 != hashlib.sha256(tokenizer_file.read_bytes()).hexdigest():
        raise ConfigError(f"length_predictor_file: {file} was trained for a model with another tokenizer")
    learned = model.about.learned.mean_tokens
    history = model.about.history.mean_tokens
    errors = f"held out, its mean error was {learned:.1f} tokens, that of history {history:.1f}"
    if kind is LengthPredictor.AUTO and not model.about.is_better:
        return AnswerLengthPredictor(
            LengthHistory()
        ), f"answer lengths are predicted by history, not by {file}: {errors}"
    process = PredictorProcess(PredictorSetup(file, str(tokenizer_file)), settings.length_predictor_timeout_s)
    return AnswerLengthPredictor(LengthHistory(), model, process), f"answer lengths are predicted by {file}: {errors}"


class LengthCollector(Collector):
    """Metrics of the predictions.

    Args:
        lengths: the predictor.
        labels: the labels of every metric.
    """

    def __init__(self, lengths: AnswerLengthPredictor, labels: Mapping[str, str]) -> None:
        self._lengths = lengths
        self._make = MetricFamilies(labels)
        self._started_s = time.monotonic()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        lengths = self._lengths
        make = self._make
        made = [((by,), lengths.made[by]) for by in ("learned", "history", "none")]
        yield make.counts("lorikeet:length_predictions", "Answers predicted, by source.", ("by",), made)
        yield make.count("lorikeet:length_predicted_answers", "Whole answers with a prediction.", lengths.answers)
        yield make.count(
            "lorikeet:length_prediction_error_tokens", "Sum of their absolute errors.", lengths.error_tokens
        )
        process = lengths.process
        if process is None:
            return
        share = process.cpu_s / (time.monotonic() - self._started_s)
        yield make.count("lorikeet:predictor_cpu_seconds", "CPU time of the predictor process.", process.cpu_s)
        yield make.gauge("lorikeet:predictor_cpu_share", "The same as a share of one core since the start.", share)
        yield make.count("lorikeet:predictor_late", "Predictions not made in time.", process.late)
        yield make.count(
            "lorikeet:predictor_refused", "Predictions not requested: process busy or down.", process.refused
        )
        yield make.count("lorikeet:predictor_restarts", "Restarts of the predictor process.", process.restarts)
