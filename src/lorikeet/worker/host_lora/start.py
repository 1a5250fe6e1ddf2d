"""Starts host workers and measures costs, for presets with assisted prefills."""

import platform
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lorikeet.config import EngineSettings, Settings
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.machine import usable_cores
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.memory.host_arena import HostArena
from lorikeet.presets import ColdStart, Preset
from lorikeet.worker.helper_process import HelperProcess
from lorikeet.worker.host_lora.assisted_step import HostLoraLeader
from lorikeet.worker.host_lora.calibrate import measure
from lorikeet.worker.host_lora.pool import DevicePool, HostPool, PoolSizes, start_worker_process
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.threads import requested_threads
from lorikeet.worker.transfer.transfers import TransferManager

_ORDERED_CPUS = ("x86_64", "AMD64")


def wanted_workers(settings: EngineSettings, preset: Preset) -> int:
    """Return the number of host workers of a replica.

    The number is 0 with several GPUs, which would have to synchronise on every layer, and with pipeline stages or ranks
    on other machines. It is 0 on CPUs that may reorder stores, since the ring relies on their order. Requests then wait
    for their adapters. With ``AUTO`` the number is also 0 where workers would save no time. Without a declared link, a
    CPU copies a whole adapter within memory in the time that a worker takes for one or two layers. If all cores compute
    steps, a worker only takes time from them.
    """
    is_assisted = preset.cold_start is ColdStart.ASSIST or (preset.cold_start is ColdStart.AUTO and _may_pay(settings))
    shares_memory = settings.device == "cpu" and settings.pipeline_parallel == 1 and not settings.rank_address
    is_one = settings.ranks == 1 or shares_memory
    fits = is_one and platform.machine() in _ORDERED_CPUS and settings.host_memory_bytes != 0
    return settings.host_lora_workers if is_assisted and fits else 0


def _may_pay(settings: EngineSettings) -> bool:
    """Whether assistance may save more than it costs."""
    if settings.device != "cpu":
        return True
    threads = requested_threads(settings.threads) * settings.tensor_parallel
    return settings.link_bytes_per_s > 0 and None not in worker_cores(1, threads, usable_cores())


def worker_cores(workers: int, threads: int, cores: set[int]) -> list[int | None]:
    """Return the core of each worker.

    None (any core) for all workers if the ranks' threads leave too few cores.

    Args:
        workers: number of workers.
        threads: fixed number of threads of all ranks; 0 if the ranks take a fair share.
        cores: cores that workers and ranks may run on.
    """
    if threads and threads + workers <= len(cores):
        return list(sorted(cores)[-workers:])
    return [None] * workers


def start_worker_processes(settings: EngineSettings, preset: Preset) -> list[HelperProcess]:
    """Start the worker processes, which become ready in the background.

    Raises:
        ExecutorError: a process cannot be started.
    """
    started: list[HelperProcess] = []
    try:
        for _ in range(wanted_workers(settings, preset)):
            started.append(start_worker_process())
    except BaseException:
        for process in started:
            process.end()
        raise
    return started


def open_pool(
    processes: Sequence[HelperProcess],
    settings: EngineSettings,
    geometry: ModelGeometry,
    transfers: TransferManager,
    cores: set[int],
    others: Sequence[HostArena] = (),
) -> tuple[HostPool, bool]:
    """Return a pool of ready workers, and whether the workers share cores with the base model.

    Args:
        processes: at least one worker process. The pool owns them.
        settings: the engine's settings.
        geometry: sizes of a rank's share of the model.
        transfers: transfers of rank 0, with its host tier.
        cores: the cores that only this replica uses.
        others: the host arenas of all other ranks. The pool owns them.

    Raises:
        ExecutorError: a worker did not start.
    """
    signals = transfers.device.signals()
    # On a CPU the base model uses its threads' cores; on a GPU only the core of the thread that launches kernels.
    threads = requested_threads(settings.threads) * settings.tensor_parallel if signals is None else 1
    own = worker_cores(len(processes), threads, cores)
    make = HostPool if signals is None else partial(DevicePool, transfers.device, signals)
    pool = make(
        processes,
        own,
        [transfers.host_arena, *others],
        PoolSizes(transfers.host.dtype, geometry, rows=settings.max_num_batched_tokens, parts=settings.max_num_seqs),
    )
    try:
        pool.wait_until_ready()
    except BaseException:
        pool.close()
        raise
    return pool, signals is None and None in own


def build_host_lora(
    processes: Sequence[HelperProcess],
    settings: Settings,
    preset: Preset,
    model: RankModel,
    arena: Tensor,
    transfers: TransferManager,
    others: Sequence[HostArena],
    longest_tokens: int,
) -> tuple[HostLoraLeader, AssistCosts]:
    """Set up the workers, and measure the costs of workers and device.

    Args:
        processes: at least one worker process. The returned object owns them.
        settings: all settings.
        preset: the preset, which has the options of assisted prefills.
        model: the rank's share.
        arena: the device arena, empty.
        transfers: rank 0's transfers. The host arena must be empty.
        others: the empty host arenas of all other ranks. The returned object owns them.
        longest_tokens: number of tokens of the longest sequence.

    Raises:
        ConfigError: the host tier is too small.
        ExecutorError: a worker did not start.
    """
    engine = settings.engine
    cluster = settings.cluster
    is_alone = max(cluster.replicas, cluster.max_replicas) == 1  # Other replicas may be on this machine.
    cores = usable_cores() if is_alone else set[int]()
    pool, cores_shared = open_pool(processes, engine, model.geometry, transfers, cores, others)
    try:
        costs = measure(
            pool,
            model,
            arena,
            transfers.host,
            transfers.device.steps,
            engine.block_size,
            min(engine.max_num_batched_tokens, longest_tokens),
            preset,
            engine.link_bytes_per_s,
            cores_shared=cores_shared,
        )
    except BaseException:
        pool.close()
        raise
    return HostLoraLeader(pool, preset.host_layers, costs), costs
