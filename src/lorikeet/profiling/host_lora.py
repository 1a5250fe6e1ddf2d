"""Measures the time of host workers for a layer of a cold prefill, with workers like an engine's."""

from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median

from lorikeet.bench.statistics import median_interval
from lorikeet.config import EngineSettings
from lorikeet.core.machine import usable_cores
from lorikeet.core.plan import KernelForm
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import Constant, CostProfile, HostLora
from lorikeet.presets import resolve_preset
from lorikeet.worker.host_lora.calibrate import DEVICE_TOKENS, HostTimes, measure_host, tokens_per_worker
from lorikeet.worker.host_lora.start import open_pool, start_worker_processes
from lorikeet.worker.torch_executor import TorchExecutor

_ASSISTING_PRESET = "toppings"
"""Preset whose replicas have host workers, if settings and device allow them."""


def measure_host_lora(
    executor: TorchExecutor, sizes: EngineSizes, engine: EngineSettings, rounds: int, tick: Callable[[], None]
) -> list[HostTimes]:
    """Measure host workers several times. The content of the executor's host tier is overwritten.

    Args:
        executor: an idle executor.
        sizes: the executor's sizes.
        engine: settings of the executor's engine.
        rounds: number of measurements.
        tick: called after each round.

    Returns:
        The times of each round; empty if replicas with these settings have no host workers.

    Raises:
        ConfigError: the host tier is too small.
        ExecutorError: a worker did not start, or died.
    """
    if engine.ranks > 1:  # adapters of other tensor-parallel ranks are in other processes
        return []
    processes = start_worker_processes(engine, resolve_preset(_ASSISTING_PRESET)[1])
    if not processes:
        return []
    found = []
    pool, _ = open_pool(processes, engine, sizes.local_geometry, executor.transfers, usable_cores())
    with closing(pool):
        for _ in range(rounds):
            transfers = executor.transfers
            found.append(measure_host(pool, sizes.local_geometry, transfers.host, transfers.place))
            tick()
    return found


def host_lora(times: Sequence[HostTimes], profile: CostProfile, cores: int) -> HostLora:
    """Return the constants of host LoRA for an otherwise complete profile.

    Args:
        times: measured times of at least one round.
        profile: profile with steps and the link to the device.
        cores: number of workers.
    """
    fixed_s, token_s, token_rank_s = (
        _figure([getattr(each, name) for each in times], unit)
        for name, unit in (("fixed_s", "s"), ("token_s", "s/token"), ("token_rank_s", "s/(token·rank)"))
    )
    middle = HostTimes(fixed_s.value, token_s.value, token_rank_s.value, times[0].rank)
    work = step_work([SequenceWork(0, DEVICE_TOKENS[0], True, None, 0.0)], KernelForm.UNPADDED)
    layer_s = CostModel(profile, KernelForm.UNPADDED).step_s(work) / profile.geometry.layers
    link = profile.need(profile.transfers.host_to_device, "transfers.host_to_device")
    return HostLora(
        fixed=fixed_s,
        token=token_s,
        token_rank=token_rank_s,
        cores=cores,
        core_tokens=tokens_per_worker(middle, profile.geometry, layer_s, link.bandwidth.value),
    )


def _figure(seconds: Sequence[float], unit: str) -> Constant:
    low, high = median_interval(seconds)
    return Constant(median(seconds), unit, (high - low) / 2)
