"""The body of the predictor process: learned predictions of answer lengths, in batches, on one thread.

It is a process of its own so that torch and its arithmetic stay out of the API process, and has a low priority so that
steps come first. Started as ``python -m lorikeet.engine.length_predictor_process``. Over its standard input come a
``PredictorSetup`` and then questions, over its standard output go the answers; it ends when its input does, which is
when whoever started it has ended, however that was.
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
from lorikeet.models.sentences import SentenceEncoder
from lorikeet.scheduling.prediction.learned import LengthModel
from lorikeet.scheduling.prediction.messages import (
    PredictionBatch,
    PredictionRequest,
    PredictorReady,
    PredictorSetup,
    frame,
    take_frames,
)

_MOST_AT_ONCE = 8
"""In one batch: more would keep all of them waiting for long."""

_READ_BYTES = 2**16


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text that predictions are made from: of the last tokens of a prompt, without special ones."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


class BatchPredictor:
    """Answers questions.

    Args:
        setup: what to predict with.

    Raises:
        LengthModelError: the head cannot be read.
        SentenceModelError: the sentence model cannot.
    """

    def __init__(self, setup: PredictorSetup) -> None:
        self._head = LengthModel.read(Path(setup.model_file))
        self._tokenizer = Tokenizer.from_file(setup.tokenizer)
        self._encoder = SentenceEncoder(threads=1)
        self._encoder.encode(["warm"])

    def answer(self, asks: Sequence[PredictionRequest]) -> PredictionBatch:
        """Return the predictions for all questions that are not too late already."""
        now = time.monotonic()
        timely = [ask for ask in asks if ask.until_s > now]
        vectors = self._encoder.encode([prompt_text(self._tokenizer, ask.token_ids) for ask in timely])
        tokens = self._head.predict(vectors, [ask.prompt_tokens for ask in timely], [ask.adapter for ask in timely])
        predictions = tuple((ask.number, count) for ask, count in zip(timely, tokens, strict=True))
        return PredictionBatch(len(asks), predictions, time.process_time())


def main() -> None:
    """Answer until the input ends."""
    # Whoever started this process decides when it ends; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the answers
    received = bytearray()
    waiting: list[bytes] = []
    while not waiting:
        waiting = _receive(received)
    answerer = BatchPredictor(msgspec.msgpack.decode(waiting.pop(0), type=PredictorSetup))
    _send(output, frame(PredictorReady(time.process_time())))
    decoder = msgspec.msgpack.Decoder(PredictionRequest)
    while True:
        asks = [decoder.decode(content) for content in waiting[:_MOST_AT_ONCE]]
        del waiting[:_MOST_AT_ONCE]
        if asks:
            _send(output, frame(answerer.answer(asks)))
        else:
            waiting = _receive(received)


def _receive(received: bytearray) -> list[bytes]:
    """Wait for input and return the whole messages in it; end the process if it has ended."""
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
