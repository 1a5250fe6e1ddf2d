"""What the lines admission.2 to admission.4 share: Chameleon's workload, runs of it, and the knee."""

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.traces import AZURE_CONVERSATION, unpacked
from lorikeet.bench.arrivals import at_rate
from lorikeet.bench.in_process import Run, Watch, turns_of_workload
from lorikeet.bench.load_report import distribution
from lorikeet.bench.memory_bench import MemorySetting, Rig, modelled_rig, warm_replica
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.peak import Peak, find_peak
from lorikeet.bench.predictors import make_predictor
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.slices import to_end
from lorikeet.bench.synthetic import PAPER_RANKS, adapter_names, spread
from lorikeet.bench.workload import WorkloadRequest, read_any
from lorikeet.config import Settings
from lorikeet.core.clock import Clock
from lorikeet.core.events import Admitted, Preempted
from lorikeet.core.messages import EngineStats, MemoryStats, StepOutputs
from lorikeet.costs.catalog import load_profile
from lorikeet.engine.loop import Engine
from lorikeet.scheduling.multilevel.options import QueueFigures
from lorikeet.scheduling.multilevel.queue import ChameleonQueue

OURS, FIFO = "chameleon", "chameleon:s-lora"
ADAPTERS, CHOICE = 100, "rank-power:1"
PREDICTOR = "oracle:0.8"
PROFILE = "a40-llama-2-7b"
HOST_BYTES = 64 * 10**9
"""All 500 adapters of the largest case lie in the host tier, as in the paper's 377 GB."""
MAX_MODEL_TOKENS, MAX_RUNNING, STEP_TOKENS = 16_384, 256, 512
"""The trace has prompts of 14,050 tokens, and no time depends on the model's own limit; memory limits who runs."""
SEED = 7

HALF_HOUR_S = 1800.0
KNEE_SEEDS = (7, 8, 9, 10)
GROWTH = 0.01
SETTLED = 1 / 3
KNEE_PRECISION = 0.01
_SAMPLE_S = 1.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A modelled run of Chameleon's workload.

    Attributes:
        row: the system.
        rate: requests per second, Poisson.
        requests: how many.
        predictor: of the lengths of answers; see ``make_predictor``.
        adapters: how many.
        ranks: of the adapters in turn.
        choice: of adapters; see ``choose_adapters``.
        seed: of arrivals, adapters, lengths and predictions, none of which depends on the row.
    """

    row: str
    rate: float
    requests: int
    predictor: str = PREDICTOR
    adapters: int = ADAPTERS
    ranks: tuple[int, ...] = PAPER_RANKS
    choice: str = CHOICE
    seed: int = SEED


class Sample(NamedTuple):
    """How many requests waited at a time, in seconds since the start."""

    at_s: float
    waiting: int


class QueueWatch(Watch):
    """Sees who waits.

    Args:
        engine: whose requests.
        clock: of the engine.

    Attributes:
        samples: about one a second.
        admitted_s: when each request was last admitted, by its place in the workload, since the start.
        preemptions: by the place in the workload of the request that had to give its blocks back.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._start_s = clock.now()
        self.samples = [Sample(0.0, 0)]
        self.admitted_s: dict[int, float] = {}
        self.preemptions: list[int] = []

    def turned(self, outputs: StepOutputs) -> None:
        """See ``Watch``."""
        for event in outputs.events:
            if isinstance(event, Admitted):
                self.admitted_s[int(event.request_id)] = event.at_s - self._start_s
            elif isinstance(event, Preempted):
                self.preemptions.append(int(event.request_id))
        now = self._clock.now() - self._start_s
        if now >= self.samples[-1].at_s + _SAMPLE_S:
            self.samples.append(Sample(now, len(self._engine.queue)))


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        work: what was run.
        ranks: of the adapter of each request.
        run: the exchanges.
        watch: what was seen.
        began, memory: what the memory told before and after.
        engine: what the engine told at the end.
        queue: what Chameleon's queue told; None where another one admits.
    """

    work: MemoryWork
    ranks: list[int]
    run: Run
    watch: QueueWatch
    began: MemoryStats
    memory: MemoryStats
    engine: EngineStats
    queue: QueueFigures | None

    @property
    def waits_s(self) -> list[float]:
        """From arrival to the last admission: a request that was sent back has waited until it was taken again."""
        return [self.watch.admitted_s[index] - each.arrival_s for index, each in enumerate(self.work.requests)]

    @property
    def growth(self) -> float:
        """By how much of the arrivals the waiting requests become more; see ``growth``."""
        last_s = self.work.requests[-1].arrival_s
        return growth(self.watch.samples, last_s) * last_s / len(self.work.requests)

    @property
    def ttft_s(self) -> list[float]:
        """Of every request.

        Raises:
            RuntimeError: one has got no first token.
        """
        times = [exchange.ttft_s for exchange in self.run.exchanges if exchange.error is None]
        found = [each for each in times if each is not None]
        if len(found) != len(self.work.requests):
            raise RuntimeError(f"{len(found)} of {len(self.work.requests)} requests were answered")
        return found


@cache
def azure_lengths() -> tuple[WorkloadRequest, ...]:
    """Return the trace whose lengths are used."""
    with unpacked(AZURE_CONVERSATION) as file:
        return tuple(read_any(file))


def make_work(case: Case, length_scale: float = 1.0) -> MemoryWork:
    """Return the requests of a case: Poisson arrivals, each as long as one of Azure's, adapters by Chameleon's law.

    The arrivals are stretched to have exactly the rate: by chance they would miss it by some percent, as much as the
    loads next to the knee differ.
    """
    names, rates = tuple(adapter_names(case.adapters)), Rates.constant(case.rate)
    recipe = Recipe(
        lengths=azure_lengths(),
        length_scale=length_scale,
        rates=rates,
        count=case.requests,
        adapters=names,
        ranks=tuple(spread(case.ranks, case.adapters)),
        adapter_choice=case.choice,
        seed=case.seed,
    )
    return MemoryWork(at_rate(recipe.requests(), rates), names, 2, case.seed)


def run_modelled(case: Case) -> Outcome:
    """Run a case in Chameleon's setting."""
    work = make_work(case)
    return run_on(*profile_rig(case, work), case, work)


