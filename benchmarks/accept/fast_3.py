"""fast.3: the base model's decode and prefill, against the machine's multiply rate and vLLM."""

import statistics
from typing import Any

import torch

from benchmarks.accept.inprocess import THREADS, default_kernels, kernels_as, make_requests, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.offline import (
    describe_limits,
    describe_versions,
    interval_words,
    run_offline_command,
    throughput_row,
)
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.step_profile import profile_words, step_profile
from benchmarks.accept.stopwatch import Stopwatch
from benchmarks.vllm_environment import vllm_python
from lorikeet.bench.ceilings import decode_limit_tok_s, model_cost
from lorikeet.bench.limits import LimitMeter, median_limits
from lorikeet.bench.statistics import median_interval
from lorikeet.models.config import read_model_config

DECODE, PREFILL, VLLM = 0.55, 0.65, 1.05
ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 160, 64
PAIRS = 9  # two runs of five fell on either side of the bound
OPTIONS = f"--requests 16 --prompt-tokens 512 --output-tokens 1 --adapters 0 --peer vllm --pairs {PAIRS}"


@line(
    "fast.3",
    title="Base model: decode at batch 32 around context 192; prefill of 16 × 512",
    bound=f"decode ≥ {DECODE:.0%} and prefill ≥ {PREFILL:.0%} of the GEMM limit, prefill ≥ {VLLM:g} × vLLM CPU",
)
def run(runs: StoredRuns) -> Result:
    """Decode by the times of its steps, prefill in turns with vLLM."""
    decode, prefill = runs.get("decode", _decode), runs.get("prefill", _prefill)
    profile = runs.get("profile", lambda: step_profile(16, 512, 1))
    share = statistics.median(decode["shares"])
    prefill_share = prefill["share_of_limit"]["output"]["share"]
    failures = [
        *([f"decode reaches {share:.1%} of the limit"] if share < DECODE else []),
        *([f"prefill reaches {prefill_share:.1%} of the limit"] if prefill_share < PREFILL else []),
        *([f"prefill is {prefill['ratio']:.2f} × vLLM"] if prefill["ratio"] < VLLM else []),
    ]
    row = throughput_row("prefill of 16 × 512, base", OPTIONS, prefill, speed="total")
    return Result(
        figure={
            "decode_tok_s": statistics.median(decode["tok_s"]),
            "decode_share_of_limit": share,
            "decode_share_interval": interval_words(median_interval(decode["shares"])),
            "prefill_tok_s": prefill["total_tok_s"],
            "prefill_share_of_limit": prefill_share,
            "prefill_share_interval": interval_words(prefill["share_of_limit"]["output"]["interval"]),
            "vllm_prefill_tok_s": prefill["peer_total_tok_s"],
            "vllm_ratio": prefill["ratio"],
        },
        interval=(prefill["ratio_interval"][0], prefill["ratio_interval"][1]),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"decode: {PAIRS} batches of {ROWS} × ({PROMPT_TOKENS} + {OUTPUT_TOKENS}), steps that decode all "
        f"{ROWS} sequences, {describe_limits(decode['limits'])}; prefill: `lorikeet bench offline {OPTIONS}`, "
        f"{describe_limits(prefill['limits'])}; {describe_versions(prefill['versions'])}; of 512 prompt tokens "
        f"{profile_words(profile)}; interval of the ratio to vLLM's prefill",
        details={
            "throughput": [
                {
                    "work": "decode at batch 32 around context 192, base",
                    "unit": "output tokens/s",
                    "command": "make accept LINE=fast.3",
                    "lorikeet": statistics.median(decode["tok_s"]),
                    "limit": statistics.median(decode["limit_tok_s"]),
                    "share": share,
                    "peers": {},
                    "limits": decode["limits"],
                    "versions": {},
                },
                row,
            ]
        },
    )


def _prefill() -> dict[str, Any]:
    vllm_python()
    return run_offline_command(OPTIONS)


def _decode() -> dict[str, Any]:
    model = default_model()
    torch.set_num_threads(THREADS)
    cost = model_cost(read_model_config(model), dtype_bytes=2)
    meter, watch = LimitMeter(rows=(ROWS,)), Stopwatch(default_kernels())
    limits, speeds, ceilings = [], [], []
    with kernels_as(watch), replica(model, "bfloat16", threads=THREADS, touch_memory=True) as built:
        for batch in range(PAIRS + 1):
            measured = meter.measure()
            watch.steps.clear()
            run_all(built, make_requests(f"{batch}", ROWS, PROMPT_TOKENS, OUTPUT_TOKENS, seed=batch))
            seconds = [seconds for seconds, _ in watch.decode_steps(ROWS)]
            if batch:  # the first one warms up
                limits.append(measured)
                speeds.append(ROWS * len(seconds) / sum(seconds))
                ceilings.append(decode_limit_tok_s(cost, measured, ROWS))
    middle = median_limits(limits)
    return {
        "tok_s": speeds,
        "limit_tok_s": ceilings,
        "shares": [speed / ceiling for speed, ceiling in zip(speeds, ceilings, strict=True)],
        "steps_per_batch": len(seconds),
        "limits": {
            "threads": middle.threads,
            "read_gb_s": middle.read_gb_s,
            "gemm_gflops": {str(rows): rate for rows, rate in middle.gemm_gflops.items()},
        },
    }
