"""Starting what assisted prefills need, for rows and replicas that have them."""

import platform
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lorikeet.config import EngineSettings, Settings
from lorikeet.core.assist_costs import AssistCosts
from lorikeet.core.geometry import ModelGeometry
from lorikeet.memory.host_arena import HostArena
from lorikeet.presets import ColdStart, Preset
from lorikeet.worker.helper_process import HelperProcess
from lorikeet.worker.host_lora.assisted_step import HostLoraLeader
from lorikeet.worker.host_lora.calibrate import measure
from lorikeet.worker.host_lora.pool import DevicePool, HostPool, PoolSizes, start_worker_process
from lorikeet.worker.rank_setup import RankModel
from lorikeet.worker.threads import requested_threads, usable_cores
from lorikeet.worker.transfer.transfers import TransferManager

_ORDERED_CPUS = ("x86_64", "AMD64")


def wanted_workers(settings: EngineSettings, preset: Preset) -> int:
    """Return how many host workers a replica has.

    None for several accelerators, which would have to hear of each other layer by layer, and none on CPUs that may let
    others see stores in another order than they were made (``layout``). There requests wait for their adapters.
    """
    is_assisted = preset.cold_start in (ColdStart.ASSIST, ColdStart.AUTO)
    is_one = settings.device == "cpu" or settings.tensor_parallel == 1
    fits = is_one and platform.machine() in _ORDERED_CPUS and settings.host_memory_bytes > 0
    return settings.host_lora_workers if is_assisted and fits else 0


def worker_cores(workers: int, threads: int, cores: set[int]) -> list[int | None]:
    """Return the core of each worker: its own if ``threads`` threads of the ranks leave enough, else any.

    Args:
        workers: how many.
        threads: those that the ranks insist on; 0 if they take what is there.
        cores: that all may run on.
    """
    if threads and threads + workers <= len(cores):
        return list(sorted(cores)[-workers:])
    return [None] * workers


def start_worker_processes(settings: EngineSettings, preset: Preset) -> list[HelperProcess]:
    """Start the worker processes; they become ready beside whatever the caller does next.

    Raises:
        ExecutorError: the system refuses.
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
    """Return a pool of workers that are ready, and whether they share cores with the base model.

    Args:
        processes: at least one; owned by the pool.
        settings: of the engine.
        geometry: of a rank's share of the model.
        transfers: have the host tier of rank 0.
        cores: that nobody but this replica uses.
        others: those of the other ranks; owned by the pool.

    Raises:
        ExecutorError: a worker did not start.
    """
    exchange = transfers.device.signals()
    # The base model takes its threads' cores; on a device it takes that of the thread which launches it.
    threads = requested_threads(settings.threads) * settings.tensor_parallel if exchange is None else 1
    own = worker_cores(len(processes), threads, cores)
    make = HostPool if exchange is None else partial(DevicePool, transfers.device, exchange)
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
    return pool, exchange is None and None in own


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
    """Set workers up and measure what they and the device take.

    Args:
        processes: at least one; owned by what is returned.
        settings: all.
        preset: says on which layers the host computes, and how the rest is planned.
        model: the rank's share.
        arena: the device arena, empty.
        transfers: have the host tier, empty.
        others: those of the other ranks, empty; owned by what is returned.
        longest_tokens: of a sequence.

    Raises:
        ConfigError: the host tier is too small.
        ExecutorError: a worker did not start.
    """
    engine, cluster = settings.engine, settings.cluster
    is_alone = max(cluster.replicas, cluster.max_replicas) == 1  # others may be on this machine
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
