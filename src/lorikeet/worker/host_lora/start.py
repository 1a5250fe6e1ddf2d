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

    It is 0 with several GPUs, which would have to synchronise on every layer, with pipeline stages or ranks on other
    machines, and on CPUs whose stores may become visible in another order (the ring relies on it). Then requests wait
    for their adapters. Where ``AUTO`` does not pay it is 0, too: on a CPU whose copies no declared link slows down, a
    whole adapter is copied within memory in the time that the host takes for one or two layers; and on a CPU whose
    cores all compute steps, a worker only takes time from them.
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
    """Return the core of each worker: its own core if the ranks' threads leave enough, else None (any core).

    Args:
        workers: number of workers.
        threads: fixed number of threads of all ranks; 0 if they take a fair share.
        cores: cores that workers and ranks may run on.
    """
    if threads and threads + workers <= len(cores):
        return list(sorted(cores)[-workers:])
    return [None] * workers


def start_worker_processes(settings: EngineSettings, preset: Preset) -> list[HelperProcess]:
    """Start the worker processes. They become ready in the background.

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
    """Return a pool of ready workers, and whether they share cores with the base model.

    Args:
        processes: worker processes, at least one; owned by the pool.
        settings: settings of the engine.
        geometry: sizes of a rank's share of the model.
        transfers: transfers of rank 0, with its host tier.
        cores: cores that only this replica uses.
        others: host tiers of all other ranks; owned by the pool.

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
        processes: worker processes, at least one; owned by the returned object.
        settings: all.
        preset: preset with the options of assisted prefills.
        model: the rank's share.
        arena: the device arena, empty.
        transfers: transfers with an empty host tier.
        others: empty host tiers of all other ranks; owned by the returned object.
        longest_tokens: tokens of the longest sequence.

    Raises:
        ConfigError: the host tier is too small.
        ExecutorError: a worker did not start.
    """
    engine = settings.engine
    cluster = settings.cluster
    is_alone = max(cluster.replicas, cluster.max_replicas) == 1  # other replicas may be on this machine
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
