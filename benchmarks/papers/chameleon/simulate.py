"""Chameleon's modelled setting: one run at a rate, the search for a knee, and one request alone."""

import math
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np

from benchmarks.memory_bench import MemorySetting, PresetRun, modelled_rig, run_preset
from benchmarks.memory_work import MemoryWork, WorkOptions
from benchmarks.papers.runs import AZURE, trace
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.devices import DEVICE_MEMORY_SHARE
from lorikeet.workloads.arrivals import Rates, at_rate
from lorikeet.workloads.predictors import make_predictor
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.synthetic import PAPER_RANKS, adapter_names, spread
from lorikeet.workloads.workload import WorkloadRequest

S_LORA, CHAMELEON = "chameleon:s-lora", "chameleon"
CONTEXT_TOKENS = 4096
"""Llama-2's context. Longer prompts of the trace are cut so that prompt and answer fit."""
LONGEST_ANSWER_TOKENS = 1000
"""Of the trace (a test checks)."""
TBT_SLO_S = 0.15
"""Printed (5.2)."""
LOW_RATE, LOW_REQUESTS = 0.1, 200
"""Low load, which sets the limits: requests hardly overlap."""
SLO_TIMES = 5
POWER = "rank-power:1"
"""The i-th smallest rank has a share in proportion to 1/i, and all adapters of a rank have the same share.

The paper does not print the exponent.
"""

Figures = dict[str, Any]


class Setting(msgspec.Struct, frozen=True):
    """Conditions of a run besides the system and the load.

    Attributes:
        profile: name of a cost profile; the paper's own LoRA costs are those of ``@chameleon``.
        lengths: factor applied to the trace's lengths.
        link_gb_per_s: bandwidth of copies between host and device.
        step_tokens: maximum number of tokens of a step, which limits the batch of a prefill.
        adapters: number of adapters, whose ranks cycle through ``ranks``.
        ranks: see ``adapters``.
        choice: distribution of requests over adapters, see ``choose_adapters``.
        memory_gib: device memory in GiB; the engine uses 90 % of it. 0 for the profile's memory.
        accuracy: probability that the predictor of lengths is right.
        tbt_slo_s: limit on TBT; 0 for five times the profile's decode step of one sequence.
    """

    profile: str
    lengths: float
    link_gb_per_s: float
    step_tokens: int
    adapters: int = 100
    ranks: tuple[int, ...] = PAPER_RANKS
    choice: str = POWER
    memory_gib: float = 0.0
    accuracy: float = 0.8
    tbt_slo_s: float = TBT_SLO_S

    @property
    def window_s(self) -> float:
        """Seconds during which requests arrive: five times the longest answer at the limit on TBT."""
        limit_s = self.tbt_slo_s or SLO_TIMES * _decode_s(self.profile)
        return 5 * self.lengths * LONGEST_ANSWER_TOKENS * limit_s


@cache
def _decode_s(profile: str) -> float:
    """Return the seconds of a step with one decode."""
    step = load_profile(profile).step
    return step.tokens.points[0][1] + step.sampled_rows.points[0][1]


@cache
def lengths() -> tuple[WorkloadRequest, ...]:
    """Return the trace's requests, cut at the context."""
    return tuple(
        msgspec.structs.replace(each, input_tokens=min(each.input_tokens, CONTEXT_TOKENS - each.output_tokens))
        for each in trace(AZURE)
    )


def work_at(setting: Setting, rate: float, count: int, seed: int) -> MemoryWork:
    """Return a number of requests whose arrivals are stretched to have exactly a rate."""
    names, rates = tuple(adapter_names(setting.adapters)), Rates.constant(rate)
    recipe = Recipe(
        lengths=lengths(),
        length_scale=setting.lengths,
        rates=rates,
        count=count,
        adapters=names,
        ranks=tuple(spread(setting.ranks, setting.adapters)),
        adapter_choice=setting.choice,
        seed=seed,
    )
    return MemoryWork(at_rate(recipe.requests(), rates), names, 2, seed)


