"""Modelled runs and searches for peaks, which the papers' programs share."""

import gzip
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import ROOT
from benchmarks.memory_bench import MemorySetting, modelled_rig, preset_figures, run_preset, settle
from benchmarks.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.load_report import RequestResult
from lorikeet.bench.peak import find_peak
from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.request import Slo
from lorikeet.costs.profile import CostProfile
from lorikeet.papers.toppings.performance import PerformanceModel
from lorikeet.presets import resolve_preset
from lorikeet.simulator.cluster import ClusterChoice, simulate_cluster
from lorikeet.workloads.predictors import make_predictor
from lorikeet.workloads.prompts import Prompts
from lorikeet.workloads.synthetic import ATTENTION
from lorikeet.workloads.workload import WorkloadRequest, read_any

MAX_NUM_SEQS = 256
HOST_BYTES = 512 * 10**9
"""Host memory that holds all adapters."""
MOST_TIMES = 1_000
"""A search ends with an error if the rate exceeds its first rate by this factor."""
AZURE, MOONCAKE = "azure_llm_inference_conv_2023.csv", "mooncake_conversation_2025.jsonl"

Figures = dict[str, Any]


# --- one engine --------------------------------------------------------------------------------------


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the engine on which presets run.

    Attributes:
        profile: cost profile of device and model.
        adapters: number of adapters.
        ranks: ranks through which the adapters cycle.
        modules: modules that the adapters change.
        memory_bytes: device memory for adapters and KV; 0 for the profile's.
        host_bytes: host memory.
        link_bytes_per_s: bandwidth of each rank's link; 0 for the profile's.
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size: see ``EngineSettings`` and ``ModelSettings``.
        predictor: predictor of the lengths of answers; empty for none.
    """

    profile: CostProfile
    adapters: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...] = ATTENTION
    memory_bytes: int = 0
    host_bytes: int = HOST_BYTES
    link_bytes_per_s: float = 0.0
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = 2048
    max_model_len: int = 0
    block_size: int = 16
    predictor: str = ""
    settle: bool = False


def run_engine(
    preset: str,
    engine: Engine,
    work: MemoryWork,
    also: Callable[[Sequence[RequestResult]], Figures] = lambda exchanges: {},
) -> Figures:
    """Run a workload on a fresh modelled engine whose adapters are on the host, and return its figures.

    Args:
        preset: preset of the engine.
        engine: setting of the engine.
        work: requests and adapters.
        also: function that returns further figures.

    Raises:
        RuntimeError: a request got no whole answer.
    """
    options = WorkOptions(source="", adapters=engine.adapters, ranks=engine.ranks, modules=engine.modules)
    setting = MemorySetting(
        memory_bytes=engine.memory_bytes or engine.profile.pool_bytes,
        host_memory_bytes=engine.host_bytes,
        link_bytes_per_s=engine.link_bytes_per_s,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        num_scheduler_steps=1,
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
    )
    done = run_preset(
        modelled_rig(engine.profile, work, options),
        setting.settings(preset),
        work,
        on_warm=settle if engine.settle else lambda engine: None,
        predictor=make_predictor(engine.predictor, work.requests, work.seed) if engine.predictor else None,
    )
    figures = preset_figures(preset, done)
    figures |= latencies(preset, done.run.exchanges) | msgspec.to_builtins(done.engine.modes)
    return figures | also(done.run.exchanges)


def latencies(preset: str, exchanges: Sequence[RequestResult], limits_s: Sequence[float] = ()) -> Figures:
    """Return the latencies that the papers report, counted from each request's arrival.

    ``tpt`` is a request's latency divided by its output tokens (TOPPINGS), ``latency_per_token_s`` the sum of latencies
    divided by the sum of output tokens (dLoRA), ``within`` the share of requests whose ``tpt`` keeps each limit.

    Raises:
        RuntimeError: a request got no whole answer.
    """
    failed = [each for each in exchanges if each.error is not None]
    if failed:
        raise RuntimeError(f"{preset}: {len(failed)} requests failed, the first with {failed[0].error}")
    latencies_s = np.array([each.ended_s - each.due_s for each in exchanges])
    ttft_s = np.array([each.token_times_s[0] - each.due_s for each in exchanges])
    tokens = np.array([each.output_tokens for each in exchanges])
    tpt_s = latencies_s / tokens
    later = tokens > 1
    return {
        "ttft_s": [round(float(each), 4) for each in ttft_s],
        "ttft_mean_s": float(ttft_s.mean()),
        **{f"ttft_p{percent}_s": float(np.percentile(ttft_s, percent)) for percent in (50, 95, 99)},
        "tpt_mean_s": float(tpt_s.mean()),
        "e2e_mean_s": float(latencies_s.mean()),
        "tbt_mean_s": float(((latencies_s - ttft_s)[later] / (tokens[later] - 1)).mean()) if later.any() else 0.0,
        "e2e_p90_s": float(np.percentile(latencies_s, 90)),
        "latency_per_token_s": float(latencies_s.sum() / tokens.sum()),
        "within": [float((tpt_s <= limit_s).mean()) for limit_s in limits_s],
        "drained_s": max(each.ended_s for each in exchanges),
    }


def work_of(requests: Sequence[WorkloadRequest], names: Sequence[str], seed: int) -> MemoryWork:
    """Return requests of fresh prompts as a workload."""
    return MemoryWork(list(requests), tuple(names), 2, seed)


# --- a cluster ---------------------------------------------------------------------------------------


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the replicas on which presets run; requests that arrive before ``since_s`` do not count.

    ``step_models`` are TOPPINGS', see ``Toppings.build``; ``history`` see ``ClusterChoice``.
    """

    profile: CostProfile
    replicas: int
    adapters: tuple[AdapterRef, ...]
    slo: Slo = Slo()
    limits_s: tuple[float, ...] = ()
    link_bytes_per_s: float = 0.0
    memory_bytes: int = 0
    max_num_seqs: int = MAX_NUM_SEQS
    block_size: int = 16
    since_s: float = 0.0
    step_models: tuple[PerformanceModel, PerformanceModel] | None = None
    history: tuple[tuple[WorkloadRequest, ...], ...] = ()


