"""cuda.3: what the engine does on a GPU, with the shape of Llama-2-7B and dummy weights."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.accept.cuda_elsewhere import LINES, measure_lines, measure_peft
from benchmarks.accept.cuda_rows import measure_rows, rows_figure
from benchmarks.accept.gpu_rig import SHAPE, GpuRig, gpu_limits, gpu_rig, why_no_gpu
from benchmarks.accept.inprocess import make_requests, run_all
from benchmarks.accept.lines import NOT_RUN, Result, line
from benchmarks.accept.memory_8 import RANK, measure_loads
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.twins import Pair, twins
from lorikeet.bench.adapters import spread_ranks
from lorikeet.bench.ceilings import model_cost
from lorikeet.bench.memory_bench import fill_host, settle
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.core.request import Request
from lorikeet.engine.build import Replica
from lorikeet.engine.driver import rest
from lorikeet.engine.executor import Executor

ADAPTERS, PREFILL_TOKENS, PREFILL_SEQUENCES = 100, 8192, 4
DECODES = ((1, 1024), (32, 1024), (128, 256))
"""Rows and tokens of their prompts."""
STEPS = 64
LORA_ROWS = (8, 100)
"""Rows, each with an adapter of its own."""
OVERHEAD_DISTINCT, OVERHEAD_ROWS, OVERHEAD_CONTEXT = 8, 32, 1024
DECODE_SHARE, PREFILL_SHARE, LORA_TIMES, OVERHEAD, PREFILL_OVERHEAD = 0.75, 0.65, 1.4, 0.08, 0.12
LOAD_SHARE, LOAD_COST = 0.8, 1.03
LOAD_PAIRS, LOADS = 5, 5
"""Rounds with loads, each followed by one without; loads in each, so few that the decodes outlast them."""
COLD_RANKS, COLD_TOKENS, COLD_REPEATS = (32, 64, 128), (64, 128, 256, 512), 5
CACHED, ON_DEMAND, ASSIST, AUTO, WAIT = "cached", "toppings:on-demand", "toppings", "toppings:auto", "toppings:strawman"
COLD_ROWS = (CACHED, ON_DEMAND, ASSIST, AUTO, WAIT)
LOAD_ERROR, ASSISTED_SHARE, AUTO_TIMES = 0.2, 0.6, 1.05
_ADAPTERS_BYTES, _COLD_BYTES = 14 * 2**30, 12 * 2**30
PEFT_TIMES = 10
_ENGINE: dict[str, Any] = {
    "row": "lorikeet:plain-no-reuse",
    "max_running": 128,
    "max_step_tokens": PREFILL_TOKENS,
    "host_memory_bytes": _ADAPTERS_BYTES,
}


@line(
    "cuda.3",
    title="Decode, prefill, adapters, loads and cold starts on a GPU, with the shape of Llama-2-7B",
    bound=f"decode ≥ {DECODE_SHARE:.0%} of the bandwidth limit at {', '.join(str(rows) for rows, _ in DECODES)} rows, "
    f"prefill of {PREFILL_TOKENS:,} tokens ≥ {PREFILL_SHARE:.0%} of the GEMM limit; LoRA ≤ {LORA_TIMES:g} × adapter "
    f"bytes ÷ bandwidth at {' and '.join(map(str, LORA_ROWS))} adapters, {OVERHEAD_DISTINCT} cost ≤ {OVERHEAD:.0%} of "
    f"a decode step and ≤ {PREFILL_OVERHEAD:.0%} of a prefill; a load ≥ {LOAD_SHARE:.0%} of the link's bandwidth, one "
    f"a second costs ≤ {LOAD_COST - 1:.0%} of TPOT; cold starts cost what the load takes ± {LOAD_ERROR:.0%}, assisted "
    f"ones ≤ {ASSISTED_SHARE:g} × that; {', '.join(LINES)} met there; ≥ {PEFT_TIMES} × PEFT's output tokens/s; the "
    "rows of memory.4, admission.3 and modes.3 beside what is printed",
)
def run(runs: StoredRuns) -> Result:
    """Measure part by part where there is a GPU; elsewhere judge what this code has measured on one."""
    reason = why_no_gpu()
    elsewhere = runs.of_any_machine()
    with gpu_rig() as rig:
        measures: dict[str, Callable[[], dict[str, Any]]] = {"limits": gpu_limits}
        measures |= {name: partial(part.measure, rig, runs) for name, part in PARTS.items()}
        kept = {name: elsewhere.stored(name) if reason else runs.get(name, each) for name, each in measures.items()}
    found = {name: part for name, part in kept.items() if part is not None}
    limits = found.pop("limits", None)
    if limits is None:
        return Result(figure=NOT_RUN, passed=False, cause=str(reason))
    judged = [PARTS[name].judge(part, limits) for name, part in found.items()]
    figure = {name: words for each in judged for name, words in each.figure.items()}
    failures = [failure for each in judged for failure in each.failures]
    if missing := PARTS.keys() - found.keys():
        failures.append(f"not measured: {', '.join(sorted(missing))} ({reason})")
    return Result(
        figure=figure,
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{limits['device']}, driver {limits['driver']}, {limits['software']}; {SHAPE} with dummy weights, "
        f"bfloat16, {ADAPTERS} adapters of ranks 8 to 128 on q, k, v, o; copies "
        f"{limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s read and written, products "
        f"{limits['gemm_flops'] / 1e12:,.0f} TFLOP/s, link {limits['link_bytes_per_s'] / 1e9:.1f} GB/s; a decode step "
        "reads weights, its adapters and its KV; a prefill's attention is free in its limit; what adapters add is a "
        "step less the same step of the base model right before or after it",
        details={"limits": limits, **found},
    )


class Judged(NamedTuple):
    """A part in words, and what it misses."""

    figure: dict[str, str]
    failures: list[str]


class Part(NamedTuple):
    """Of the line.

    Attributes:
        measure: returns plain data; it may keep parts of its own.
        judge: sees that beside :class:`~benchmarks.accept.gpu_rig.GpuLimits`.
    """

    measure: Callable[[GpuRig, StoredRuns], dict[str, Any]]
    judge: Callable[[dict[str, Any], dict[str, Any]], Judged]


class Noted:
    """Runs plans, and keeps them with what came of them."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.ran: list[tuple[StepPlan, StepResult]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run it."""
        result = self._inner.execute(plan)
        self.ran.append((plan, result))
        return result

    def decode_s(self, rows: int) -> list[float]:
        """Return the seconds of a step, of each plan in which so many sequences decode and nothing else happens."""
        return [
            result.duration_s / result.steps_run
            for plan, result in self.ran
            if len(plan.sequences) == rows and all(step.tokens == 1 and step.start > 0 for step in plan.sequences)
        ]

    def prefill_s(self, tokens: int) -> list[float]:
        """Return the seconds of each step that prefills so many tokens."""
        return [result.duration_s for plan, result in self.ran if sum(step.tokens for step in plan.sequences) == tokens]