def profile_rig(case: Case, work: MemoryWork) -> tuple[Rig, Settings]:
    """Return where modelled runs run, and as what."""
    profile = load_profile(PROFILE)
    rig = modelled_rig(profile, work, WorkOptions(source="", adapters=case.adapters, ranks=case.ranks))
    setting = MemorySetting(
        memory_bytes=profile.pool_bytes,
        host_memory_bytes=HOST_BYTES,
        max_running=MAX_RUNNING,
        max_step_tokens=STEP_TOKENS,
        max_repeat=1,
        max_model_tokens=MAX_MODEL_TOKENS,
    )
    return rig, setting.settings(case.row)


def turns_on(rig: Rig, settings: Settings, case: Case, work: MemoryWork) -> Generator[None, None, Outcome]:
    """Run a case's requests on a fresh replica, all of whose adapters have been read into the host tier.

    It stops after each turn of the engine.
    """
    with warm_replica(rig, settings, work) as ((engine, _, _), clock, coalesced):
        began, watch = engine.memory_stats(), QueueWatch(engine, clock)
        run = yield from turns_of_workload(
            engine,
            clock,
            work.requests,
            rig.adapters,
            work.prompts_of(rig.vocabulary),
            coalesced=coalesced,
            watch=watch,
            predict=make_predictor(case.predictor, work.requests, case.seed),
        )
        queue = engine.queue.figures() if isinstance(engine.queue, ChameleonQueue) else None
        stats = engine.stats()
    rank_of = dict(zip(work.names, spread(case.ranks, case.adapters), strict=True))
    ranks = [rank_of[each.adapter] for each in work.requests if each.adapter is not None]
    return Outcome(work, ranks, run, watch, began, stats.memory, stats, queue)


run_on = to_end(turns_on)
"""The same without stops; returns the outcome."""


# --- figures -----------------------------------------------------------------------------------------


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """Return what is worth keeping of a run, as plain data: TTFT of every request, and the rest summed up."""
    ttft_s, memory, began = outcome.ttft_s, outcome.memory, outcome.began
    gaps, ends_s = distribution(outcome.run.gaps_s), [each.ended_s for each in outcome.run.exchanges]
    last_s = outcome.work.requests[-1].arrival_s
    queries = memory.adapter_queries - began.adapter_queries
    prefetched = memory.prefetched - began.prefetched
    copied = memory.transfers["host-device"].bytes
    return {
        "requests": len(ttft_s),
        "duration_s": last_s,
        "drained_s": max(ends_s),
        "ttft_s": [round(each, 4) for each in ttft_s],
        "ttft_mean_s": fmean(ttft_s),
        **{f"ttft_p{percent}_s": float(np.percentile(ttft_s, percent)) for percent in (50, 95, 99)},
        "tbt_p99_s": None if gaps is None else gaps.p99,
        "rank_p99_s": {str(rank): p99 for rank, p99 in by_rank(ttft_s, outcome.ranks).items()},
        "over_time_p99_s": over_time(ttft_s, [each.arrival_s for each in outcome.work.requests]),
        "longest_wait_s": max(outcome.waits_s),
        "preempted": len(outcome.watch.preemptions),
        "adapter_hit_rate": (memory.adapter_hits - began.adapter_hits) / queries,
        "prefetch_accuracy": (memory.prefetched_used - began.prefetched_used) / prefetched if prefetched else None,
        "to_device_bytes": copied - (began.transfers["host-device"].bytes if "host-device" in began.transfers else 0),
        "growth": outcome.growth,
        "queue": None if outcome.queue is None else msgspec.to_builtins(outcome.queue, str_keys=True),
    }


