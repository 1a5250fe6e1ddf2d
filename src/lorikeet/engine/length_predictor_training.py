"""Trains the head of the length predictor from request logs."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from lorikeet.engine.length_predictor_process import prompt_text
from lorikeet.engine.sentence_encoder import SentenceEncoder
from lorikeet.scheduling.prediction.learned import LengthModel
from lorikeet.scheduling.prediction.messages import TEXT_TOKENS
from lorikeet.scheduling.prediction.training import Samples, train

_COMPLETE = frozenset({"stop", "length"})
_BATCH = 16


class LogError(ValueError):
    """Raised when a request log cannot be used for training. The message names the reason."""


class TrainingRequest(msgspec.Struct, frozen=True):
    """The fields of a request log's line that training uses (``server.request_log`` with ``request_log_text``).

    Attributes:
        prompt_token_ids: the prompt.
        output_tokens: number of tokens of the answer.
        adapter: the adapter's name; None for the base model.
        finish_reason: why the answer ended. Aborted and failed answers are not used.
    """

    prompt_token_ids: list[int]
    output_tokens: int
    adapter: str | None = None
    finish_reason: str = "stop"


class _AnyLine(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int] | None = None


def read_logs(paths: Sequence[Path]) -> list[TrainingRequest]:
    """Return the requests with complete answers (stopped, or at their length limit), in the order of the lines.

    Raises:
        LogError: a line does not belong to a request log, or has no prompt.
        OSError: a file cannot be read.
    """
    decoder = msgspec.json.Decoder(TrainingRequest)
    requests = []
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    request = decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise LogError(f"{path}, line {number}: {_why(line, error)}") from error
                if request.finish_reason in _COMPLETE and request.output_tokens:
                    requests.append(request)
    return requests


def _why(line: bytes, error: msgspec.DecodeError) -> str:
    try:
        has_text = msgspec.json.decode(line, type=_AnyLine).prompt_token_ids is not None
    except msgspec.DecodeError:
        return f"not a line of a request log: {error}"
    if has_text:
        return f"not a line of a request log: {error}"
    return "there is no prompt: log with request_log_text (lorikeet serve --request-log FILE --request-log-text)"


def samples_of(
    requests: Sequence[TrainingRequest],
    tokenizer: Tokenizer,
    encoder: SentenceEncoder,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Samples:
    """Encode prompts and return the training samples.

    Args:
        requests: requests from logs.
        tokenizer: the base model's tokenizer.
        encoder: the encoder that computes the vectors.
        on_progress: function called with the number of prompts encoded so far.
    """
    vectors = []
    for begin in range(0, len(requests), _BATCH):
        batch = requests[begin : begin + _BATCH]
        vectors.append(encoder.encode([prompt_text(tokenizer, r.prompt_token_ids[-TEXT_TOKENS:]) for r in batch]))
        on_progress(begin + len(batch))
    return Samples(
        np.concatenate([encoder.encode([]), *vectors]),
        [len(request.prompt_token_ids) for request in requests],
        [request.output_tokens for request in requests],
        [request.adapter for request in requests],
    )


def train_from_logs(
    requests: Sequence[TrainingRequest],
    tokenizer_file: Path,
    threads: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> LengthModel:
    """Train a head on ``requests``.

    Args:
        requests: the requests, in the order in which they ended.
        tokenizer_file: the base model's ``tokenizer.json``.
        threads: number of torch's threads.
        on_progress: function called with the number of prompts encoded so far.

    Raises:
        TooFewRequests: there are not enough requests.
        SentenceModelError: the sentence model is missing.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    encoder = SentenceEncoder(threads)
    return train(samples_of(requests, tokenizer, encoder, on_progress), file_sha256(tokenizer_file))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
