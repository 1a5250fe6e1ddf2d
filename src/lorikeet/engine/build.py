"""From settings to a replica that runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from lorikeet import __version__
from lorikeet.config import ConfigError, ExecutorKind, Settings
from lorikeet.core.clock import Clock, MonotonicClock, WaitableClock
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.engine.executor import EngineSizes, Executor
from lorikeet.engine.loop import Engine
from lorikeet.engine.memory_build import build_memory
from lorikeet.engine.modelled_build import build_paced_executor
from lorikeet.engine.recording import FileRecorder
from lorikeet.engine.records import Header
from lorikeet.engine.torch_executor import build_torch_executor
from lorikeet.memory.tree import Kind
from lorikeet.presets import ColdStart, KvAfterFinish, MemorySplit, resolve_preset
from lorikeet.scheduling.batching import BATCHING
from lorikeet.scheduling.limits import Limits
from lorikeet.scheduling.policies import ADMISSION
from lorikeet.scheduling.scheduler import Scheduler

T = TypeVar("T")


class Replica(NamedTuple):
    """An engine and the sizes of what it runs on."""

    engine: Engine
    sizes: EngineSizes
    notes: tuple[str, ...]
    """What was chosen, in words, for the start-up log."""


def build_replica(
    settings: Settings,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    on_load_done: Callable[[], None] = lambda: None,
    clock: WaitableClock | None = None,
    on_ran: Callable[[StepPlan, StepResult], None] | None = None,
) -> Replica:
    """Build a replica on the real clock, with the executor that the settings name.

    Args:
        settings: all settings; ``settings.model.model`` is a local folder.
        progress: called with (stage, done, total) while loading.
        on_load_done: called, on another thread, when a transfer has ended.
        clock: one that goes about as fast as the real one, instead of it.
        on_ran: see ``Engine``.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ProfileError: the profile of a paced executor cannot be used.
        ValueError: the model or its weights cannot be used.
        ExecutorError: a rank or a loader process did not start.
    """
    _, preset = resolve_preset(settings.engine.preset)
    clock = clock or MonotonicClock()
    executor: Executor
    if settings.engine.executor is ExecutorKind.PACED:
        executor, sizes = build_paced_executor(settings, preset, clock, on_load_done)
    else:
        executor, _, sizes = build_torch_executor(settings, Path(settings.model.model), progress, on_load_done)
    return assemble(settings, executor, sizes, clock, on_ran)


def assemble(
    settings: Settings,
    executor: Executor,
    sizes: EngineSizes,
    clock: Clock,
    on_ran: Callable[[StepPlan, StepResult], None] | None = None,
) -> Replica:
    """Put a replica together around an executor: the same on every executor and clock.

    Raises:
        ConfigError: the preset is unknown, its options do not go together, or its share for KV cannot hold the longest
            sequence.
        OSError: the recording cannot be written.
    """
    name, preset = resolve_preset(settings.engine.preset)
    memory = build_memory(preset, sizes, settings.engine.max_num_batched_tokens)
    sizes = sizes._replace(max_adapter_blocks=min(sizes.max_adapter_blocks, memory.room.limit(Kind.ADAPTER)))
    if reason := memory.why_impossible(None, sizes.max_model_len):
        raise ConfigError(f"preset {name}: the longest sequence does not fit: {reason}; lower max_model_len")
    limits = Limits(
        max_num_seqs=settings.engine.max_num_seqs,
        max_num_batched_tokens=settings.engine.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_scheduler_steps=settings.engine.num_scheduler_steps,
        multi_step_limit_s=settings.engine.multi_step_limit_s,
        overlaps=sizes.overlaps,
    )
    admission = _policy(name, "admission", preset.admission, ADMISSION)
    batching = _policy(name, "batching mode", preset.batching_mode, BATCHING)
    if preset.batching_mode != "unmerged" and (preset.max_step_adapters or preset.memory_split is MemorySplit.STATIC):
        raise ConfigError(
            f"preset {name}: batching mode {preset.batching_mode} chooses the adapters of a step by itself: it goes with "
            "neither max_step_adapters nor a static split of the memory"
        )
    if preset.memory_split is MemorySplit.STATIC and preset.dependency_tree and preset.kv_after_finish is KvAfterFinish.KEPT:
        raise ConfigError(
            f"preset {name}: an adapter would leave its part of the memory after its KV alone, and nothing in that part "
            "makes KV leave the other: a static split goes with dependency_tree=false or kv_after_finish=dropped"
        )
    scheduler = Scheduler(memory, admission, limits, preset, batching, sizes.assist)
    recorder = _recorder(settings, name, sizes)
    engine = Engine(scheduler, memory, executor, clock, preset.cold_start, on_ran, recorder)
    arena_mib = sizes.total_blocks * sizes.block_bytes * settings.engine.memory_ranks / 2**20
    notes = [
        f"preset {settings.engine.preset} is {name}: {preset}",
        f"device memory for adapters and KV: {sizes.total_blocks} blocks of {sizes.block_size} tokens, "
        f"{arena_mib:.0f} MiB; host memory: {sizes.host_blocks} blocks; kernels: {sizes.kernels}",
    ]
    if preset.cold_start in (ColdStart.ASSIST, ColdStart.AUTO) and sizes.assist is None:
        notes.append(
            "cold prefills are not assisted, so requests wait for their adapters: that takes host memory, host "
            "workers, an x86-64 CPU and no more than one GPU, or a profile that knows host_lora"
        )
    if recorder is not None:
        notes.append(f"recording to {recorder.path}")
    return Replica(engine, sizes, tuple(notes))


def _policy(preset: str, option: str, policy: str, table: Mapping[str, T]) -> T:
    if policy not in table:
        raise ConfigError(f"preset {preset}: no {option} is called {policy!r}; there are: {', '.join(table)}")
    return table[policy]


def _recorder(settings: Settings, preset: str, sizes: EngineSizes) -> FileRecorder | None:
    if not settings.engine.record:
        return None
    engine = msgspec.structs.replace(settings.engine, preset=preset, record="")
    return FileRecorder.create(Path(settings.engine.record), Header(__version__, engine, sizes))