@contextmanager
def noted(built: Replica) -> Iterator[Noted]:
    """Note the plans that an engine runs meanwhile."""
    executor = Noted(built.engine._executor)
    with mock.patch.object(built.engine, "_executor", executor):
        yield executor


# --- a and b: steps ----------------------------------------------------------------------------------


def measure_steps(rig: GpuRig) -> dict[str, Any]:
    """Measure decodes, prefills, and what adapters add to both, in one engine that holds all adapters."""
    ranks = spread_ranks(ADAPTERS)
    refs = rig.references(rig.folders("a", ranks, ATTENTION))
    cost = partial(model_cost, rig.config, 2, modules=ATTENTION)
    token_bytes = rig.config.geometry(2).block_bytes(1)
    decodes, lora = [], []
    with rig.replica(**_ENGINE) as built:
        fill_host(built.engine, tuple(refs))
        run_all(built, make_requests("load", ADAPTERS, 4, 1, refs))
        for rows, context in DECODES:
            chosen = spread(ADAPTERS, min(rows, ADAPTERS))
            own = [refs[i] for i in chosen]
            run_all(built, make_requests(f"warm-{rows}", rows, 8, STEPS, own))
            with noted(built) as executor:
                run_all(built, make_requests(f"decode-{rows}", rows, context, STEPS, own))
            used = cost([ranks[i] for i in chosen])
            read = 2 * (used.parameters + sum(used.adapter_parameters)) + rows * (context + STEPS // 2) * token_bytes
            decodes.append({"rows": rows, "context": context, "bytes": read, "s": executor.decode_s(rows)})
        prefill_refs = [refs[i] for i in spread(ADAPTERS, PREFILL_SEQUENCES)]
        work = (PREFILL_SEQUENCES, PREFILL_TOKENS // PREFILL_SEQUENCES, 1)
        with noted(built) as executor:
            for turn in range(6):
                run_all(built, make_requests(f"prefill-{turn}", *work, seed=turn))
        prefill_s = executor.prefill_s(PREFILL_TOKENS)[1:]
        for rows in LORA_ROWS:
            chosen = spread(ADAPTERS, rows)
            pairs = _pairs(built, f"lora-{rows}", (rows, 16, STEPS), [refs[i] for i in chosen])
            added = 2 * sum(cost([ranks[i] for i in chosen]).adapter_parameters)
            lora.append({"rows": rows, "bytes": added, "pairs": pairs})
        few = [refs[i] for i in spread(ADAPTERS, OVERHEAD_DISTINCT)]
        overhead = _pairs(built, "overhead", (OVERHEAD_ROWS, OVERHEAD_CONTEXT, STEPS), few)
        many = _pairs(built, "overhead-100", (ADAPTERS, DECODES[-1][1], STEPS), refs)
        with twins(built) as twin:
            for turn in range(6):
                run_all(built, make_requests(f"prefill-lora-{turn}", *work, prefill_refs, seed=turn))
    return {
        "decodes": decodes,
        "prefill_s": prefill_s,
        "prefill_flops": 2 * cost([]).layer_parameters * PREFILL_TOKENS,
        "lora": lora,
        "overhead": {str(OVERHEAD_DISTINCT): overhead, str(ADAPTERS): many},
        "prefill_pairs": [list(pair) for pair in twin.prefills[1:]],
    }


def judge_steps(found: dict[str, Any], limits: dict[str, Any]) -> Judged:
    """See the line, a and b."""
    bandwidth, figure, failures = limits["copy_bytes_per_s"], dict[str, str](), list[str]()

    def say(name: str, words: str, *, met: bool) -> None:
        figure[name] = words
        if not met:
            failures.append(f"{name}: {words}")

    for each in found["decodes"]:
        share = each["bytes"] / bandwidth / median(each["s"])
        words = f"{share:.0%} of the limit, {median(each['s']) * 1e3:.2f} ms at {each['context']} tokens"
        say(f"decode, {each['rows']} rows", words, met=share >= DECODE_SHARE)
    share = found["prefill_flops"] / limits["gemm_flops"] / median(found["prefill_s"])
    words = f"{share:.0%} of the limit, {median(found['prefill_s']) * 1e3:.0f} ms"
    say(f"prefill, {PREFILL_TOKENS:,} tokens", words, met=share >= PREFILL_SHARE)
    for each in found["lora"]:
        added_s = median(adapters_s - base_s for adapters_s, base_s in each["pairs"])
        times = added_s / (each["bytes"] / bandwidth)
        words = f"{times:.2f} × the limit, {added_s * 1e3:.2f} ms"
        say(f"LoRA, {each['rows']} adapters", words, met=times <= LORA_TIMES)
    for distinct, pairs in found["overhead"].items():
        lost = median(adapters_s / base_s - 1 for adapters_s, base_s in pairs)
        met = lost <= OVERHEAD or int(distinct) != OVERHEAD_DISTINCT
        say(f"of a decode step, {distinct} adapters", f"+{lost:.1%}", met=met)
    lost = median(adapters_s / base_s - 1 for adapters_s, base_s in found["prefill_pairs"])
    say("of a prefill, adapters", f"+{lost:.1%}", met=lost <= PREFILL_OVERHEAD)
    return Judged(figure, failures)


def _pairs(built: Replica, name: str, work: tuple[int, int, int], refs: Sequence[AdapterRef]) -> list[list[float]]:
    """Return the seconds of each decode step with adapters, and without."""
    with twins(built) as executor:
        run_all(built, make_requests(name, *work, refs))
    pairs: list[Pair] = executor.decodes
    return [list(pair) for pair in pairs[len(pairs) // 4 :]]  # graphs are captured in the first


def spread(count: int, wanted: int) -> list[int]:
    """Return ``wanted`` places among ``count``, evenly; one alone is in the middle."""
    if wanted == 1:
        return [count // 2]
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


# --- c: loads ----------------------------------------------------------------------------------------


def measure_gpu_loads(rig: GpuRig) -> dict[str, Any]:
    """Load an adapter a second beside decodes, and ask for the same again in a round in which none is loaded.

    The first round warms up.
    """
    refs = rig.references(rig.folders("load", [RANK] * (1 + LOAD_PAIRS * LOADS), ATTENTION))
    settings = rig.settings(row="lorikeet:plain-no-reuse", host_memory_bytes=_COLD_BYTES)
    firsts = range(1, len(refs), LOADS)
    rounds = [refs[first : first + LOADS] for first in firsts for _ in ("loaded", "there already")]
    found = measure_loads(settings, [refs[:1], *rounds])
    own = iter(found["rounds"][1:])
    pairs = list(zip(own, own, strict=True))
    if any(loaded["loads"] != LOADS or there["loads"] for loaded, there in pairs):
        raise RuntimeError(f"adapters were not loaded once each: {pairs}")
    (parameters,) = model_cost(rig.config, 2, [RANK], ATTENTION).adapter_parameters
    return {
        **{key: found[key] for key in ("overlapping_s", "others_s", "loads_s")},
        "load_bytes": 2 * parameters,
        "tpot_pairs_s": [(loaded["tpot_s"], there["tpot_s"]) for loaded, there in pairs],
    }


def judge_loads(found: dict[str, Any], limits: dict[str, Any]) -> Judged:
    """See the line, c."""
    share = found["load_bytes"] / median(found["loads_s"]) / limits["link_bytes_per_s"]
    times = median(loaded_s / there_s for loaded_s, there_s in found["tpot_pairs_s"])
    beside = median(found["overlapping_s"]) / median(found["others_s"])
    figure = {
        "a load": f"{share:.0%} of the link, {median(found['loads_s']) * 1e3:.1f} ms",
        "TPOT with a load a second": f"{times:.3f} × that without",
        "steps beside a load": f"{beside:.3f} × the others",
    }
    missed = {"a load": share < LOAD_SHARE, "TPOT with a load a second": times > LOAD_COST}
    return Judged(figure, [f"{name}: {figure[name]}" for name, is_missed in missed.items() if is_missed])


# --- d: cold starts ----------------------------------------------------------------------------------


def measure_cold(rig: GpuRig) -> dict[str, Any]:
    """Measure the first token of a request whose adapter lies on the host, by row; each has an adapter of its own."""
    times = 1 + COLD_REPEATS
    ranks = [rank for rank, _ in product(COLD_RANKS, range(len(COLD_TOKENS) * times))]
    refs = rig.references(rig.folders("cold", ranks, ("q", "k", "v")))
    return {row: _cold_row(rig, row, refs, times) for row in COLD_ROWS}


def _cold_row(rig: GpuRig, row: str, refs: Sequence[AdapterRef], times: int) -> dict[str, Any]:
    """Return TTFT, load times and layers that the host computed, by ``rank x tokens``; the first warms up."""
    ends_s: list[float] = []
    found: dict[str, Any] = {}
    with rig.replica(
        on_load_done=lambda: ends_s.append(time.monotonic()), row=row, host_memory_bytes=_COLD_BYTES
    ) as built:
        engine, rest_of = built.engine, iter(refs)
        fill_host(engine, tuple(refs))
        if row == CACHED:
            settle(engine)
        for rank, tokens in product(COLD_RANKS, COLD_TOKENS):
            name = f"{rank} x {tokens}"
            point: dict[str, list[float]] = {"ttft_s": [], "load_s": [], "host_layers": []}
            for turn in range(times):
                (request,) = make_requests(f"{name}-{turn}", 1, tokens, 2, [next(rest_of)], seed=turn)
                before = _host_layers(built)
                ends_s.clear()
                began_s, first_s = time.monotonic(), _first_token_s(built, request)
                point["ttft_s"].append(first_s - began_s)
                point["load_s"].append(ends_s[0] - began_s if ends_s else 0.0)
                point["host_layers"].append(_host_layers(built) - before)
            found[name] = {key: values[1:] for key, values in point.items()}
    return found


def _host_layers(built: Replica) -> int:
    counters = built.engine.stats().assist
    return 0 if counters is None else counters.host_layers


def _first_token_s(built: Replica, request: Request) -> float:
    """Answer a request; return when its first token was there."""
    engine, clock, first_s = built.engine, MonotonicClock(), math.inf
    engine.submit(request)
    while engine.has_requests or engine.is_busy:
        if engine.step().tokens:
            first_s = min(first_s, time.monotonic())
        if not engine.is_busy and engine.has_requests:
            rest(engine, clock, math.inf)
    return first_s


def judge_cold(found: dict[str, Any], limits: dict[str, Any]) -> Judged:
    """See the line, d."""
    figure, failures = dict[str, str](), list[str]()
    for name in found[CACHED]:
        cached, demand, assist, auto, wait = (median(found[row][name]["ttft_s"]) for row in COLD_ROWS)
        load = median(found[ON_DEMAND][name]["load_s"])
        cold, assisted = demand - cached, assist - cached
        figure[f"cold, rank {name} tokens"] = (
            f"cached {cached * 1e3:.1f} ms, on demand +{cold * 1e3:.1f} (load {load * 1e3:.1f}), assisted "
            f"+{assisted * 1e3:.1f}, auto {auto / min(assist, wait):.2f} × the better"
        )
        assists = median(found[AUTO][name]["host_layers"]) > 0
        missed = {
            "a cold start does not cost its load": abs(cold - load) > LOAD_ERROR * load,
            "assisted is too slow": assists and assisted > ASSISTED_SHARE * cold,
            "auto is not the better": auto > AUTO_TIMES * min(assist, wait),
        }
        failures += [f"rank {name} tokens: {what}" for what, is_missed in missed.items() if is_missed]
    return Judged(figure, failures)


# --- what other lines measure ------------------------------------------------------------------------


def judge_lines(found: dict[str, Any]) -> Judged:
    """See the line: those of the server and the memory, on the GPU."""
    failures = [f"{name} on the GPU: {each['cause']}" for name, each in found.items() if not each["passed"]]
    return Judged({"lines met": f"{len(found) - len(failures)} of {len(found)}"}, failures)


def judge_peft(found: dict[str, Any]) -> Judged:
    """See the line, f."""
    low, high = found["ratio_interval"]
    words = (
        f"{found['ratio']:.1f} × ({low:.1f} to {high:.1f}), {found['output_tok_s']:,.0f} tokens/s; first tokens equal "
        f"for {found['first_tokens_equal']:.0%}"
    )
    return Judged({"beside PEFT": words}, [f"beside PEFT: {words}"] if found["ratio"] < PEFT_TIMES else [])


PARTS = {
    "steps": Part(lambda rig, runs: measure_steps(rig), judge_steps),
    "loads": Part(lambda rig, runs: measure_gpu_loads(rig), judge_loads),
    "cold": Part(lambda rig, runs: measure_cold(rig), judge_cold),
    "lines": Part(lambda rig, runs: measure_lines("cuda"), lambda found, limits: judge_lines(found)),
    "rows": Part(measure_rows, lambda found, limits: Judged(rows_figure(found), [])),
    # Last: it gives the model real weights.
    "peft": Part(lambda rig, runs: measure_peft(rig, "cuda"), lambda found, limits: judge_peft(found)),
}
