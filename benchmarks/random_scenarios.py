"""Judges the default preset in random scenarios: ``python -m benchmarks.random_scenarios --count 200``.

Everything is *modelled* (see ``benchmarks.auto``). A scenario's seed draws device, model, memory, link, host memory,
replicas, adapters, their popularity and its movement, conversations, lengths and bursts. All systems of a scenario have
the same kernels, memory, link and requests. ``auto`` is compared with ten systems, and with variants of ``auto`` that
have one part switched off. Ranges, systems, score and the rule for stopping early were written down before any result
was seen.

The rate is 0.5 to 1.0 of the scenario's peak: the highest rate of the ladder 1.15^k at which any of the systems meets
``PEAK_SLO`` for 90 % of the first requests: 800, or those of 40 seconds if these are more, at most 3,000. ``auto``
climbs and descends the ladder first, by fours and then by halves. Each rival then climbs from the highest rate so far,
as long as it meets the SLO at the next rate. A scenario has 2,000 requests, or the requests of a minute if these are
more, but at most 6,000.

``auto`` runs first. Another system's run is stopped once so many of its requests have waited for twice ``auto``'s P99
TTFT that both its mean and its P99 are at least twice ``auto``'s; it counts as worse, and the bounds are kept. It runs
again if a later ``auto`` reaches the bounds.

Each result is written as soon as it is complete, so that an interrupted program can continue.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.auto import AUTO, FIGURES, score
from benchmarks.harness import print_setup, print_table, revision
from lorikeet.bench.in_process import STOPPED
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.costs.assist_costs import assisted_modules
from lorikeet.costs.catalog import load_profile
from lorikeet.presets import for_one_replica, resolve_preset
from lorikeet.simulator.scenario import make_scenario
from lorikeet.simulator.study import run_scenario
from lorikeet.workloads.synthetic import ATTENTION
from lorikeet.workloads.workload import MADE_BLOCK_TOKENS, WorkloadRequest

# --- what is compared --------------------------------------------------------------------------------

RIVALS = (
    "elora",
    "chameleon",
    "dlora",
    "toppings",
    "lorikeet:rank-groups",  # loraserve needs a search of loads for each device; this related preset needs none
    "lorikeet:plain",
    "lorikeet:tree-lru",
    "vllm-static",
    "elora:s-lora",
    "merged-only",
)
KERNELS = KernelForm.UNPADDED
"""For every system."""


def variants(load: "Load") -> list[str]:
    """Return ``auto`` with each of its parts switched off: each option has the value of ``lorikeet:plain``.

    ``host_kv=none`` is one more. Options without an effect on the scenario are left out.
    """
    auto, plain = (resolve_preset(name)[1] for name in (AUTO, "lorikeet:plain"))
    if load.replicas == 1:
        auto, plain = for_one_replica(auto), for_one_replica(plain)
    ours, off = msgspec.to_builtins(auto), msgspec.to_builtins(plain)
    changed = {name: off[name] for name in ours if ours[name] != off[name]}
    if not set(load.modules) <= set(assisted_modules(load_profile(load.profile).tensor_parallel)):
        del changed["cold_start"]
    return [f"{AUTO},{name}={value}" for name, value in changed.items()] + [f"{AUTO},host_kv=none"]


# --- scenarios ---------------------------------------------------------------------------------------

REQUESTS = (2000, 60, 6000)
"""Least number of requests, seconds of arrivals, and most requests."""
MAX_MODEL_LEN = 4096
MOST_PROMPT = 2000
MOST_ANSWER = 800
PROFILES = (
    "a10-llama-2-7b",
    "a10-llama-3-8b",
    "a40-llama-2-7b",
    "a40-llama-3-8b",
    "a40-llama-2-13b",
    "a40x2-llama-2-34b",
    "a100-40-llama-2-7b",
    "a100-40-llama-3-8b",
    "a100-80-llama-2-7b",
    "a100-80-llama-3-8b",
    "a100-80-llama-2-13b",
    "a100-80x2-llama-2-34b",
    "a100-80x4-llama-2-70b",
    "h100-llama-2-7b",
    "h100-llama-3-8b",
    "h100-llama-2-13b",
    "h100x4-llama-2-70b",
)
RANKS = ("8", "16", "64", "8,16,32", "16,64", "32,64", "8-128")
MODULES = (("q", "k", "v"), ATTENTION, LORA_MODULES)
MIN_POOL_BYTES = 6 * 10**9
PEAK_SLO = "ttft=2,tpot=0.2"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a scenario.

    Attributes:
        seed: seed of the scenario.
        profile: device and model.
        pool_share: share of the profile's memory for adapters and KV.
        link_gb_per_s: link between host and device; 0 for the data sheet's.
        host_gb: host memory of each replica.
        replicas: number of replicas.
        adapters, ranks, modules: adapters; ranks in turn.
        skew: adapters are drawn as ⌊n u^skew⌋ for a uniform u; 1 is uniform.
        shift, period_s: adapters by which the popularity moves each period; 0 for never.
        single_share: share of conversations with one turn.
        turns: largest number of turns of the other conversations. All numbers from 2 are equally likely.
        think_s: median seconds between the arrivals of two turns, lognormal with sigma 0.7.
        shared_tokens: number of leading prompt tokens that all requests of an adapter share.
        prompt, prompt_sigma: median of a turn's new tokens, lognormal.
        answer, answer_sigma: median of the answers, lognormal.
        variation: variation of the gaps between arrivals, which are gamma; 1 is Poisson.
        surge, surge_s: factor of the arrival rate in every second period of ``surge_s`` seconds; 1 for no surges.
        rate_share: share of the peak.
    """

    seed: int
    profile: str
    pool_share: float
    link_gb_per_s: float
    host_gb: float
    replicas: int
    adapters: int
    ranks: str
    modules: tuple[str, ...]
    skew: float
    shift: int
    period_s: float
    single_share: float
    turns: int
    think_s: float
    shared_tokens: int
    prompt: int
    prompt_sigma: float
    answer: int
    answer_sigma: float
    variation: float
    surge: float
    surge_s: float
    rate_share: float

    def in_words(self) -> str:
        """Describe the load in a line."""
        moves = f", moving by {self.shift} each {self.period_s:.0f} s" if self.shift else ""
        link = f"{self.link_gb_per_s:.1f} GB/s" if self.link_gb_per_s else "link by data sheet"
        turns = f"{100 * self.single_share:.0f} % single shots, others up to {self.turns} turns"
        surges = f", surges x{self.surge:.1f} of {self.surge_s:.0f} s" if self.surge > 1 else ""
        return (
            f"{self.replicas} x {self.profile}, {100 * self.pool_share:.0f} % of the pool, {link}, "
            f"{self.host_gb:.0f} GB host; {self.adapters} adapters of {self.ranks} on {len(self.modules)} modules, "
            f"skew {self.skew:.1f}{moves}; {turns} after {self.think_s:.0f} s, shared {self.shared_tokens}, "
            f"prompt {self.prompt}, answer {self.answer}; cv {self.variation:.1f}{surges}; "
            f"{self.rate_share:.2f} of the peak"
        )


