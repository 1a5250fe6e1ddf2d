"""What ``--deterministic`` costs, and how near log probabilities are to those of transformers and PEFT.

``python -m benchmarks.deterministic [--parts attention,speed,agreement] [--rounds N] [--loads 8x512,1x64]
[--adapters pirate] [--dtype bfloat16]``. Attention: the least time of its kernel for decodes, alone. Speed: two engines
in this process, one deterministic, one not, answer the same requests in turns: tokens/s of prefills, and of decodes at
several contexts. Agreement: the differences of log probabilities of the tokens of texts, in bfloat16, between Lorikeet
and PEFT, beside those of PEFT with itself in a batch, and of each with PEFT in float32.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.harness import (
    ROOT,
    default_model,
    in_turns,
    make_requests,
    print_setup,
    print_table,
    ratios,
    replica,
    run_all,
    sample_adapters,
    with_interval,
)
from lorikeet.adapters.store import reference
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica
from lorikeet.engine.driver import wait_for_work
from lorikeet.kernels.interface import Batch
from lorikeet.kernels.native import NativeKernels, best_library
from lorikeet.models.config import read_model_config

PARTS = ("attention", "speed", "agreement")
LOADS = "1x64,1x1024,8x64,8x512,32x128"
"""Sequences, and tokens of each prompt."""
DECODES = ((1, 128), (1, 1024), (1, 8192), (8, 128), (8, 1024), (32, 1024))
"""Sequences that decode, and tokens of each context."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 9, 3, 64, 16
"""Those of the default model."""
CALLS = 40
TOKENS = 32
TEXTS = 4
TEXT_TOKENS = 96