def run_at(preset: str, setting: Setting, rate: float, window_s: float, seed: int) -> Figures:
    """Return the figures of a system when requests arrive for ``window_s`` seconds and all are served."""
    return simulate_work(preset, setting, work_at(setting, rate, max(2, round(rate * window_s)), seed))


def simulate_work(preset: str, setting: Setting, work: MemoryWork) -> Figures:
    """Return the figures of a workload. Times are in seconds; TTFT counts from a request's arrival."""
    done = _run(preset, setting, work)
    exchanges, routes = done.run.exchanges, done.memory.transfers
    ttft_s = np.array([each.token_times_s[0] - each.due_s for each in exchanges])
    e2e_s = np.array([each.ended_s - each.due_s for each in exchanges])
    due_s, ended_s = (np.array([getattr(each, name) for each in exchanges]) for name in ("due_s", "ended_s"))
    tokens = np.array([each.input_tokens + each.output_tokens for each in exchanges])
    rank_of = dict(zip(work.names, spread(setting.ranks, setting.adapters), strict=True))
    ranks = np.array([rank_of[each.adapter] if each.adapter else 0 for each in exchanges])
    queue, memory, last_s = done.engine.queue, done.memory, due_s.max()
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "ttft_most_s": float(ttft_s.max()),
        "e2e_mean_s": float(e2e_s.mean()),
        "tbt_p99_ms": float(np.percentile(done.run.gaps_s, 99)) * 1e3 if len(done.run.gaps_s) else 0.0,
        "ttft_p99_by_rank_s": {
            str(rank): float(np.percentile(ttft_s[ranks == rank], 99)) for rank in np.unique(ranks).tolist()
        },
        "ttft_p99_by_minute_s": [
            float(np.percentile(ttft_s[due_s // 60 == minute], 99)) for minute in range(int(last_s // 60))
        ],
        "completed_share": float((ended_s <= last_s).mean()),
        "tokens_per_s": float(tokens[ended_s <= last_s].sum() / last_s) if last_s else 0.0,
        "hit_share": memory.adapter_hits / memory.adapter_queries,
        "loaded_bytes": sum(each.bytes for name, each in routes.items() if name.endswith("device")),
        "prefetched": memory.prefetched,
        "prefetched_used": memory.prefetched_used,
        "preemptions": done.engine.preemptions,
        "bypassed_share": queue.bypassed / len(exchanges) if queue else 0.0,
        "squashed_share": queue.squashed / len(exchanges) if queue else 0.0,
        "quota_tokens": list(queue.quota_tokens) if queue else [],
        "e2e_s": [round(float(each), 3) for each in e2e_s] if len(e2e_s) <= LOW_REQUESTS else [],
    }


def _run(preset: str, setting: Setting, work: MemoryWork) -> PresetRun:
    profile = load_profile(setting.profile)
    memory = profile.pool_bytes
    if setting.memory_gib:
        assert profile.weight_bytes is not None, "composed profiles have them"
        memory = int(setting.memory_gib * 2**30 * DEVICE_MEMORY_SHARE) - profile.weight_bytes
    engine = MemorySetting(
        memory_bytes=memory,
        host_memory_bytes=64 * 10**9,
        link_bytes_per_s=setting.link_gb_per_s * 1e9,
        max_num_seqs=256,
        max_num_batched_tokens=setting.step_tokens,
        num_scheduler_steps=1,
        max_model_len=CONTEXT_TOKENS,
    )
    options = WorkOptions(source="", adapters=setting.adapters, ranks=setting.ranks)
    predictor = make_predictor(f"oracle:{setting.accuracy:g}", work.requests, work.seed)
    done = run_preset(modelled_rig(profile, work, options), engine.settings(preset), work, predictor=predictor)
    failed = [each for each in done.run.exchanges if each.error is not None]
    if failed:
        raise RuntimeError(f"{preset}: {len(failed)} requests failed, the first with {failed[0].error}")
    return done


READINGS = ("mean-ttft", "p99-ttft", "execution")
"""Readings of the limit on P99 TTFT, which is five times one of S-LoRA's values at low load: mean TTFT or P99 TTFT (two
readings of "the TTFT achieved on a low-load system", 2), or the mean execution time (5.1)."""


def limits_s(setting: Setting, seed: int) -> dict[str, float]:
    """Return the limit on P99 TTFT in seconds for each reading."""
    low = simulate_work(S_LORA, setting, work_at(setting, LOW_RATE, LOW_REQUESTS, seed))
    found = (low["ttft_mean_s"], low["ttft_p99_s"], low["e2e_mean_s"])
    return {reading: SLO_TIMES * each_s for reading, each_s in zip(READINGS, found, strict=True)}


# --- knees -------------------------------------------------------------------------------------------

STEP = 1.07
"""Factor between neighbouring rates; a knee between two rates is interpolated."""


class Sweep:
    """Measures P99 TTFT of a system by rate, with one run per rate.

    Args:
        preset, setting, seed: see ``run_at``.
        near: a rate; the sweep tries this rate times powers of ``STEP``.
    """

    def __init__(self, preset: str, setting: Setting, seed: int, near: float) -> None:
        self._run = partial(run_at, preset, setting, window_s=setting.window_s, seed=seed)
        self._near = near
        self._p99_s: dict[int, float] = {}

    def knee(self, limit_s: float) -> float:
        """Return the rate at which P99 TTFT begins to exceed the limit.

        Between two rates, the logarithm of P99 is interpolated linearly over the logarithm of the rate.

        Raises:
            RuntimeError: no rate keeps the limit, or every rate does.
        """

        def excess(place: int) -> float:
            if place not in self._p99_s:
                self._p99_s[place] = self._run(rate=self._near * STEP**place)["ttft_p99_s"]
            return math.log(self._p99_s[place] / limit_s)

        low, stride = 0, 2
        while excess(low) > 0:
            low, stride = low - stride, 2 * stride
            if self._near * STEP**low < LOW_RATE:
                raise RuntimeError("no rate keeps the limit")
        high = min((place for place in self._p99_s if place > low), default=low + 2)
        while excess(high) <= 0:
            low, high = high, high + 2
            if high > 60:
                raise RuntimeError("the limit is kept at any rate: the run is too short to find a knee")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
        below, above = excess(low), excess(high)
        return self._near * STEP ** (low - below / (above - below))


def knees(preset: str, setting: Setting, limits: dict[str, float], near: float, seed: int) -> dict[str, float]:
    """Return the knee of a system for each reading of the limit.

    Args:
        preset, setting, seed: see ``run_at``.
        limits: limit on P99 TTFT by reading, in seconds.
        near: approximate knee in requests/s. The knee for the limit by mean TTFT is far below it.
    """
    sweeps = dict.fromkeys(READINGS, Sweep(preset, setting, seed, near))
    sweeps["mean-ttft"] = Sweep(preset, setting, seed, near / 2.5)
    return {reading: sweeps[reading].knee(limit_s) for reading, limit_s in limits.items()}


# --- one request alone -------------------------------------------------------------------------------


def alone(setting: Setting, rank: int, input_tokens: int) -> dict[str, float]:
    """Return the TTFT in seconds of one request alone: on the base model, with a resident adapter, and with a load."""
    one = msgspec.structs.replace(setting, adapters=1, ranks=(rank,), choice="uniform")
    (name,) = adapter_names(1)

    def ttft_s(preset: str, adapter: str | None) -> float:
        # The second of two requests far apart is measured, because S-LoRA has freed the adapter by then.
        requests = [WorkloadRequest(at_s, adapter, input_tokens, 2) for at_s in (0.0, 100.0)]
        exchange = _run(preset, one, MemoryWork(requests, (name,), 2, 1)).run.exchanges[1]
        return exchange.token_times_s[0] - exchange.due_s

    return {"base_s": ttft_s(CHAMELEON, None), "there_s": ttft_s(CHAMELEON, name), "loaded_s": ttft_s(S_LORA, name)}
