"""What ``--deterministic`` costs, and how near log probabilities are to those of transformers and PEFT.

``python -m benchmarks.deterministic [--parts speed,agreement] [--rounds N] [--dtype bfloat16]``. Speed: two engines in
this process, one deterministic, one not, answer the same requests in turns: tokens/s of prefills, and of decodes at
several contexts. Agreement: the differences of the log probability of each token of texts, in bfloat16, between
Lorikeet and PEFT, beside those of PEFT with itself in a batch, and of each with PEFT in float32.
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
from transformers import AutoModelForCausalLM

from benchmarks.harness import (
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
from lorikeet.models.config import read_model_config

PARTS = ("speed", "agreement")
LOADS = ((1, 64), (1, 1024), (8, 64), (8, 512), (32, 128))
"""Sequences, and tokens of each prompt."""
TOKENS = 32
TEXTS = 8
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
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    print_setup()
    parts = options.parts.split(",")
    if "speed" in parts:
        _speed(options.rounds, options.dtype)
    if "agreement" in parts:
        _agreement()


# --- speed ---------------------------------------------------------------------------------------------


def _speed(rounds: int, dtype: str) -> None:
    model = default_model()
    geometry = read_model_config(model).geometry(2 if dtype == "bfloat16" else 4)
    refs = [reference(name, folder, geometry) for name, folder in sample_adapters().items()]
    rows = []
    small: dict[str, Any] = {"memory_bytes": 2**30, "host_memory_bytes": 0}
    with replica(model, dtype, **small) as plain, replica(model, dtype, deterministic=True, **small) as one_order:
        for sequences, context in LOADS:

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


def _agreement() -> None:
    rows = []
    for name, folder in sample_adapters().items():
        texts = np.random.default_rng(0).integers(300, 10_000, (TEXTS, TEXT_TOKENS)).tolist()
        exact = _by_peft(folder, texts, torch.float32, TEXTS)
        alone = _by_peft(folder, texts, torch.bfloat16, 1)
        together = _by_peft(folder, texts, torch.bfloat16, TEXTS)
        pairs = {
            "Lorikeet, PEFT": (_by_lorikeet(folder, texts, "bfloat16"), alone),
            "PEFT alone, in a batch": (alone, together),
            "Lorikeet, PEFT in float32": (_by_lorikeet(folder, texts, "bfloat16"), exact),
            "PEFT, PEFT in float32": (alone, exact),
            "both in float32": (_by_lorikeet(folder, texts, "float32"), exact),
        }
        for title, (one, other) in pairs.items():
            difference = np.abs(np.array(one) - np.array(other)).ravel()
            quantiles = [f"{np.quantile(difference, at):.2g}" for at in (0.5, 0.9, 0.99, 1.0)]
            rows.append([f"{name}: {title}", f"{(difference == 0).mean():.0%}", *quantiles])
    headings = ["differences of log probabilities", "none", "median", "90 %", "99 %", "largest"]
    print_table(f"{TEXTS} texts of {TEXT_TOKENS} tokens, bfloat16 where nothing else is named", headings, rows)


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
        logprobs = model(ids).logits[:, :-1].float().log_softmax(-1)
        scores += logprobs.gather(2, ids[:, 1:, None])[..., 0].tolist()
    return scores


if __name__ == "__main__":
    main()