def by_rank(ttft_s: Sequence[float], ranks: Sequence[int]) -> dict[int, float]:
    """Return P99 TTFT of the requests of each rank."""
    times, of_rank = np.asarray(ttft_s), np.asarray(ranks)
    return {rank: float(np.percentile(times[of_rank == rank], 99)) for rank in sorted(set(ranks))}


def over_time(ttft_s: Sequence[float], arrivals_s: Sequence[float], window_s: float = 300.0) -> list[float | None]:
    """Return P99 TTFT of the requests that arrived in each window; None where nobody did."""
    windows = np.asarray(arrivals_s) // window_s
    times = np.asarray(ttft_s)
    return [
        float(np.percentile(times[windows == window], 99)) if (windows == window).any() else None
        for window in range(int(windows[-1]) + 1)
    ]


# --- the knee ----------------------------------------------------------------------------------------


def growth(samples: Iterable[Sample], until_s: float) -> float:
    """Return by how many requests per second the waiting ones become more: the slope of a line of least squares.

    Args:
        samples: of those who wait.
        until_s: end of the arrivals. Only the last two thirds before it count: the engine has filled by then.
    """
    kept = np.array([each for each in samples if SETTLED * until_s <= each.at_s <= until_s])
    return float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0])


def mean_growth(row: str, rate: float, each: Callable[[Iterable[Case]], Iterable[float]]) -> float:
    """Return by how much of the arrivals the waiting requests of a row become more, as a mean over the seeds."""
    requests = round(rate * HALF_HOUR_S)
    return fmean(each(Case(row=row, rate=rate, requests=requests, seed=seed) for seed in KNEE_SEEDS))


def find_knee(row: str, start: float, growth_at: Callable[[float], float]) -> dict[str, Any]:
    """Search the highest rate at which the waiting queue of a row does not grow.

    Args:
        row: the system, for the message.
        start: rate to begin with.
        growth_at: returns the mean growth at a rate, as a share of the arrivals.

    Raises:
        RuntimeError: there is none.
    """
    seen: dict[float, float] = {}

    def attainment(rate: float) -> float:
        seen[rate] = growth_at(rate)
        return float(seen[rate] <= GROWTH)

    peak: Peak = find_peak(attainment, 1.0, start, precision=KNEE_PRECISION)
    if peak.rate is None:
        raise RuntimeError(f"{row}: the queue grows at every rate")
    return {"rate": peak.rate, "growth": {f"{rate:.3f}": found for rate, found in sorted(seen.items())}}


def modelled_knee(row: str = FIFO) -> dict[str, Any]:
    """Return the knee of a row in Chameleon's setting, measured once."""
    return StoredRuns("admission.2").get(f"knee-{part_name(row)}", lambda: _search_knee(row))


def _search_knee(row: str) -> dict[str, Any]:
    with two_processes() as pool:
        return find_knee(row, 1.2, lambda rate: mean_growth(row, rate, lambda cases: pool.map(_modelled_growth, cases)))


def _modelled_growth(case: Case) -> float:
    return run_modelled(case).growth


def two_processes() -> ProcessPoolExecutor:
    """Return a pool of two processes, which import everything anew."""
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


WORDS_OF_KNEE = (
    f"the highest rate at which the waiting requests of {FIFO} become more, by a line of least squares "
    f"through the last two thirds of {HALF_HOUR_S / 60:.0f} minutes, by no more than {GROWTH:.0%} of the arrivals "
    f"(mean of {len(KNEE_SEEDS)} workloads; at a load of 1 chance alone makes about that much)"
)


# --- words -------------------------------------------------------------------------------------------


def setting_words() -> str:
    """Say what modelled runs run on what."""
    profile = load_profile(PROFILE)
    token_bytes = profile.geometry.block_bytes(1)
    lengths = azure_lengths()
    inputs, outputs = fmean(each.input_tokens for each in lengths), fmean(each.output_tokens for each in lengths)
    return (
        f"profile {PROFILE}, device pool {profile.pool_bytes / 2**30:.1f} GiB ({profile.pool_bytes // token_bytes:,} "
        f"tokens of KV), host pool {HOST_BYTES / 1e9:.0f} GB, at most {STEP_TOKENS} tokens and {MAX_RUNNING} sequences "
        f"in a step; {workload_words()}, {inputs:.0f} + {outputs:.0f} tokens on average; predictor {PREDICTOR}"
    )


def workload_words() -> str:
    """Say what is asked for."""
    ranks = ", ".join(map(str, PAPER_RANKS))
    return (
        f"lengths of Azure's conversation trace of 2023 (CC-BY 4.0), Poisson arrivals, {ADAPTERS} adapters of ranks "
        f"{ranks} on q, k, v, o, chosen by {CHOICE}"
    )


def part_name(text: str) -> str:
    """Return a row's name as part of a file's name."""
    return text.replace(":", "-").replace(",", "-").replace("=", "-")
