"""The length predictor process, which predicts answer lengths with a learned model, in batches on one thread.

The predictor is a separate process, so that the API process need not load torch. It has a low priority, so that steps
come first. Started as ``python -m lorikeet.engine.length_predictor_process``. The process reads a ``PredictorSetup``
and then ``PredictionRequest`` messages from standard input, and writes ``PredictionBatch`` messages to standard output.
It ends when its input is closed, which also happens when the API process is killed.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from lorikeet.core.process_tuning import NICE
from lorikeet.engine.sentence_encoder import SentenceEncoder
from lorikeet.scheduling.prediction.learned import LengthModel
from lorikeet.scheduling.prediction.messages import (
    PredictionBatch,
    PredictionRequest,
    PredictorReady,
    PredictorSetup,
    frame,
    take_frames,
)

_MAX_BATCH = 8
"""Requests in one batch. A larger batch would delay all of its predictions."""

_READ_BYTES = 2**16


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decode the last tokens of a prompt, without special tokens, to the text for the prediction."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


class BatchPredictor:
    """Predicts the lengths of the answers to a batch of prompts.

    Args:
        setup: the setup, with the files of the head and the tokenizer.

    Raises:
        LengthModelError: the head cannot be read.
        SentenceModelError: the sentence model cannot be read.
    """

    def __init__(self, setup: PredictorSetup) -> None:
        self._head = LengthModel.read(Path(setup.model_file))
        self._tokenizer = Tokenizer.from_file(setup.tokenizer)
        self._encoder = SentenceEncoder(threads=1)
        self._encoder.encode(["warm"])

    def answer(self, requests: Sequence[PredictionRequest]) -> PredictionBatch:
        """Return predictions for all requests whose deadline has not passed."""
        now = time.monotonic()
        timely = [each for each in requests if each.until_s > now]
        vectors = self._encoder.encode([prompt_text(self._tokenizer, each.token_ids) for each in timely])
        tokens = self._head.predict(vectors, [each.prompt_tokens for each in timely], [each.adapter for each in timely])
        predictions = tuple((each.number, count) for each, count in zip(timely, tokens, strict=True))
        return PredictionBatch(len(requests), predictions, time.process_time())


def main() -> None:
    """Read requests and write predictions until the input ends."""
    # The API process decides when this process ends; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Output that a library prints must not mix with messages.
    received = bytearray()
    waiting: list[bytes] = []
    while not waiting:
        waiting = _receive(received)
    predictor = BatchPredictor(msgspec.msgpack.decode(waiting.pop(0), type=PredictorSetup))
    _send(output, frame(PredictorReady(time.process_time())))
    decoder = msgspec.msgpack.Decoder(PredictionRequest)
    while True:
        requests = [decoder.decode(content) for content in waiting[:_MAX_BATCH]]
        del waiting[:_MAX_BATCH]
        if requests:
            _send(output, frame(predictor.answer(requests)))
        else:
            waiting = _receive(received)


def _receive(received: bytearray) -> list[bytes]:
    """Wait for input, and return its complete messages. At the end of the input, end the process."""
    content = os.read(sys.stdin.fileno(), _READ_BYTES)
    if not content:
        sys.exit(0)
    received += content
    return list(take_frames(received))


def _send(output: int, content: bytes) -> None:
    while content:
        try:
            content = content[os.write(output, content) :]
        except BrokenPipeError:
            sys.exit(0)


if __name__ == "__main__":
    main()
