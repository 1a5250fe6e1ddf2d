"""Defines the messages between the API process and the predictor process: msgpack with a length prefix."""

import struct
from collections.abc import Iterator

import msgspec

TEXT_TOKENS = 96
"""Number of tokens at the end of a prompt that are encoded.

The question is usually at the end, and encoding more tokens costs CPU time.
"""

LENGTH = struct.Struct("<I")


class PredictorSetup(msgspec.Struct, frozen=True):
    """Configures the predictor process; the first message to it.

    Attributes:
        model_file: file of the length model.
        tokenizer: the base model's ``tokenizer.json``.
    """

    model_file: str
    tokenizer: str


class PredictionRequest(msgspec.Struct, frozen=True, array_like=True):
    """Requests a prediction from the predictor process.

    Attributes:
        number: id of the prediction request.
        token_ids: the last tokens of the prompt, at most ``TEXT_TOKENS``.
        prompt_tokens: length of the whole prompt.
        adapter: name of the adapter, None for the base model.
        until_s: deadline on the machine's monotonic clock. A later prediction is not used.
    """

    number: int
    token_ids: list[int]
    prompt_tokens: int
    adapter: str | None
    until_s: float


class PredictorReady(msgspec.Struct, frozen=True, tag=True):
    """Reports that the predictor process is ready; ``cpu_s`` is the CPU time of its start."""

    cpu_s: float


class PredictionBatch(msgspec.Struct, frozen=True, tag=True):
    """Returns predictions from the predictor process.

    Attributes:
        taken: number of processed requests. Requests past their deadline have no prediction.
        predictions: (id of the prediction request, tokens).
        cpu_s: CPU time of the process since its start.
    """

    taken: int
    predictions: tuple[tuple[int, int], ...]
    cpu_s: float


FROM_PROCESS = msgspec.msgpack.Decoder(PredictorReady | PredictionBatch)


def frame(message: msgspec.Struct) -> bytes:
    """Return the encoded message with its length prefix."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Remove and yield all complete messages in ``received``. An incomplete message stays in the buffer."""
    while len(received) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        yield bytes(received[LENGTH.size : end])
        del received[:end]
