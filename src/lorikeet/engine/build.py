"""Builds a replica from settings: memory, scheduler, executor and loop."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from lorikeet import __version__
from lorikeet.config import ConfigError, ExecutorKind, Settings
from lorikeet.core.adapter import AdapterRef, Shape
from lorikeet.core.clock import Clock, MonotonicClock, WaitableClock
from lorikeet.core.executor import Executor
from lorikeet.core.machine import usable_cores
from lorikeet.core.plan import KernelForm, StepPlan, StepResult
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.iteration_costs import iteration_costs
from lorikeet.engine.loop import Engine
from lorikeet.engine.recording import FileRecorder, Header
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.kv_events import BlockTokens, KvEvents
from lorikeet.memory.memory import Memory
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.packing import pack
from lorikeet.memory.policies.base import StepForecast
from lorikeet.memory.tree import NodeKind
from lorikeet.policies import ADMISSION, BATCHING
from lorikeet.presets import (
    ColdStart,
    KvAfterFinish,
    MemorySplit,
    Preset,
    describe_preset,
    resolve_preset,
)
from lorikeet.scheduling.assist_planner import AssistPlanner
from lorikeet.scheduling.engine_load import EngineLoad
from lorikeet.scheduling.scheduler import Scheduler
from lorikeet.scheduling.state import SchedulerLimits
from lorikeet.worker.grammars import GrammarCompiler
from lorikeet.worker.modelled import build_paced_executor, transfer_model
from lorikeet.worker.threads import requested_threads
from lorikeet.worker.torch_executor import build_torch_executor

_CACHE_SIZE = 1024
"""Bound of caches by adapter ranks, since every version may have different ranks on every layer."""


def build_memory(
    preset: Preset,
    sizes: EngineSizes,
    forecast: StepForecast | None = None,
    tokens: BlockTokens | None = None,
    image_memory_bytes: int = 0,
) -> Memory:
    """Build the memory of a replica.

    Args:
        preset: the preset with the memory's policies and options.
        sizes: sizes of the executor.
        forecast: the prediction of steps for the policies; None without one.
        tokens: the tokens of blocks, for events of KV; None without events.
        image_memory_bytes: size of the embeddings of images that are kept.

    Raises:
        ConfigError: the preset names a policy that does not exist.
    """
    return Memory(
        sizes.total_blocks,
        sizes.host_blocks,
        sizes.block_size,
        sizes.block_bytes,
        _adapter_sizes(sizes),
        preset.eviction,
        preset.prefetch,
        memory_options(preset),
        forecast,
        tokens,
        sizes.local_geometry.state_blocks(sizes.block_size),
        0 if sizes.images is None else image_memory_bytes // sizes.images.token_bytes,
    )


def memory_options(preset: Preset) -> MemoryOptions:
    """Return the memory options of a preset."""
    return MemoryOptions(
        keep_kv=preset.kv_after_finish is KvAfterFinish.KEPT,
        host_kv=preset.host_kv,
        dependent=preset.dependency_tree,
        adapter_share=preset.adapter_share if preset.memory_split is MemorySplit.STATIC else None,
        padded_slots=preset.padded_slots,
        adapter_chain=preset.adapter_chain,
        keep_adapters=preset.keep_adapters,
        tick_s=preset.swap_interval_s,
        guard=preset.guard,
    )


def _adapter_sizes(sizes: EngineSizes) -> Callable[[AdapterRef], AdapterSize]:
    """Return a cached function that computes the size of an adapter. Thousands of versions share a few sizes."""
    geometry = sizes.local_geometry
    block_elements = geometry.block_elements(sizes.block_size)

    @lru_cache(_CACHE_SIZE)
    def size(shape: Shape) -> AdapterSize:
        ranks, extras = shape
        packing = pack(dict(ranks), geometry, block_elements, extras)
        return AdapterSize(packing.blocks, packing.used_elements * geometry.dtype_bytes)

    return lambda ref: size(ref.shape)


class Replica(NamedTuple):
    """A replica: an engine, the sizes of its executor, and lines for the log."""

    engine: Engine
    sizes: EngineSizes
    notes: tuple[str, ...]
    """Lines for the start-up log."""
    grammars: GrammarCompiler | None = None
    """The compiler of requests' grammars; None if this executor computes no answers."""
    kv_events: KvEvents | None = None
    """Finds changes of cached KV; None if the settings name no address for events."""