class Speed(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: float


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loads", default=LOADS, help="sequences x tokens of a prompt, of the part speed")
    parser.add_argument("--adapters", default="pirate", help="some of the sample adapters, of the part agreement")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    print_setup()
    parts = options.parts.split(",")
    if "attention" in parts:
        _attention()
    if "speed" in parts:
        loads = [tuple(map(int, load.split("x"))) for load in options.loads.split(",")]
        _speed(options.rounds, options.dtype, loads)
    if "agreement" in parts:
        _agreement(options.adapters.split(","))


# --- attention ----------------------------------------------------------------------------------------


def _attention() -> None:
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        kernels = [NativeKernels(*best_library(), one_order=one_order) for one_order in (False, True)]
        for sequences, context in DECODES:
            plain_s, one_order_s = _least_times(kernels, dtype, sequences, context)
            name = f"{str(dtype).removeprefix('torch.')}, {sequences} x {context}"
            rows.append([name, f"{plain_s * 1e6:.0f}", f"{one_order_s * 1e6:.0f}", f"{one_order_s / plain_s:.2f}"])
    headings = ["sequences x context", "µs a layer", "one order", "ratio"]
    print_table(f"Attention of decodes, least of {CALLS} calls, {kernels[0].threads} threads", headings, rows)


def _least_times(kernels: Sequence[NativeKernels], dtype: torch.dtype, sequences: int, context: int) -> list[float]:
    blocks = context // BLOCK_TOKENS
    tables = torch.randperm(sequences * blocks).view(sequences, blocks)
    none = torch.zeros(0, dtype=torch.int64)
    starts = torch.arange(sequences + 1)
    batch = Batch(none, none, none, none, starts, torch.full((sequences,), context), tables, none)
    kv = torch.randn(sequences * blocks, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM).to(dtype)
    qkv = torch.randn(sequences, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    least = [math.inf] * len(kernels)
    for _ in range(CALLS):
        for at, each in enumerate(kernels):
            began_s = time.perf_counter()
            each.attention(qkv, kv, batch, HEAD_DIM**-0.5, None)
            least[at] = min(least[at], time.perf_counter() - began_s)
    return least


# --- speed ---------------------------------------------------------------------------------------------


def _speed(rounds: int, dtype: str, loads: Sequence[Sequence[int]]) -> None:
    model = default_model()
    geometry = read_model_config(model).geometry(2 if dtype == "bfloat16" else 4)
    refs = [reference(name, folder, geometry) for name, folder in sample_adapters().items()]
    rows = []
    small: dict[str, Any] = {"memory_bytes": 2**30, "host_memory_bytes": 0}
    with replica(model, dtype, **small) as plain, replica(model, dtype, deterministic=True, **small) as one_order:
        for sequences, context in loads:

            def run(built: Replica, turn: int, sequences: int = sequences, context: int = context) -> Speed:
                requests = make_requests(f"{turn}", sequences, context, TOKENS, refs, seed=turn)
                return timed(built, requests)

            found = in_turns(
                {"plain": lambda turn: run(plain, turn), "one order": lambda turn: run(one_order, turn)}, rounds
            )
            row = [f"{sequences} x {context}"]
            for name in Speed._fields:
                sides = [[getattr(each, name) for each in found[side]] for side in ("plain", "one order")]
                row += [f"{statistics.median(side):.0f}" for side in sides]
                row.append(with_interval(ratios(sides[1], sides[0]), ".2f"))
            rows.append(row)
            print(f"  {sequences} x {context} measured", flush=True)
    headings = ["sequences x context", "prefill", "one order", "ratio", "decode", "one order", "ratio"]
    print_table(f"Tokens/s, {dtype}, adapters in turns, {TOKENS} tokens each", headings, rows)


def timed(built: Replica, requests: Sequence[Request]) -> Speed:
    """Answer requests and return the tokens per second until each has a token, and from then on."""
    engine = built.engine
    for each in requests:
        engine.submit(each)
    tokens = {each.request_id: 0 for each in requests}
    began_s = time.monotonic()
    first_s = first_tokens = 0.0
    while engine.has_requests:
        for output in engine.step().tokens:
            tokens[output.request_id] += len(output.tokens)
        if not first_s and all(tokens.values()):
            first_s = time.monotonic()
            first_tokens = sum(tokens.values())
        if not engine.is_busy and engine.has_requests:
            wait_for_work(engine, MonotonicClock(), math.inf)
    prompts = sum(len(each.prompt_token_ids) for each in requests)
    rest = sum(tokens.values()) - first_tokens
    return Speed(prompts / (first_s - began_s), rest / (time.monotonic() - first_s))


# --- agreement -------------------------------------------------------------------------------------------


def _agreement(names: Sequence[str]) -> None:
    rows = []
    for name in names:
        folder = sample_adapters()[name]
        texts = _texts()
        exact = _by_peft(folder, texts, torch.float32, TEXTS)
        alone = _by_peft(folder, texts, torch.bfloat16, 1)
        together = _by_peft(folder, texts, torch.bfloat16, TEXTS)
        own = _by_lorikeet(folder, texts, "bfloat16")
        wide = _by_lorikeet(folder, texts, "float32")
        pairs = {
            "Lorikeet, PEFT": (own, alone),
            "PEFT alone, in a batch": (alone, together),
            "Lorikeet, PEFT in float32": (own, exact),
            "PEFT, PEFT in float32": (alone, exact),
            "both in float32": (wide, exact),
            "Lorikeet in float32, PEFT in float64": (wide, _by_peft(folder, texts, torch.float64, TEXTS)),
            "PEFT in float32, in float64": (exact, _by_peft(folder, texts, torch.float64, TEXTS)),
        }
        for title, (one, other) in pairs.items():
            difference = np.abs(np.array(one) - np.array(other)).ravel()
            quantiles = [f"{np.quantile(difference, at):.2g}" for at in (0.5, 0.9, 0.99, 1.0)]
            rows.append([f"{name}: {title}", f"{(difference == 0).mean():.0%}", *quantiles])
    headings = ["differences of log probabilities", "none", "median", "90 %", "99 %", "largest"]
    print_table(f"{TEXTS} texts of {TEXT_TOKENS} tokens, bfloat16 where nothing else is named", headings, rows)


def _texts() -> list[list[int]]:
    """Return the beginnings of pages of the docs."""
    tokenizer = Tokenizer.from_file(str(default_model() / "tokenizer.json"))
    pages = [file.read_text() for file in sorted((ROOT / "docs" / "decisions").glob("*.md"))[:TEXTS]]
    return [tokenizer.encode(page).ids[:TEXT_TOKENS] for page in pages]


def _by_lorikeet(folder: Path, texts: list[list[int]], dtype: str) -> list[list[float]]:
    model = default_model()
    geometry = read_model_config(model).geometry(2 if dtype == "bfloat16" else 4)
    ref = reference(folder.name, folder, geometry)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found: dict[str, dict[int, float]] = {f"{at}": {} for at in range(len(texts))}
    with replica(model, dtype, deterministic=True, memory_bytes=2**29, host_memory_bytes=0) as built:
        step = built.engine.step

        def noted() -> object:
            outputs = step()
            for each in outputs.prompt_logprobs:
                for at, token in enumerate(each.tokens, each.position):
                    found[each.request_id][at] = token.logprob
            return outputs

        built.engine.step = noted  # type: ignore[method-assign,assignment]
        run_all(built, [Request(RequestId(f"{at}"), text, sampling, 0.0, ref) for at, text in enumerate(texts)])
    return [[scores[at] for at in range(1, TEXT_TOKENS)] for scores in found.values()]


@torch.inference_mode()
def _by_peft(folder: Path, texts: list[list[int]], dtype: torch.dtype, batch: int) -> list[list[float]]:
    base = AutoModelForCausalLM.from_pretrained(default_model(), dtype=dtype)
    model = PeftModel.from_pretrained(base, folder).to(dtype).eval()
    scores: list[list[float]] = []
    for first in range(0, len(texts), batch):
        ids = torch.tensor(texts[first : first + batch])
        logits = model(ids).logits[:, :-1]
        logprobs = (logits.float() if dtype == torch.bfloat16 else logits).log_softmax(-1)
        scores += logprobs.gather(2, ids[:, 1:, None])[..., 0].tolist()
    return scores


if __name__ == "__main__":
    main()
