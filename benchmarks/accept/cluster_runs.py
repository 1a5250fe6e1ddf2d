"""What the three parts of cluster.3 share: how a row runs on modelled replicas, what is kept of a run, and peaks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lorikeet.bench.prompts import Prompts
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.config import EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.slo import Slo
from lorikeet.costs.profile import CostProfile
from lorikeet.simulator.cluster import ClusterChoice, simulate_cluster

HOST_BYTES = 512 * 10**9
"""All adapters that a replica serves lie on its host."""

Figures = dict[str, Any]


class ClusterSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows run.

    Attributes:
        profile: of each replica.
        replicas: how many.
        adapters: that requests may ask for.
        slo: that policies are to keep.
        limits_s: of TTFT and of latency per output token; how many requests keep the latter is counted.
        link_bytes_per_s: of each rank; 0 for the profile's.
        memory_bytes: of each replica's devices for adapters and KV; 0 for the profile's.
        max_running: most requests in a step.
        since_s: requests that arrive before do not count.
    """

    profile: CostProfile
    replicas: int
    adapters: tuple[AdapterRef, ...]
    slo: Slo = Slo()
    limits_s: tuple[float, ...] = ()
    link_bytes_per_s: float = 0.0
    memory_bytes: int = 0
    max_running: int = 256
    since_s: float = 0.0


def run_cluster(row: str, setting: ClusterSetting, requests: Sequence[WorkloadRequest], seed: int) -> Figures:
    """Run a workload on fresh modelled replicas, and return its figures as plain data.

    Latencies count from arrival. ``tpt`` is a request's latency ÷ its output tokens (TOPPINGS),
    ``latency_per_token_s`` the sum of latencies ÷ the sum of output tokens (dLoRA); ``within`` is the share of requests
    whose ``tpt`` keeps each of the setting's limits.

    Raises:
        RuntimeError: a request got no whole answer.
    """
    engine = EngineSettings(
        row=row,
        max_repeat=1,
        max_running=setting.max_running,
        host_memory_bytes=HOST_BYTES,
        memory_bytes=setting.memory_bytes,
        link_bytes_per_s=setting.link_bytes_per_s,
    )
    choice = ClusterChoice(setting.replicas, seed, setting.slo)
    refs: dict[str, AdapterRef] = {ref.name: ref for ref in setting.adapters}
    made = simulate_cluster(Settings(engine=engine), setting.profile, requests, refs, Prompts(seed), choice)
    exchanges, cluster = made.run.exchanges, made.cluster
    failed = [each for each in exchanges if each.error is not None]
    if failed:
        raise RuntimeError(f"{row}: {len(failed)} requests failed, the first with {failed[0].error}")
    assert cluster is not None
    counted = [each for each in exchanges if each.due_s >= setting.since_s]
    latencies_s = np.array([each.ended_s - each.due_s for each in counted])
    ttft_s = np.array([each.token_times_s[0] - each.due_s for each in counted])
    tokens = np.array([each.output_tokens for each in counted])
    tpt_s = latencies_s / tokens
    return {
        "requests": len(counted),
        "duration_s": cluster.duration_s,
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
        "tbt_mean_s": float(np.mean([each.tpot_s for each in counted if each.tpot_s is not None])),
        "tpt_mean_s": float(tpt_s.mean()),
        "latency_per_token_s": float(latencies_s.sum() / tokens.sum()),
        "within": [float((tpt_s <= limit_s).mean()) for limit_s in setting.limits_s],
        "busy": [each.busy_share for each in cluster.replicas],
        "sent": [each.requests for each in cluster.replicas],
        "held_most": [each.held_most for each in cluster.replicas],
        "held_share": cluster.held_share,
        "placements": cluster.placements,
        "fetches": cluster.fetches,
        "moves": cluster.moves,
        "preemptions": sum(each.preemptions for each in made.stats),
    }


def ladder(low: float, step: float, count: int) -> list[float]:
    """Return ``count`` rates, each ``step`` times the one before."""
    return [low * step**number for number in range(count)]


def highest(rates: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """Return the highest of rising rates at which something holds that holds below and not above; None: at none."""
    known, first_missed = -1, len(rates)
    while first_missed - known > 1:
        middle = (known + first_missed) // 2
        if holds(rates[middle]):
            known = middle
        else:
            first_missed = middle
    return None if known < 0 else rates[known]


def mean_of(made: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the mean of a figure over runs."""
    return float(np.mean([each[key] for each in made]))
