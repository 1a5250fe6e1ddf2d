"""Predicted lengths of answers: who predicts them in a server, how well, and what that takes."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.config import ConfigError, LengthPredictor, ServerSettings
from lorikeet.core.request import Request
from lorikeet.models.sentence_files import SentenceModelError, find_sentence_model
from lorikeet.scheduling.prediction.history import History
from lorikeet.scheduling.prediction.learned import Head, HeadError
from lorikeet.scheduling.prediction.messages import Setup
from lorikeet.server.families import Families
from lorikeet.server.predictor_process import PredictorProcess

_WHOLE = frozenset({"stop", "length"})


class Lengths:
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
        self, history: History | None = None, head: Head | None = None, process: PredictorProcess | None = None
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


def open_lengths(settings: ServerSettings, tokenizer_file: Path) -> tuple[Lengths, str]:
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
        return Lengths(), "answer lengths are not predicted"
    if kind is LengthPredictor.HISTORY or (kind is LengthPredictor.AUTO and not file):
        return Lengths(History()), "answer lengths are predicted by history"
    if not file:
        raise ConfigError("length_predictor learned needs a length_predictor_file, of lorikeet train-predictor")
    try:
        head = Head.read(Path(file))
        find_sentence_model()
    except (HeadError, SentenceModelError) as error:
        raise ConfigError(f"length_predictor_file: {error}") from error
    if head.about.tokenizer_sha256 != hashlib.sha256(tokenizer_file.read_bytes()).hexdigest():
        raise ConfigError(f"length_predictor_file: {file} was trained for a model with another tokenizer")
    learned, history = head.about.learned.mean_tokens, head.about.history.mean_tokens
    errors = f"held out, its mean error was {learned:.1f} tokens, that of history {history:.1f}"
    if kind is LengthPredictor.AUTO and not head.about.is_better:
        return Lengths(History()), f"answer lengths are predicted by history, not by {file}: {errors}"
    process = PredictorProcess(Setup(file, str(tokenizer_file)), settings.length_predictor_timeout_s)
    return Lengths(History(), head, process), f"answer lengths are predicted by {file}: {errors}"


class LengthCollector(Collector):
    """What is known of the predictions, as metrics.

    Args:
        lengths: who predicts.
        labels: of every metric.
    """

    def __init__(self, lengths: Lengths, labels: Mapping[str, str]) -> None:
        self._lengths = lengths
        self._make = Families(labels)
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
