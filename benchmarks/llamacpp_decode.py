"""Time llama.cpp's decode steps: ``python llamacpp_decode.py MODEL.gguf --threads N [--lora FOLDER]``.

The program runs in a separate environment (``benchmarks.environments``), for ``benchmarks.peers``. Each input line is
JSON: ``sequences``, ``prompt_tokens``, ``steps`` and ``adapter`` (whether the adapter is applied). The program answers
with a line of JSON with ``tokens_per_s`` of the steps after the prompts. Tokens are given, not sampled, as in
llama.cpp's benchmark. A step computes the logits of all sequences.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path

import llama_cpp
import numpy as np
from llamacpp_adapters import convert, heads_of

MOST_SEQUENCES = 32
MOST_TOKENS = 256
BATCH = 512


class Decoder:
    """Holds a model with room for ``MOST_SEQUENCES`` sequences of ``MOST_TOKENS`` tokens."""

    def __init__(self, file: str, threads: int, adapter: str | None) -> None:
        _request_tiles()
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = MOST_SEQUENCES * MOST_TOKENS
        parameters.n_seq_max = MOST_SEQUENCES
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._adapters = []
        if adapter:
            with tempfile.TemporaryDirectory() as scratch:
                converted = convert(Path(adapter), Path(scratch), heads_of(file))
                self._adapters.append(llama_cpp.llama_adapter_lora_init(self._model, str(converted).encode()))

    def tokens_per_s(self, sequences: int, prompt_tokens: int, steps: int, adapter: bool) -> float:
        """Return the rate of ``steps`` steps after the prompts."""
        count = 1 if adapter else 0
        chosen = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(*self._adapters[:count])
        llama_cpp.llama_set_adapters_lora(self._context, chosen, count, (ctypes.c_float * 1)(1.0))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        tokens = np.random.default_rng(0).integers(300, 10_000, (sequences, prompt_tokens + steps)).tolist()
        places = [(sequence, place) for sequence in range(sequences) for place in range(prompt_tokens)]
        for first in range(0, len(places), BATCH):
            self._decode(tokens, places[first : first + BATCH], prompt_tokens - 1)
        began_s = time.monotonic()
        for place in range(prompt_tokens, prompt_tokens + steps):
            self._decode(tokens, [(sequence, place) for sequence in range(sequences)], place)
        return sequences * steps / (time.monotonic() - began_s)

    def _decode(self, tokens: list[list[int]], places: list[tuple[int, int]], sampled: int) -> None:
        """Decode the given places of sequences, with logits of the place ``sampled``."""
        batch = self._batch
        batch.n_tokens = len(places)
        for i, (sequence, place) in enumerate(places):
            batch.token[i] = tokens[sequence][place]
            batch.pos[i] = place
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = place == sampled
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        llama_cpp.llama_synchronize(self._context)


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


def _request_tiles() -> None:
    """Request the processor's tile unit from Linux, if it has one.

    A build for this processor may use it without a request.
    """
    arch_prctl = 158
    request = 0x1023
    tile_data = 18
    ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)


def main() -> None:
    """Answer input lines until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lora")
    options = parser.parse_args()
    decoder = Decoder(options.model, options.threads, options.lora)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens_per_s": decoder.tokens_per_s(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
