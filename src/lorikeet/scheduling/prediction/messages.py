"""What the API process and the predictor process say to each other: msgpack, each message after its length."""

import struct
from collections.abc import Iterator

import msgspec

TEXT_TOKENS = 96
"""Tokens at the end of a prompt that are looked at: there stands what is asked for, and reading costs CPU time."""

LENGTH = struct.Struct("<I")


class PredictorSetup(msgspec.Struct, frozen=True):
    """To the process, first of all.

    Attributes:
        head: file of the learned head.
        tokenizer: the base model's ``tokenizer.json``.
    """

    head: str
    tokenizer: str


class PredictionRequest(msgspec.Struct, frozen=True, array_like=True):
    """To the process: predict.

    Attributes:
        number: of the question.
        token_ids: the last ones of the prompt, at most ``TEXT_TOKENS``.
        prompt_tokens: of the whole prompt.
        adapter: its name, None for the base model.
        until_s: on the monotonic clock of the machine; an answer after that is of no use.
    """

    number: int
    token_ids: list[int]
    prompt_tokens: int
    adapter: str | None
    until_s: float


class PredictorReady(msgspec.Struct, frozen=True, tag=True):
    """From the process: it can predict, and has used so much CPU time for its start."""

    cpu_s: float


class PredictionBatch(msgspec.Struct, frozen=True, tag=True):
    """From the process: what came of some questions.

    Attributes:
        taken: how many questions; those that were too late already have no prediction.
        predictions: (question, tokens).
        cpu_s: CPU time that the process has used since it began.
    """

    taken: int
    predictions: tuple[tuple[int, int], ...]
    cpu_s: float


FROM_PROCESS = msgspec.msgpack.Decoder(PredictorReady | PredictionBatch)


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Take all whole messages out of what was received so far; the beginning of another stays there."""
    while len(received) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        yield bytes(received[LENGTH.size : end])
        del received[:end]
