"""Predicts the lengths of answers: by a process with a learned model, by the history of each adapter, or not at all.

Counts how good the predictions are and what they cost.
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

from lorikeet.api.logs import log
from lorikeet.api.metrics import MetricFamilies
from lorikeet.config import ConfigError, LengthPredictor, ServerSettings
from lorikeet.core.request import Request
from lorikeet.models.sentence_files import SentenceModelError, find_sentence_model
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

MOST_WAITING = 32
"""Questions that the process has not dealt with, beyond which it is busy and gets no more."""

_FIRST_REST_S, _LAST_REST_S = 1.0, 60.0
"""Before a process that has ended is started again; doubled each time until one has answered something."""

_STUCK_S = 30.0
"""A busy process that has dealt with no question for so long is ended, and another started."""

_READ_BYTES = 2**16


class PredictorProcess:
    """Keeps a predictor process running and asks it.

    Args:
        setup: what it predicts with.
        timeout_s: an answer that takes longer is not waited for.

    Attributes:
        restarts: how often another process was started after one had ended.
        late: questions that were not answered in time.
        refused: questions that were not asked, as the process was busy or not there.
    """

    def __init__(self, setup: PredictorSetup, timeout_s: float) -> None:
        self.restarts = 0
        self.late = 0
        self.refused = 0
        self._setup = setup
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[int | None]] = {}
        self._waiting = 0
        self._dealt_s = 0.0
        """When it last dealt with a question, or got one after a pause."""
        self._rest_s = _FIRST_REST_S
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._cpu_s = self._ended_cpu_s = 0.0
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes so far, in seconds, as they said with their last answers."""
        return self._ended_cpu_s + self._cpu_s

    @property
    def process_id(self) -> int | None:
        """Process id of the one that can be asked, None while there is none."""
        return self._process.pid if self._process is not None and self._ready.is_set() else None

    async def wait_until_ready(self) -> None:
        """Wait until there is one that can be asked."""
        await self._ready.wait()

    async def predict(self, prompt: list[int], adapter: str | None) -> int | None:
        """Return how many tokens the answer to ``prompt`` will have; None if nobody says so in time.

        Args:
            prompt: token ids.
            adapter: name, None for the base model.
        """
        process = self._process
        if not self._ready.is_set() or self._waiting >= MOST_WAITING or process is None or process.stdin is None:
            self.refused += 1
            if self._waiting and time.monotonic() - self._dealt_s > _STUCK_S and process is not None:
                log.error("the predictor process deals with nothing", questions=self._waiting)
                _kill(process)
            return None
        if not self._waiting:
            self._dealt_s = time.monotonic()
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer = self._asked[number] = loop.create_future()
        self._waiting += 1
        until_s = time.monotonic() + self._timeout_s
        process.stdin.write(frame(PredictionRequest(number, prompt[-TEXT_TOKENS:], len(prompt), adapter, until_s)))
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            self.late += 1
            return None
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """End the process."""
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        if self._process is not None and self._process.returncode is None:
            _kill(self._process)
            await self._process.wait()

    async def _supervise(self) -> None:
        """Run one process after the other."""
        while True:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "lorikeet.engine.length_predictor_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # a Ctrl-C at the terminal is for the API process
                )
            except OSError as error:
                log.error("the predictor process cannot be started", error=str(error), again_in_s=self._rest_s)
            else:
                await self._listen(process)
                log.error("the predictor process ended", code=await process.wait(), starts_again_in_s=self._rest_s)
            self._give_up()
            await asyncio.sleep(self._rest_s)
            self._rest_s = min(2 * self._rest_s, _LAST_REST_S)
            self.restarts += 1

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Take what a process says until it ends, or says what nobody understands, which ends it."""
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
                            self._take(message)
        except msgspec.DecodeError as error:
            log.error("the predictor process cannot be understood", error=str(error))
            _kill(process)
        self._ready.clear()  # before anybody else asks it

    def _take(self, told: PredictionBatch) -> None:
        self._rest_s = _FIRST_REST_S
        self._dealt_s = time.monotonic()
        self._waiting -= told.taken
        for number, tokens in told.predictions:
            answer = self._asked.get(number)
            if answer is not None and not answer.done():
                answer.set_result(tokens)

    def _give_up(self) -> None:
        """Nobody will answer what was asked so far."""
        self._ready.clear()
        self._waiting = 0
        self._ended_cpu_s += self._cpu_s
        self._cpu_s = 0.0
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


_WHOLE = frozenset({"stop", "length"})


class AnswerLengthPredictor:
    """Predicts the lengths of answers, and learns from those that end.

    Args:
        history: None predicts nothing.
        head: what the process predicts with; adapters that it does not know are left to history.
        process: asked first; None leaves everything to history.

    Attributes:
        made: predictions by who made them: ``learned``, ``history`` or ``none``.
        answers: whole answers that had been predicted.
        error_tokens: sum of the absolute errors of those.
    """

    def __init__(
        self,
        history: LengthHistory | None = None,
        head: LengthModel | None = None,
        process: PredictorProcess | None = None,
    ) -> None:
        self.process = process
        self.made = Counter[str]()
        self.answers = 0
        self.error_tokens = 0
        self._history = history
        self._head = head

    async def predict(self, prompts: Sequence[list[int]], adapter: str | None) -> list[int | None]:
        """Return how many tokens the answers to ``prompts`` will have; None where nobody knows."""
        if self._history is None:
            return [None] * len(prompts)
        told: Sequence[int | None] = [None] * len(prompts)
        if self.process is not None and self._head is not None and self._head.knows(adapter):
            told = await asyncio.gather(*(self.process.predict(prompt, adapter) for prompt in prompts))
        self.made["learned"] += len(told) - told.count(None)
        return [self._by_history(adapter) if tokens is None else tokens for tokens in told]

    def ended(self, request: Request, tokens: int, reason: str) -> None:
        """An answer has ended with ``tokens`` tokens for ``reason``; what was broken off tells nothing."""
        if self._history is None or reason not in _WHOLE:
            return
        self._history.add(None if request.adapter is None else request.adapter.name, tokens)
        if request.predicted_tokens is not None:
            self.answers += 1
            self.error_tokens += abs(request.predicted_tokens - tokens)

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
    """Start what the settings ask for; return it and, in words, what that is.

    The process starts on its own time; until it is ready history answers.

    Args:
        settings: of the server.
        tokenizer_file: the base model's ``tokenizer.json``.

    Raises:
        ConfigError: the file is missing, is none of `lorikeet train-predictor`, or was made for another model; or the
            sentence model is not installed.
    """
    kind, file = settings.length_predictor, settings.length_predictor_file
    if kind is LengthPredictor.NONE:
        return AnswerLengthPredictor(), "answer lengths are not predicted"
    if kind is LengthPredictor.HISTORY or (kind is LengthPredictor.AUTO and not file):
        return AnswerLengthPredictor(LengthHistory()), "answer lengths are predicted by history"
    if not file:
        raise ConfigError("length_predictor learned needs a length_predictor_file, of lorikeet train-predictor")
    try:
        head = LengthModel.read(Path(file))
        find_sentence_model()
    except (LengthModelError, SentenceModelError) as error:
        raise ConfigError(f"length_predictor_file: {error}") from error
    if head.about.tokenizer_sha256 != hashlib.sha256(tokenizer_file.read_bytes()).hexdigest():
        raise ConfigError(f"length_predictor_file: {file} was trained for a model with another tokenizer")
    learned, history = head.about.learned.mean_tokens, head.about.history.mean_tokens
    errors = f"held out, its mean error was {learned:.1f} tokens, that of history {history:.1f}"
    if kind is LengthPredictor.AUTO and not head.about.is_better:
        return AnswerLengthPredictor(
            LengthHistory()
        ), f"answer lengths are predicted by history, not by {file}: {errors}"
    process = PredictorProcess(PredictorSetup(file, str(tokenizer_file)), settings.length_predictor_timeout_s)
    return AnswerLengthPredictor(LengthHistory(), head, process), f"answer lengths are predicted by {file}: {errors}"


class LengthCollector(Collector):
    """What is known of the predictions, as metrics.

    Args:
        lengths: who predicts.
        labels: of every metric.
    """

    def __init__(self, lengths: AnswerLengthPredictor, labels: Mapping[str, str]) -> None:
        self._lengths = lengths
        self._make = MetricFamilies(labels)
        self._started_s = time.monotonic()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        lengths, make = self._lengths, self._make
        made = [((by,), lengths.made[by]) for by in ("learned", "history", "none")]
        yield make.counts("lorikeet:length_predictions", "Answers predicted, by whom.", ("by",), made)
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
        yield make.count("lorikeet:predictor_late", "Questions not answered in time.", process.late)
        yield make.count("lorikeet:predictor_refused", "Questions not asked: busy or not there.", process.refused)
        yield make.count("lorikeet:predictor_restarts", "Predictor processes started anew.", process.restarts)
