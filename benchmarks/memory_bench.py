"""Runs presets on one workload, one engine after the other in this process, to compare their memory management."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.memory_watch import MemoryWatch, PoolSample, TtftParts
from benchmarks.memory_work import MemoryWork, WorkOptions, files_of_adapters
from lorikeet.bench.in_process import WorkloadRun, run_workload
from lorikeet.bench.replicas import StartedReplica, live_replica, modelled_replica
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.messages import EngineStats, MemoryStats, RouteStats
from lorikeet.core.process_tuning import frozen_gc
from lorikeet.core.request import Slo
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.loop import Engine
from lorikeet.kernels.devices import torch_dtype
from lorikeet.models.config import read_model_config
from lorikeet.workloads.predictors import Predictor
from lorikeet.workloads.synthetic import adapters_by_name
from lorikeet.workloads.workload import WorkloadRequest

WARM_UP = (WorkloadRequest(0.0, None, 128, 16),) * 8
"""On the base model, so that no adapter is known from the warm-up."""

_SAMPLE_S = 0.25


class MemorySetting(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the settings that all presets share; see ``EngineSettings`` and ``ModelSettings``."""

    memory_bytes: int
    host_memory_bytes: int
    link_bytes_per_s: float = 0.0
    model: str = ""
    dtype: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    num_scheduler_steps: int = 8
    max_model_len: int = 0
    threads: int = 0
    touch_memory: bool = False

    def settings(self, preset: str) -> Settings:
        """Return the settings of a replica with a preset."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        model = {name: given.pop(name) for name in ("model", "dtype", "max_model_len")}
        return Settings(ModelSettings(**model), EngineSettings(preset=preset, **given))


class MemoryRig(NamedTuple):
    """What presets run on.

    Attributes:
        geometry: geometry of the base model.
        vocabulary: number of the model's token ids.
        adapters: adapters by name.
        start: function that starts a replica.
        warm_up: requests before each run.
    """

    geometry: ModelGeometry
    vocabulary: int
    adapters: dict[str, AdapterRef]
    start: Callable[[Settings], StartedReplica]
    warm_up: tuple[WorkloadRequest, ...]


def live_rig(model: Path, dtype: str, work: MemoryWork, options: WorkOptions, folder: Path) -> MemoryRig:
    """Return a rig that computes on the real clock; adapters are written below ``folder``.

    Raises:
        ValueError: the model's config or the dtype is not supported.
    """
    config = read_model_config(model)
    geometry = config.geometry(torch_dtype(config.dtype if dtype == "auto" else dtype).itemsize)
    adapters = files_of_adapters(work.names, options.ranks, options.modules, geometry, folder)
    return MemoryRig(geometry, config.vocab_size, adapters, live_replica, WARM_UP)


def modelled_rig(profile: CostProfile, work: MemoryWork, options: WorkOptions) -> MemoryRig:
    """Return a rig of modelled replicas on virtual clocks, which need no files and no warm-up."""
    adapters = adapters_by_name(work.names, options.ranks, profile.geometry, modules=options.modules)
    return MemoryRig(profile.geometry, profile.vocabulary, adapters, partial(modelled_replica, profile=profile), ())


class PresetRun(NamedTuple):
    """Holds the run of a preset, without the engine, whose memory is large.

    Attributes:
        run: request records.
        samples, parts, reusable_tokens: see ``MemoryWatch``.
        began, memory: memory statistics before and after.
        engine: engine statistics at the end.
    """

    run: WorkloadRun
    samples: list[PoolSample]
    parts: list[TtftParts]
    reusable_tokens: int
    began: MemoryStats
    memory: MemoryStats
    engine: EngineStats


def run_preset(
    rig: MemoryRig,
    settings: Settings,
    work: MemoryWork,
    *,
    on_warm: Callable[[Engine], None] = lambda engine: None,
    on_finished: Callable[[int], None] = lambda finished: None,
    predictor: Predictor | None = None,
) -> PresetRun:
    """Run a workload on a new replica: warm up, fill the host tier from the adapters' files, run, close.

    Args:
        rig: model, adapters and way to start replicas.
        settings: of the replica.
        work: the workload.
        on_warm: called when the replica is warm.
        on_finished: called with the number of requests that have ended.
        predictor: predicts the lengths of answers.

    Raises:
        ConfigError: a setting does not fit the model, the profile or the machine.
        ExecutorError: a step failed.
    """
    with warm_replica(rig, settings, work) as ((engine, sizes, *_), clock, coalesced):
        on_warm(engine)
        watch = MemoryWatch(engine, clock, sizes.block_size, _SAMPLE_S)
        run = run_workload(
            engine,
            clock,
            work.requests,
            rig.adapters,
            work.prompts_of(rig.vocabulary),
            coalesced=coalesced,
            on_finished=on_finished,
            observer=watch,
            predictor=predictor,
        )
        stats = engine.stats()
    return PresetRun(run, watch.samples, watch.parts, watch.reusable_tokens, watch.began, stats.memory, stats)


@contextmanager
def warm_replica(rig: MemoryRig, settings: Settings, work: MemoryWork) -> Iterator[StartedReplica]:
    """Yield a new replica that has run the warm-up and read its adapters into the host tier. Close it at the end.

    Raises:
        ConfigError: a setting does not fit the model, the profile or the machine.
        ExecutorError: a step failed.
    """
    started = rig.start(settings)
    (engine, *_), clock, coalesced = started
    warm_up = [_shortened(request, work.longest_tokens) for request in rig.warm_up]
    with closing(engine):
        ran = run_workload(engine, clock, warm_up, {}, work.prompts_of(rig.vocabulary, run=1), coalesced=coalesced)
        if failed := [exchange for exchange in ran.exchanges if exchange.error is not None]:
            raise ExecutorError(f"a warm-up request failed: {failed[0].error}: {failed[0].message}")
        fill_host(engine, tuple(rig.adapters.values()))
        with frozen_gc():
            yield started


def _shortened(request: WorkloadRequest, most_tokens: int) -> WorkloadRequest:
    """Return a request that is shortened to ``most_tokens`` tokens."""
    output_tokens = min(request.output_tokens, max(1, most_tokens // 2))
    input_tokens = min(request.input_tokens, most_tokens - output_tokens)
    return msgspec.structs.replace(request, input_tokens=input_tokens, output_tokens=output_tokens)


def fill_host(engine: Engine, adapters: tuple[AdapterRef, ...]) -> None:
    """Register adapters, and wait until those that fit have been read into the host tier."""
    engine.register_adapters(adapters)
    engine.step()
    while engine.host_fill_pending:
        if not engine.is_busy:
            engine.wait_for_transfer()
        engine.step()


def settle(engine: Engine) -> None:
    """Wait until no transfer is in flight, so that what a preset prefetches is loaded."""
    engine.step()
    while engine.has_transfers:
        engine.wait_for_transfer()
        engine.step()


def preset_figures(preset: str, measured: PresetRun) -> dict[str, Any]:
    """Return the figures of a preset as plain data.

    Hit rates count requests and tokens found on the device at arrival: of adapters, and of the tokens that an infinite
    cache would have found (ELORA spec, R17). A rate is None if the infinite cache found nothing. Prefetches before the
    first request count in ``prefetch_accuracy``, because requests use them.
    """
    figures = measured.run.figures(Slo())
    memory = measured.memory
    began = measured.began
    queries = memory.adapter_queries - began.adapter_queries
    reusable = measured.reusable_tokens
    adapter_rate = _share(memory.adapter_hits - began.adapter_hits, queries)
    kv_rate = _share(memory.kv_hits_tokens - began.kv_hits_tokens, reusable)
    prefetched = memory.prefetched - began.prefetched
    decisions = memory.decisions
    return {
        "preset": preset,
        "requests": figures.requests,
        "completed": figures.completed,
        "errors": {kind: error.example for kind, error in figures.errors.items()},
        "duration_s": figures.duration_s,
        "ttft_mean_s": _of(figures.ttft_s, "mean"),
        "ttft_p95_s": _of(figures.ttft_s, "p95"),
        "ttft_p99_s": _of(figures.ttft_s, "p99"),
        "tpot_mean_s": _of(figures.tpot_s, "mean"),
        "tpot_p95_s": _of(figures.tpot_s, "p95"),
        "tpot_p99_s": _of(figures.tpot_s, "p99"),
        "e2e_mean_s": _of(figures.e2e_s, "mean"),
        "held_mean_s": _of(figures.held_s, "mean"),
        "ttft_parts_s": _mean_parts(measured.parts),
        "invalid_kv_share": memory.invalid_kv_share,
        "kv_hit_rate": kv_rate,
        "kv_host_hit_rate": _share(memory.kv_host_hits_tokens - began.kv_host_hits_tokens, reusable),
        "adapter_hit_rate": adapter_rate,
        "hit_rate": None if adapter_rate is None or kv_rate is None else (adapter_rate + kv_rate) / 2,
        "cached_share": figures.cached_share,
        "preemptions": measured.engine.preemptions,
        "packing_waste_bytes": memory.packing_waste_bytes,
        "transfers": {
            route: {
                "transfers": now.transfers - before.transfers,
                "bytes": now.bytes - before.bytes,
                "failed": now.failed - before.failed,
                "link_use": (now.busy_s - before.busy_s) / figures.duration_s,
            }
            for route, now in memory.transfers.items()
            for before in [began.transfers.get(route, RouteStats(0, 0, 0, 0.0))]
        },
        "prefetched": prefetched,
        "prefetch_accuracy": _share(memory.prefetched_used, memory.prefetched),
        "decision_mean_s": decisions.total_s / decisions.count if decisions.count else None,
        "decision_worst_s": decisions.worst_s if decisions.count else None,
        "nodes": memory.nodes,
        "metadata_bytes": memory.metadata_bytes,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _of(distribution: Any, key: str) -> float | None:
    return None if distribution is None else float(getattr(distribution, key))


def _mean_parts(parts: Sequence[TtftParts]) -> dict[str, float] | None:
    if not parts:
        return None
    return dict(zip(TtftParts._fields, np.mean(parts, axis=0).tolist(), strict=True))