def draw_load(seed: int) -> Load:
    """Return the scenario of a seed."""
    generator = np.random.default_rng(seed)

    def happens(chance: float) -> bool:
        return bool(generator.random() < chance)

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(generator.uniform(math.log(low), math.log(high))))

    def one_of(choices: Sequence[Any]) -> Any:
        return choices[int(generator.integers(len(choices)))]

    adapters = round(log_uniform(2, 2000))
    drawn = {
        "profile": one_of(PROFILES),
        "pool_share": log_uniform(0.15, 1.0) if happens(0.5) else 1.0,
        "link_gb_per_s": log_uniform(1, 32) if happens(0.5) else 0.0,
        "host_gb": log_uniform(4, 512),
        "replicas": one_of((2, 4)) if happens(0.2) else 1,
        "ranks": one_of(RANKS),
        "modules": one_of(MODULES),
        "skew": log_uniform(1, 6),
        "shift": max(1, round(adapters * log_uniform(0.01, 0.3))) if happens(0.4) else 0,
        "period_s": log_uniform(20, 300),
        "single_share": one_of((0.0, 0.2, 0.5, 1.0)),
        "turns": round(log_uniform(2, 20)),
        "think_s": log_uniform(2, 120),
        "shared_tokens": round(log_uniform(64, 1024)) if happens(0.3) else 0,
        "prompt": round(log_uniform(24, 900)),
        "prompt_sigma": generator.uniform(0.1, 1.0),
        "answer": round(log_uniform(8, 250)),
        "answer_sigma": generator.uniform(0.1, 1.0),
        "variation": log_uniform(1.5, 5) if happens(0.3) else 1.0,
        "surge": log_uniform(1.5, 5) if happens(0.3) else 1.0,
        "surge_s": log_uniform(10, 120),
        "rate_share": generator.uniform(0.5, 1.0),
    }
    return Load(seed=seed, adapters=adapters, **drawn)


