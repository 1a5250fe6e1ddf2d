"""What the modelled lines of issue 7 share: how rows run, and what is kept of a run."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lorikeet.bench.exchange import Exchange
from lorikeet.bench.memory_bench import MemorySetting, modelled_rig, run_row, settle
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.core.messages import EngineStats
from lorikeet.costs.profile import CostProfile

HOST_BYTES = 512 * 10**9
"""All adapters lie on the host."""


class ModeSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows run.

    Attributes:
        profile: of device and model.
        adapters: how many.
        rank, modules: of every one.
        memory_bytes: of the device for adapters and KV; 0 for the profile's.
        link_bytes_per_s: of each rank; 0 for the profile's.
        max_running, max_step_tokens: see ``EngineSettings``.
        max_model_tokens: longest sequence; 0 for the profile's.
    """

    profile: CostProfile
    adapters: int
    rank: int
    modules: tuple[str, ...]
    memory_bytes: int = 0
    link_bytes_per_s: float = 0.0
    max_running: int = 256
    max_step_tokens: int = 2048
    max_model_tokens: int = 0


def run_modes(row: str, setting: ModeSetting, work: MemoryWork) -> dict[str, Any]:
    """Run a workload on a fresh modelled replica whose adapters lie on the host, and return its figures.

    What the row prefetches has arrived when the first request does.

    Raises:
        RuntimeError: a request got no whole answer.
    """
    profile = setting.profile
    options = WorkOptions(source="", adapters=setting.adapters, ranks=(setting.rank,), modules=setting.modules)
    rig = modelled_rig(profile, work, options)
    memory = MemorySetting(
        memory_bytes=setting.memory_bytes or profile.pool_bytes,
        host_memory_bytes=HOST_BYTES,
        link_bytes_per_s=setting.link_bytes_per_s,
        max_running=setting.max_running,
        max_step_tokens=setting.max_step_tokens,
        max_repeat=1,
        max_model_tokens=setting.max_model_tokens,
    )
    done = run_row(rig, memory.settings(row), work, on_warm=settle)
    failed = [each for each in done.run.exchanges if each.error is not None]
    if failed:
        raise RuntimeError(f"{row}: {len(failed)} requests failed, the first with {failed[0].error}")
    return figures_of(done.run.exchanges, done.engine)


def figures_of(exchanges: Sequence[Exchange], stats: EngineStats) -> dict[str, Any]:
    """Return what is worth keeping of a run, as plain data.

    Latencies count from arrival. ``latency_per_token_s`` is dLoRA's: the sum of latencies over the sum of output
    tokens; ``tpt_mean_s`` is TOPPINGS': the mean of each request's latency per output token.
    """
    latencies_s = np.array([each.ended_s - each.due_s for each in exchanges])
    ttft_s = np.array([each.token_times_s[0] - each.due_s for each in exchanges])
    tokens = np.array([each.output_tokens for each in exchanges])
    return {
        "requests": len(exchanges),
        "latency_per_token_s": float(latencies_s.sum() / tokens.sum()),
        "thirds_latency_per_token_s": [
            float(some_s.sum() / some.sum())
            for some_s, some in zip(np.array_split(latencies_s, 3), np.array_split(tokens, 3), strict=True)
        ],
        "tpt_mean_s": float((latencies_s / tokens).mean()),
        "tpt_p90_s": float(np.percentile(latencies_s / tokens, 90)),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "e2e_mean_s": float(latencies_s.mean()),
        "drained_s": max(each.ended_s for each in exchanges),
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        **msgspec.to_builtins(stats.modes),
    }


def work_of(requests: Sequence[WorkloadRequest], names: Sequence[str], seed: int) -> MemoryWork:
    """Return requests of fresh prompts as a workload."""
    return MemoryWork(list(requests), tuple(names), 2, seed)