def run_cluster(preset: str, setting: Cluster, requests: Sequence[WorkloadRequest], seed: int) -> Figures:
    """Run a workload on fresh modelled replicas, and return its figures.

    Raises:
        RuntimeError: a request got no whole answer.
    """
    engine = EngineSettings(
        preset=preset,
        num_scheduler_steps=1,
        max_num_seqs=setting.max_num_seqs,
        host_memory_bytes=HOST_BYTES,
        memory_bytes=setting.memory_bytes,
        link_bytes_per_s=setting.link_bytes_per_s,
        block_size=setting.block_size,
    )
    refs: dict[str, AdapterRef] = {ref.name: ref for ref in setting.adapters}
    measured = setting.step_models is not None and resolve_preset(preset)[1].routing.startswith("toppings")
    parameters = {"step_models": setting.step_models} if measured else {}
    choice = ClusterChoice(setting.replicas, seed, setting.slo, routing_parameters=parameters, history=setting.history)
    made = simulate_cluster(Settings(engine=engine), setting.profile, requests, refs, Prompts(seed), choice)
    assert made.cluster is not None
    counted = [each for each in made.run.exchanges if each.error is not None or each.due_s >= setting.since_s]
    figures = latencies(preset, counted, setting.limits_s)
    return figures | {
        "held_most": [each.held_most for each in made.cluster.replicas],
        "routed_most": [each.routed_most for each in made.cluster.replicas],
        "routed_bytes_most": [each.routed_bytes_most for each in made.cluster.replicas],
        "held_share": made.cluster.held_share,
        "moves": made.cluster.moves,
    }


# --- searches ----------------------------------------------------------------------------------------


def peak(holds_by: Callable[[float], float], first_rate: float, precision: float) -> float:
    """Return the highest rate at which ``holds_by``, a limit divided by the measured value, is at least 1.

    Raises:
        RuntimeError: no rate keeps the limit, or every tried rate does.
    """

    def attainment(rate: float) -> float:
        if rate > MOST_TIMES * first_rate:
            raise RuntimeError(f"the limit is kept even at {rate:.0f}/s: the run is too short to find a peak")
        return holds_by(rate)

    found = find_peak(attainment, 1.0, first_rate, precision=precision).rate
    if found is None:
        raise RuntimeError("no rate keeps the limit")
    return found


# --- traces and words --------------------------------------------------------------------------------


@cache
def trace(name: str, most: int | None = None) -> tuple[WorkloadRequest, ...]:
    """Return the requests of one of the public traces in ``benchmarks/data``."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-trace-") as folder:
        file = Path(folder) / name
        file.write_bytes(gzip.decompress((ROOT / "benchmarks" / "data" / f"{name}.gz").read_bytes()))
        return tuple(islice(read_any(file), most))
