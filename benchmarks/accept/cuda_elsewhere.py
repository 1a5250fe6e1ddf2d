"""cuda.3's parts that other lines and commands measure on the CPU, and here on a GPU."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.accept.gpu_rig import GpuRig
from benchmarks.accept.inprocess import DEVICE_VARIABLE
from benchmarks.accept.lines import find_line
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.offline import OfflineOptions, run_offline

LINES = ("serve.2", "serve.3", "serve.4", "serve.5", "serve.6", "memory.1", "memory.2", "memory.3")
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, ADAPTERS = 64, 256, 128, 8


def measure_lines(device: str) -> dict[str, Any]:
    """Run the lines with engines on the device; each keeps its parts below this line's.

    Returns:
        By line whether it is met, as ``passed``, and why not, as ``cause``.
    """
    with mock.patch.dict(os.environ, {DEVICE_VARIABLE: device}):
        results = {name: find_line(name).measure(StoredRuns(f"cuda.3/{name}")) for name in LINES}
    return {name: {"passed": result.passed, "cause": result.cause} for name, result in results.items()}


def measure_peft(rig: GpuRig, device: str) -> dict[str, Any]:
    """Give one batch to the engine and to transformers + PEFT in turns, both with the same random weights."""
    options = OfflineOptions(
        model=str(write_random_weights(rig.model, device)),
        requests=REQUESTS,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        adapters=ADAPTERS,
        peers=("peft",),
        device=device,
        threads=len(os.sched_getaffinity(0)),
    )
    report = run_offline(options)
    kept = ("output_tok_s", "peer_output_tok_s", "ratio", "ratio_interval", "first_tokens_equal", "ranks", "versions")
    return {key: report[key] for key in kept}


def write_random_weights(model: Path, device: str) -> Path:
    """Write random weights in bfloat16 beside a config, as transformers draws them, and return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    drawn.save_pretrained(model)
    return model