def build_replica(
    settings: Settings,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    on_load_done: Callable[[], None] = lambda: None,
    clock: WaitableClock | None = None,
    on_ran: Callable[[StepPlan, StepResult], None] | None = None,
    before_pool: Callable[[], None] = lambda: None,
) -> Replica:
    """Build a replica on the real clock, with the executor that the settings select.

    Args:
        settings: all settings. ``settings.model.model`` is a local folder.
        progress: function called with (stage, done, total) while loading.
        on_load_done: function called on another thread when a transfer has ended.
        clock: a clock to use instead of the real one. It must run about as fast as real time.
        on_ran: function called with every plan that has run, and the plan's result.
        before_pool: function called once the weights are loaded, before memory for KV and adapters is allocated.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ProfileError: the profile of a paced executor cannot be used.
        ValueError: the model or its weights cannot be used.
        ExecutorError: a rank or a loader process did not start.
    """
    if settings.engine.deterministic:
        settings = deterministic(settings)
    _, preset = resolve_preset(settings.engine.preset)
    clock = clock or MonotonicClock()
    if settings.engine.executor is ExecutorKind.PACED:
        before_pool()
        paced, sizes = build_paced_executor(settings, preset, clock, on_load_done)
        return assemble(settings, paced, sizes, clock, on_ran)
    executor, _, sizes = build_torch_executor(settings, Path(settings.model.model), progress, on_load_done, before_pool)
    if settings.engine.profile and "iterations" in BATCHING.load(preset.batching).needs:
        profile = load_profile(settings.engine.profile)
        sizes = sizes._replace(iterations=iteration_costs(transfer_model(settings.engine, profile), preset))
    return assemble(settings, executor, sizes, clock, on_ran)._replace(grammars=executor.grammars)


def deterministic(settings: Settings) -> Settings:
    """Return the settings of an engine whose answers may not depend on other requests.

    Host cores compute no LoRA, since they round differently from the device's kernels.

    Raises:
        ConfigError: the preset or another setting makes answers depend on other requests.
    """
    name, preset = resolve_preset(settings.engine.preset)
    engine = settings.engine
    refused = {
        f"preset {name} merges adapters into the base's weights": BATCHING.load(preset.batching).merges,
        f"preset {name} computes LoRA by einsum over the adapters of a batch": preset.kernel_form is KernelForm.EINSUM,
        "the sums of several ranks depend on the batch": engine.ranks > 1,
        "a paced executor computes nothing": engine.executor is not ExecutorKind.TORCH,
    }
    for why, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"deterministic: {why}")
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(engine, host_lora_workers=0))


def assemble(
    settings: Settings,
    executor: Executor,
    sizes: EngineSizes,
    clock: Clock,
    on_ran: Callable[[StepPlan, StepResult], None] | None = None,
) -> Replica:
    """Build memory, scheduler and loop around an executor. All executors and clocks use this function.

    Raises:
        ConfigError: the preset is unknown, its options cannot be combined, or its share for KV cannot hold the longest
            sequence.
        OSError: the recording cannot be written.
    """
    name, wanted = resolve_preset(settings.engine.preset)
    preset = _runnable(wanted, sizes)
    _check_memory_split(name, preset)
    load = EngineLoad(settings.engine.objective)
    tokens = BlockTokens(sizes.block_size) if settings.kv_events.endpoint else None
    memory = build_memory(preset, sizes, load, tokens, settings.engine.image_memory_bytes)
    if reason := memory.why_impossible(None, sizes.max_model_len):
        raise ConfigError(f"preset {name}: the longest sequence does not fit: {reason}; lower max_model_len")
    sizes = sizes._replace(max_adapter_blocks=min(sizes.max_adapter_blocks, memory.evictor.limit(NodeKind.ADAPTER)))
    scheduler = _build_scheduler(settings, preset, sizes, memory, load)
    recorder = _recorder(settings, name, sizes)
    engine = Engine(scheduler, memory, executor, clock, preset.cold_start, on_ran, recorder)
    notes = _notes(settings, preset, sizes)
    if preset != wanted:
        notes.append(f"preset {name} would merge adapters; this base runs by transformers' modules, so none is merged")
    if recorder is not None:
        notes.append(f"recording to {recorder.path}")
    kv_events = None if tokens is None else KvEvents(memory.tree, tokens)
    return Replica(engine, sizes, tuple(notes), kv_events=kv_events)


def _runnable(preset: Preset, sizes: EngineSizes) -> Preset:
    """Return a preset without merging if the executor cannot merge adapters."""
    if BATCHING.load(preset.batching).merges and not sizes.can_merge:
        return msgspec.structs.replace(preset, batching="unmerged")
    return preset


