"""fast.4: what adapters cost, as time added to a decode step and as throughput."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.accept.inprocess import THREADS, make_requests, replica, run_all
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.offline import describe_limits, interval_words
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.twins import twins
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import spread_ranks, write_random_adapter
from lorikeet.bench.ceilings import adapters_limit_s, model_cost
from lorikeet.bench.limits import LimitMeter, MachineLimits, median_limits
from lorikeet.bench.statistics import median_interval
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.core.adapter import AdapterRef
from lorikeet.engine.build import Replica
from lorikeet.models.config import read_model_config

ROUNDS = 5
ADAPTERS = 100
TIMES_LIMIT, SINGLE_EXTRA_S, OVERHEAD = 1.4, 0.001, 0.08
KERNEL_POINTS = ((1, 1), (1, 32), (8, 8), (32, 32), (100, 100))
"""Distinct adapters and rows of the decode steps whose time is taken with adapters and without."""
KERNEL_TOKENS = (16, 17)
"""Prompt and output tokens: 16 pairs of decode steps a round."""
THROUGHPUT_POINTS = ((1, 32, 128, 64), (8, 32, 128, 64), (32, 32, 128, 64), (100, 100, 32, 24))
"""Distinct adapters, requests, prompt and output tokens."""

# KV is dropped after use, so that nothing but adapters fills the memory and all of them stay.
_ENGINE: dict[str, Any] = {
    "row": "lorikeet:plain-no-reuse",
    "max_running": 100,
    "memory_bytes": 3 * 2**30,
    "threads": THREADS,
}


@line(
    "fast.4",
    title="What adapters cost: time in LoRA, and throughput beside the base model's",
    bound=f"time in LoRA ≤ {TIMES_LIMIT:g} × max(bytes ÷ bandwidth, FLOPs ÷ GEMM rate) at 8, 32 and 100 distinct "
    f"adapters, one row each, at one adapter that + {SINGLE_EXTRA_S * 1e3:g} ms; 8 adapters cost ≤ {OVERHEAD:.0%} "
    "of the base's throughput",
)
def run(runs: StoredRuns) -> Result:
    """Both parts in one engine that holds all adapters."""
    found = runs.get("overhead", _measure)
    points = [_kernel_figures(point) for point in found["kernel"]]
    losses = {point["adapters"]: 1 - statistics.median(point["ratios"]) for point in found["throughput"]}
    failures = [
        f"{p['adapters']} adapters on {p['rows']} rows take {p['lora_ms']:.2f} ms, {p['times_limit']:.2f} × the limit"
        for p in points
        if not p["met"]
    ]
    if losses[8] > OVERHEAD:
        failures.append(f"8 adapters cost {losses[8]:.1%} of throughput")
    ratios = next(point["ratios"] for point in found["throughput"] if point["adapters"] == 8)
    low, high = median_interval([1 - ratio for ratio in ratios])
    return Result(
        figure={
            "time_in_lora": {
                f"{p['adapters']} on {p['rows']} rows": f"{p['lora_ms']:.2f} ms = {p['times_limit']:.2f} × "
                f"({p['interval']})"
                for p in points
            },
            "throughput_lost": {f"{adapters} adapters": f"{loss:.1%}" for adapters, loss in losses.items()},
        },
        interval=(low, high),
        passed=not failures,
        cause="; ".join(failures),
        notes="time in LoRA is what a decode step takes longer than the same step of the base model right before or "
        f"after it, median of {KERNEL_TOKENS[1] - 1} pairs a round, and of {ROUNDS} rounds in turns; one adapter has "
        f"rank {found['single_rank']}, the others ranks from 8 to "
        f"128 on q, k, v, o; {describe_limits(found['limits'])}; "
        "throughput in pairs with the base: "
        + ", ".join(f"{a} adapters {r} × ({p} + {o})" for a, r, p, o in THROUGHPUT_POINTS)
        + "; interval of the loss at 8 adapters",
        details={"lora": points, "overhead": _overhead_rows(found["throughput"])},
    )


def _kernel_figures(point: dict[str, Any]) -> dict[str, Any]:
    adapters, rows, lora_s, limit_s = (point[key] for key in ("adapters", "rows", "lora_s", "limit_s"))
    times = [measured / limit for measured, limit in zip(lora_s, limit_s, strict=True)]
    extra_s = SINGLE_EXTRA_S if adapters == 1 else 0.0
    beyond_s = [m - TIMES_LIMIT * limit - extra_s for m, limit in zip(lora_s, limit_s, strict=True)]
    return {
        "adapters": adapters,
        "rows": rows,
        "lora_ms": statistics.median(lora_s) * 1e3,
        "limit_ms": statistics.median(limit_s) * 1e3,
        "step_ms": statistics.median(point["step_s"]) * 1e3,
        "times_limit": statistics.median(times),
        "interval": interval_words(median_interval(times)),
        "met": statistics.median(beyond_s) <= 0,
    }


def _overhead_rows(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for point in points:
        losses = [1 - ratio for ratio in point["ratios"]]
        rows.append(
            {
                "adapters": point["adapters"],
                "work": point["work"],
                "base_tok_s": statistics.median(point["base_tok_s"]),
                "tok_s": statistics.median(point["tok_s"]),
                "lost": statistics.median(losses),
                "interval": list(median_interval(losses)),
            }
        )
    return rows


def _measure() -> dict[str, Any]:
    model = default_model()
    config = read_model_config(model)
    torch.set_num_threads(THREADS)
    ranks = spread_ranks(ADAPTERS)
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-fast4-") as scratch,
        replica(model, "bfloat16", **_ENGINE) as built,
    ):
        geometry = built.sizes.geometry
        folders = [write_random_adapter(Path(scratch) / f"a{i}", geometry, r, seed=i) for i, r in enumerate(ranks)]
        refs = [reference(folder.name, folder, geometry) for folder in folders]
        run_all(built, make_requests("load", ADAPTERS, 4, 1, refs))
        meter = LimitMeter(rows=sorted({rows for _, rows in KERNEL_POINTS}))
        limits: list[MachineLimits] = []
        after = meter.measure()
        kernel: dict[tuple[int, int], dict[str, list[float]]] = {}
        for turn in range(ROUNDS + 1):
            for adapters, rows in KERNEL_POINTS:
                chosen = _spread(ranks, adapters)
                cost = model_cost(config, 2, [ranks[i] for i in chosen], ATTENTION)
                before = after
                lora_s, step_s = _lora_s(built, f"k{turn}-{adapters}-{rows}", [refs[i] for i in chosen], rows)
                after = meter.measure()
                measured = median_limits([before, after])
                if turn:  # the first round warms up
                    limits.append(measured)
                    point = kernel.setdefault((adapters, rows), {"lora_s": [], "limit_s": [], "step_s": []})
                    point["lora_s"].append(lora_s)
                    point["step_s"].append(step_s)
                    point["limit_s"].append(adapters_limit_s(cost, measured, rows))
        throughput = _throughput(built, ranks, refs)
        resident = len(built.engine.stats().resident_adapters)
        if resident != ADAPTERS:
            raise RuntimeError(f"{resident} of {ADAPTERS} adapters stayed in memory")
    middle = median_limits(limits)
    return {
        "kernel": [{"adapters": a, "rows": r, **point} for (a, r), point in kernel.items()],
        "throughput": throughput,
        "single_rank": ranks[_spread(ranks, 1)[0]],
        "limits": {
            "threads": middle.threads,
            "read_gb_s": middle.read_gb_s,
            "gemm_gflops": {str(rows): rate for rows, rate in middle.gemm_gflops.items()},
        },
    }


def _spread(ranks: Sequence[int], count: int) -> list[int]:
    """Return ``count`` indices whose ranks are spread as all are; one alone has rank 32."""
    if count == 1:
        return [ranks.index(32)]
    return [round(i * (len(ranks) - 1) / (count - 1)) for i in range(count)]


def _lora_s(built: Replica, name: str, refs: Sequence[AdapterRef], rows: int) -> tuple[float, float]:
    """Return the median time that adapters add to a decode step of ``rows`` sequences, and that of the whole step."""
    with twins(built) as executor:
        run_all(built, make_requests(name, rows, *KERNEL_TOKENS, refs))
    pairs = executor.decodes
    added_s = statistics.median(pair.adapters_s - pair.base_s for pair in pairs)
    return added_s, statistics.median(pair.adapters_s for pair in pairs)


def _throughput(built: Replica, ranks: Sequence[int], refs: Sequence[AdapterRef]) -> list[dict[str, Any]]:
    """Run base and adapters in turns, and return the ratio of their output rates for each pair."""
    points = []
    for adapters, requests, prompt_tokens, output_tokens in THROUGHPUT_POINTS:
        sides = {"base": [], "adapters": [refs[i] for i in _spread(ranks, adapters)]}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for pair in range(ROUNDS + 1):
            for side in sorted(sides, reverse=bool(pair % 2)):
                asked = make_requests(
                    f"t{adapters}-{pair}-{side}", requests, prompt_tokens, output_tokens, sides[side], seed=pair
                )
                rate = requests * output_tokens / _seconds(built, asked)
                if pair:
                    rates[side].append(rate)
        points.append(
            {
                "adapters": adapters,
                "work": f"{requests} × ({prompt_tokens} + {output_tokens})",
                "base_tok_s": rates["base"],
                "tok_s": rates["adapters"],
                "ratios": [with_ / base for with_, base in zip(rates["adapters"], rates["base"], strict=True)],
            }
        )
    return points


def _seconds(built: Replica, asked: list[Any]) -> float:
    start_s = time.monotonic()
    run_all(built, asked)
    return time.monotonic() - start_s