class _Conversation(NamedTuple):
    name: int
    adapter: int
    turns_left: int
    tokens: int


def count_at(rate: float, least: int, seconds: float, most: int) -> int:
    """Return the number of requests of a run."""
    return min(most, max(least, math.ceil(rate * seconds)))


def arrivals_of(load: Load, rate: float, generator: np.random.Generator) -> list[float]:
    """Return the times of the requests: gamma gaps of mean 1, stretched so that surges and lulls have ``rate``."""
    shape = 1 / load.variation**2
    units = np.cumsum(generator.gamma(shape, 1 / shape, count_at(rate, *REQUESTS))) / rate
    # Units are seconds of the mean rate. A period and the next take two periods of them, most of them in the surge.
    lull, surge = 2 / (1 + load.surge), 2 * load.surge / (1 + load.surge)
    pairs, rest = np.divmod(units, 2 * load.surge_s)
    in_lull = rest < lull * load.surge_s
    times = np.where(in_lull, rest / lull, load.surge_s + (rest - lull * load.surge_s) / surge)
    return list((pairs * 2 * load.surge_s + times).tolist())


def requests_of(load: Load, rate: float) -> list[WorkloadRequest]:
    """Return the requests of a scenario at a rate.

    Nine times in ten, an arrival is the next turn of the conversation that has been due for longest. If none is due, or
    the tenth time, the arrival begins a conversation.
    """
    of_arrivals, of_turns, of_lengths = np.random.default_rng((load.seed, 1)).spawn(3)
    due: list[tuple[float, _Conversation]] = []
    found: list[WorkloadRequest] = []
    started = 0

    def length(median: int, sigma: float, most: int) -> int:
        return min(most, max(4, round(median * math.exp(sigma * of_lengths.standard_normal()))))

    for now_s in arrivals_of(load, rate, of_arrivals):
        if due and due[0][0] <= now_s and of_turns.random() < 0.9:
            _, before = heappop(due)
        else:
            place = int(load.adapters * of_turns.random() ** load.skew)
            moved = load.shift * int(now_s // load.period_s)
            turns = 1 if of_turns.random() < load.single_share else int(of_turns.integers(2, load.turns, endpoint=True))
            before = _Conversation(started, (place + moved) % load.adapters, turns, load.shared_tokens)
            started += 1
        answer = length(load.answer, load.answer_sigma, MOST_ANSWER)
        room = MAX_MODEL_LEN - before.tokens - answer
        tokens = before.tokens + length(load.prompt, load.prompt_sigma, min(MOST_PROMPT, room))
        shared = load.shared_tokens // MADE_BLOCK_TOKENS
        # The ids of shared blocks are negative, one range for each adapter.
        blocks = [-(before.adapter * 1000 + place + 1) for place in range(shared)]
        blocks += [before.name * 1000 + place for place in range(shared, tokens // MADE_BLOCK_TOKENS)]
        found.append(
            WorkloadRequest(
                now_s,
                f"adapter-{before.adapter:04}",
                tokens,
                answer,
                prefix_blocks=tuple(blocks),
                conversation=f"conversation-{before.name:05}",
                prefix_block_tokens=MADE_BLOCK_TOKENS,
            )
        )
        after = before._replace(turns_left=before.turns_left - 1, tokens=tokens + answer)
        think_s = load.think_s * math.exp(0.7 * of_turns.standard_normal())
        if after.turns_left and after.tokens + 2 * MOST_ANSWER <= MAX_MODEL_LEN:
            heappush(due, (now_s + think_s, after))
    return found


# --- runs --------------------------------------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    Attributes:
        figures: values of ``FIGURES``. For a stopped run, lower bounds of the first two.
        stopped: whether the run was stopped.
        error: reason why figures are missing; empty if they exist.
        revision: revision of the code.
        cpu_s: processor time.
    """

    figures: dict[str, float]
    stopped: bool = False
    error: str = ""
    revision: str = ""
    cpu_s: float = 0.0


def simulate(
    load: Load, preset: str, requests: Sequence[WorkloadRequest], slo: str = "", most_missed: int | None = None
) -> tuple[int, dict[str, float]]:
    """Run a system. Return the number of requests with a complete answer, and the figures of these requests.

    Args:
        load: the scenario.
        preset: the system.
        requests: its requests.
        slo: limits that are counted.
        most_missed: number of misses of ``slo`` above which the run is stopped soon; None for a whole run.

    Raises:
        ValueError: the system cannot run on this device.
        RuntimeError: a request failed.
    """
    profile = load_profile(load.profile)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "workload.jsonl")
        trace.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in requests))
        engine = {
            "memory_bytes": max(MIN_POOL_BYTES, int(profile.pool_bytes * load.pool_share)),
            "host_memory_bytes": int(load.host_gb * 1e9),
            "link_bytes_per_s": load.link_gb_per_s * 1e9,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
        }
        fields = {
            "profile": load.profile,
            "preset": f"{preset},kernel_form={KERNELS}",
            "trace": str(trace),
            "replicas": load.replicas,
            "ranks": load.ranks,
            "modules": ",".join(load.modules),
            "max_model_len": MAX_MODEL_LEN,
            "engine": engine,
            "slo": slo,
            "predictor": "history",
            "seed": load.seed % 2**31,
        }
        scenario = make_scenario(None, fields)
        run = run_scenario(scenario, lambda stage, done, total: None, most_missed=most_missed).simulated.run
    whole = [each for each in run.exchanges if each.error is None]
    failed = [each for each in run.exchanges if each.error not in (None, STOPPED)]
    if failed:
        raise RuntimeError(f"{preset}: {len(failed)} requests failed, the first with {failed[0].error}")
    if not whole:
        return 0, {}
    ttft_s = np.array([each.ttft_s for each in whole])
    e2e_s = float(np.mean([each.e2e_s / each.output_tokens for each in whole]))
    values = (float(ttft_s.mean()), float(np.percentile(ttft_s, 99)), e2e_s)
    return len(whole), dict(zip(FIGURES, values, strict=True))


PROBE_REQUESTS = (800, 40, 3000)
"""See ``REQUESTS``."""
PROBE_MISSES = 0.1
LADDER = 1.15


def find_peak(load: Load) -> float:
    """Return the peak of a scenario in requests per second, as defined at the top of this file."""

    def holds(system: str, power: int) -> bool:
        rate = LADDER**power
        requests = requests_of(load, rate)[: count_at(rate, *PROBE_REQUESTS)]
        try:
            ended, _ = simulate(load, system, requests, PEAK_SLO, int(PROBE_MISSES * len(requests)))
        except (ValueError, RuntimeError):
            return False
        return ended == len(requests)

    low: int | None = None
    high: int | None = None
    power = 10  # 4 requests a second
    while low is None or high is None:
        is_held = holds(AUTO, power)
        low = power if is_held else low
        high = high if is_held else power
        power += 4 if is_held else -4
        if not -30 < power < 60:
            raise RuntimeError(f"no peak between {LADDER**-30:.3f} and {LADDER**60:.0f} requests a second")
    while high - low > 1:
        middle = (low + high) // 2
        if holds(AUTO, middle):
            low = middle
        else:
            high = middle
    for system in RIVALS:
        while holds(system, low + 1):
            low += 1
    return float(LADDER**low)


def bounds_beside(auto: dict[str, float], requests: int) -> tuple[float, int]:
    """Return the waiting time and the number of such requests at which a run has at least twice ``auto``'s TTFT."""
    mean_s = auto["ttft_mean_s"]
    p99_s = auto["ttft_p99_s"]
    return 2 * p99_s, math.ceil(requests * max(0.015, mean_s / p99_s))


def run_system(load: Load, preset: str, rate: float, auto: dict[str, float] | None) -> Outcome:
    """Run a system on a scenario; ``auto``: the figures of ``auto``, None to run the whole scenario."""
    started_s = time.process_time()
    requests = requests_of(load, rate)
    limit_s, most = bounds_beside(auto, len(requests)) if auto is not None else (0.0, None)
    error = ""
    figures: dict[str, float] = {}
    stopped = False
    try:
        ended, figures = simulate(load, preset, requests, f"ttft={limit_s:.9g}" if limit_s else "", most)
        stopped = ended < len(requests)
    except (ValueError, RuntimeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if stopped and most is not None:
        figures = {"ttft_mean_s": most * limit_s / len(requests), "ttft_p99_s": limit_s}
    spent_s = time.process_time() - started_s
    return Outcome(figures=figures, stopped=stopped, error=error, revision=revision(), cpu_s=spent_s)


class Record(msgspec.Struct):
    """All results of a scenario."""

    load: Load
    peak: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the search of the peak."""
    error: str = ""
    """Reason why the scenario cannot be run; empty if it can."""
    outcomes: dict[str, Outcome] = {}

    def missing(self, systems: Iterable[str]) -> list[str]:
        """Return the systems without a result for the current figures of ``auto``."""
        auto = self.outcomes.get(AUTO)
        return [each for each in systems if each not in self.outcomes or (auto and self._is_open(each, auto))]

    def _is_open(self, system: str, auto: Outcome) -> bool:
        """Return whether ``auto`` is no longer within the bounds of a stopped run."""
        outcome = self.outcomes[system]
        return outcome.stopped and any(auto.figures[name] > bound for name, bound in outcome.figures.items())


def complete(file: Path, seed: int) -> Record:
    """Run the systems whose results the scenario's file lacks."""
    record = msgspec.json.decode(file.read_bytes(), type=Record) if file.exists() else Record(draw_load(seed))

    def keep() -> None:
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        part.rename(file)

    if not record.peak and not record.error:
        started_s = time.process_time()
        try:
            record.peak = find_peak(record.load)
        except RuntimeError as error:
            record.error = str(error)
        record.cpu_s = time.process_time() - started_s
        keep()
    if record.error:
        return record
    for system in record.missing((AUTO, *RIVALS, *variants(record.load))):
        auto = record.outcomes.get(AUTO)
        if auto is not None and auto.error:
            break
        record.outcomes[system] = run_system(
            record.load, system, record.peak * record.load.rate_share, None if auto is None else auto.figures
        )
        keep()
    return record


# --- the comparison ----------------------------------------------------------------------------------


class Judged(NamedTuple):
    """Holds ``auto``'s results in a scenario.

    The score is relative to the best system's, and each figure to the best system's and to the lowest figure.
    """

    best: str
    score: float
    over_best: dict[str, float]
    over_least: dict[str, float]


def judge(record: Record) -> Judged | None:
    """Compare ``auto`` with all others that ran to the end; None while runs are missing."""
    if record.error or record.missing((AUTO, *RIVALS, *variants(record.load))):
        return None
    ours = record.outcomes[AUTO].figures
    others = {
        name: each.figures
        for name, each in record.outcomes.items()
        if name != AUTO and not each.stopped and not each.error
    }
    if not ours or not others:
        return None
    best = min(others, key=lambda name: score(others[name]))
    return Judged(
        best,
        score(ours) / score(others[best]),
        {name: ours[name] / others[best][name] for name in FIGURES},
        {name: ours[name] / min(each[name] for each in others.values()) for name in FIGURES},
    )


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else math.nan


def show(records: Sequence[Record], worst: int = 10) -> None:
    """Print the tables."""
    judged = [(record, each) for record in records if (each := judge(record)) is not None]
    left_out = [record for record in records if record.error or (AUTO in record.outcomes and judge(record) is None)]
    spent_s = [record.cpu_s + sum(each.cpu_s for each in record.outcomes.values()) for record, _ in judged]
    print(f"{len(judged)} scenarios, {len(left_out)} without a result; mean processor time {np.mean(spent_s):.0f} s\n")
    if not judged:
        return
    groups = {
        "all": judged,
        "one replica": [each for each in judged if each[0].load.replicas == 1],
        "several replicas": [each for each in judged if each[0].load.replicas > 1],
        "single shots": [each for each in judged if each[0].load.single_share == 1],
        "conversations": [each for each in judged if each[0].load.single_share < 1],
        "popularity moves": [each for each in judged if each[0].load.shift],
    }
    rows = []
    for name, members in groups.items():
        scores = [each.score for _, each in members]
        over_best = [value for _, each in members for value in each.over_best.values()]
        over_least = [value for _, each in members for value in each.over_least.values()]
        means = [_geometric([each.over_best[figure] for _, each in members]) for figure in FIGURES]
        rows.append(
            (
                name,
                len(members),
                f"{_geometric(scores):.3f}",
                *(f"{each:.3f}" for each in means),
                f"{100 * np.mean(np.array(scores) <= 1.05):.0f} %" if scores else "",
                f"{max(scores, default=math.nan):.2f}",
                f"{100 * np.mean(np.array(over_best) > 1.5):.1f} %" if scores else "",
                f"{100 * np.mean(np.array(over_least) > 1.5):.1f} %" if scores else "",
            )
        )
    headings = ["", "scenarios", "score", "mean TTFT", "P99", "E2E", "<= 1.05", "worst"]
    headings += ["figures > 1.5 of the best", "> 1.5 of the least"]
    print_table("auto over the best of all others by score (geometric means)", headings, rows)
    _show_systems([record for record, _ in judged])
    judged.sort(key=lambda each: -each[1].score)
    rows = []
    for record, each in judged[:worst]:
        figures = [f"{each.over_best[name]:.2f}" for name in FIGURES]
        milliseconds = ", ".join(f"{1e3 * record.outcomes[AUTO].figures[name]:.0f}" for name in FIGURES)
        rows.append((record.load.seed, f"{each.score:.3f}", *figures, milliseconds, each.best))
    headings = ["seed", "score", "mean TTFT", "P99", "E2E", "auto, ms", "best"]
    print_table(f"the worst {worst}", headings, rows)
    for record, _ in judged[:worst]:
        print(f"  {record.load.seed}: {record.load.in_words()} = {record.peak * record.load.rate_share:.2f}/s")


def _show_systems(records: Sequence[Record]) -> None:
    """Print ``auto`` over each system; stopped runs count as twice as slow."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record.outcomes if name != AUTO):
        beside = [(record.outcomes[AUTO], record.outcomes[name]) for record in records if name in record.outcomes]
        ran = [(ours, theirs) for ours, theirs in beside if not theirs.error]
        ratios = [0.5 if theirs.stopped else score(ours.figures) / score(theirs.figures) for ours, theirs in ran]
        better = np.mean(np.array(ratios) > 1.02) if ratios else 0.0
        worst = max(ratios, default=math.nan)
        stopped = sum(theirs.stopped for _, theirs in ran)
        rows.append((name, len(ran), stopped, f"{_geometric(ratios):.3f}", f"{100 * better:.0f} %", f"{worst:.2f}"))
    headings = ["auto over", "ran", "of them stopped (as 0.5)", "score", "> 1.02", "worst"]
    print_table("auto over each other", headings, rows)


# --- the program -------------------------------------------------------------------------------------

DRAW = 20261130
"""Seed of the scenarios' seeds."""


def seeds_of(draw: int, count: int) -> list[int]:
    """Return the first ``count`` seeds of a draw. A larger count begins with the same seeds."""
    return list(np.random.default_rng(draw).integers(2**31, size=count).tolist())


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, make the runs that are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of scenarios (%(default)s)")
    parser.add_argument("--draw", type=int, default=DRAW, help="seed of the scenarios' seeds (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these scenarios")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no scenario after this time")
    parser.add_argument("--fresh", nargs="+", default=[], metavar="PRESET", help="make these systems' runs again")
    parser.add_argument("--cached", action="store_true", help="make no runs")
    parser.add_argument("--folder", type=Path, default=Path("random_scenarios"), help="folder of results (%(default)s)")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * given.minutes
    records = []
    for seed in given.seeds or seeds_of(given.draw, given.count):
        file = given.folder / f"{seed}.json"
        if given.cached:
            if file.exists():
                records.append(msgspec.json.decode(file.read_bytes(), type=Record))
            continue
        if time.monotonic() > until_s:
            break
        if given.fresh and file.exists():
            kept = json.loads(file.read_bytes())
            kept["outcomes"] = {name: each for name, each in kept["outcomes"].items() if name not in given.fresh}
            file.write_text(json.dumps(kept))
        records.append(complete(file, seed))
        each = judge(records[-1])
        words = "no result" if each is None else f"{each.score:.3f} of {each.best}"
        print(f"[{len(records)}] {seed}: {words}", file=sys.stderr, flush=True)
    print_setup()
    show(records)


if __name__ == "__main__":
    main()