def _check_memory_split(name: str, preset: Preset) -> None:
    """Check that the options of a preset can be combined with its memory split.

    Raises:
        ConfigError: the memory split is static, and an option needs a shared memory.
    """
    if preset.memory_split is not MemorySplit.STATIC:
        return
    if preset.batching != "unmerged":
        raise ConfigError(
            f"preset {name}: batching mode {preset.batching} chooses the adapters of a step itself, so it cannot "
            "be combined with a static memory split"
        )
    if preset.dependency_tree and preset.kv_after_finish is KvAfterFinish.KEPT:
        raise ConfigError(
            f"preset {name}: with a static memory split, evicting an adapter would first have to evict its KV from the "
            "other part, which nothing does: set dependency_tree=false or kv_after_finish=dropped"
        )


def _build_scheduler(
    settings: Settings, preset: Preset, sizes: EngineSizes, memory: Memory, load: EngineLoad
) -> Scheduler:
    """Build the scheduler with the policies of a preset."""
    limits = SchedulerLimits(
        max_num_seqs=settings.engine.max_num_seqs,
        max_num_batched_tokens=settings.engine.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_scheduler_steps=settings.engine.num_scheduler_steps,
        multi_step_limit_s=settings.engine.multi_step_limit_s,
        # A step that runs ahead and is discarded would have changed the states.
        async_scheduling=sizes.async_scheduling and not sizes.geometry.states,
        max_draft_tokens=settings.engine.draft_tokens if _verifies_drafts(settings, sizes) else 0,
        whole_images=sizes.images is not None and sizes.images.whole_images,
        whole_prompts=sizes.images is not None and sizes.images.whole_prompts,
    )
    assist = None
    if sizes.assist is not None:
        assist = AssistPlanner(sizes.assist, sizes, limits.max_num_batched_tokens, preset.cold_start, load)
    admission = ADMISSION[preset.admission]
    batching = BATCHING[preset.batching]
    return Scheduler(memory, load, admission, limits, preset, batching, assist, sizes.iterations)


def _notes(settings: Settings, preset: Preset, sizes: EngineSizes) -> list[str]:
    """Return the lines for the start-up log about base, preset and memory."""
    block_mib = sizes.block_bytes * settings.engine.memory_ranks / 2**20
    notes = [
        f"{describe_preset(settings.engine.preset)}; objective: {settings.engine.objective}",
        f"memory for adapters and KV: {sizes.total_blocks * block_mib:.0f} MiB on the device ({sizes.total_blocks} "
        f"blocks of {sizes.block_size} tokens), {sizes.host_blocks * block_mib:.0f} MiB on the host; "
        f"kernels: {sizes.kernels}",
    ]
    if sizes.base is not None:
        notes.insert(0, f"{sizes.base.architecture} runs by {sizes.base.implementation}, in {sizes.base.dtype}")
        if settings.engine.device == "cpu":
            notes.append(threads_note(requested_threads(settings.engine.threads), len(usable_cores())))
    if sizes.weights:
        notes.append(f"weights: {sizes.weights}")
    dtypes = {"adapters": settings.engine.lora_dtype, "KV": settings.engine.kv_cache_dtype}
    if small := [what for what, dtype in dtypes.items() if dtype == "int8"]:
        notes.append(f"kept in 8 bits: {', '.join(small)}")
    if sizes.geometry.states:
        state_mib = sizes.local_geometry.state_blocks(sizes.block_size) * block_mib
        notes.append(
            f"layers carry a state of {state_mib:.3g} MiB from token to token; prefixes are reused from its snapshots, "
            "and drafts are not verified"
        )
    if preset.cold_start is ColdStart.ASSIST and sizes.assist is None:
        notes.append(
            "cold prefills are not assisted, so requests wait for their adapters: assistance needs host memory, host "
            "workers, an x86-64 CPU and at most one GPU, or a profile with host_lora"
        )
    return notes


def threads_note(threads: int, cores: int) -> str:
    """Return the line about a rank's threads; ``threads``: their fixed number, 0 for a fair share."""
    if not threads:
        return f"threads of a rank: a fair share of {cores} cores"
    warning = f"; the process may use only {cores} cores, so steps take longer" if threads > cores else ""
    return f"threads of a rank: {threads}, by --threads or OMP_NUM_THREADS{warning}"


def _verifies_drafts(settings: Settings, sizes: EngineSizes) -> bool:
    """Return whether the executor computes answers, and can yield several tokens of a sequence in a step.

    A wrong draft would have changed the state of layers that carry one from token to token. CUDA graphs and the
    reserved memory of a GPU have one row for each sequence, and ranks receive one token for each.
    """
    if sizes.geometry.states:
        return False
    return sizes.base is not None and settings.engine.device == "cpu" and settings.engine.ranks == 1


def _recorder(settings: Settings, preset: str, sizes: EngineSizes) -> FileRecorder | None:
    if not settings.engine.record:
        return None
    engine = msgspec.structs.replace(settings.engine, preset=preset, record="")
    return FileRecorder.create(Path(settings.engine.record), Header(__version__, engine, sizes))
