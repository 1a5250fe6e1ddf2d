"""Makes the measurements of ``lorikeet profile``, fits the models, and returns a profile."""

from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path

import msgspec
import torch

from lorikeet import __version__
from lorikeet.config import ConfigError, Settings
from lorikeet.core.machine import cpu_model
from lorikeet.core.plan import KernelForm
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.fit import fit_lora, fit_step
from lorikeet.costs.model import CostModel, LoraWork, StepWork, lora_s
from lorikeet.costs.profile import Constant, CostProfile
from lorikeet.kernels.devices import torch_dtype
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.profiling.driver import ExecutorDriver
from lorikeet.profiling.host_lora import host_lora, measure_host_lora
from lorikeet.profiling.loop import BATCHES as LOOP_BATCHES
from lorikeet.profiling.loop import measure_loop
from lorikeet.profiling.machine_limits import (
    PREFILL_ROWS,
    LimitMeter,
    MachineLimits,
    adapters_limit_s,
    decode_limit_tok_s,
    median_limits,
    model_cost,
    prefill_limit_tok_s,
)
from lorikeet.profiling.steps import StepSweep, SweepLimits, base_steps, lora_steps, measure_lora
from lorikeet.profiling.transfers import (
    MODULES,
    RANKS,
    adapter_bytes,
    measure_switching,
    measure_transfers,
    random_adapters,
    switch_ticks,
    transfer_ticks,
)
from lorikeet.worker.torch_executor import build_torch_executor

Progress = Callable[[str, int, int], None]

_MERGING_PRESET = "dlora"
"""Preset of the executor, whose ranks can merge adapters. Steps take the same time under any preset."""

_UNIT = "of the limit"
_LORA_RANKS = (8, 8, 16, 24, 40, 56, 88, 128)


class Thoroughness(msgspec.Struct, frozen=True):
    """Sets the number of measurements.

    Attributes:
        kv_tokens: the largest context of a step, over all its sequences.
        step_rounds, lora_rounds, transfer_rounds, switch_rounds, host_rounds: number of measurements of each point.
            Half of the steps' rounds run before all other measurements and half after them. Steps with adapters are
            measured until they are precise enough, at most ``lora_rounds`` times.
        loop_tokens: number of tokens that each request generates while the loop is measured.
        ranks: ranks of the adapters.
    """

    kv_tokens: int = 32_768
    step_rounds: int = 8
    lora_rounds: int = 40
    transfer_rounds: int = 5
    switch_rounds: int = 5
    host_rounds: int = 7
    loop_tokens: int = 32
    ranks: tuple[int, ...] = RANKS


FULL = Thoroughness()
QUICK = Thoroughness(
    kv_tokens=8192, step_rounds=2, lora_rounds=4, transfer_rounds=2, switch_rounds=2, host_rounds=3, loop_tokens=16
)


def run_profile(
    settings: Settings,
    name: str,
    model: str,
    thoroughness: Thoroughness,
    progress: Progress = lambda stage, done, total: None,
    limits: Callable[[], MachineLimits] | None = None,
) -> CostProfile:
    """Measure this machine, or one of its GPUs, with one model.

    Args:
        settings: the engine's settings. ``settings.model.model`` is a local folder. Copies are measured with
            ``settings.engine.host_memory_bytes``, or with twice the largest adapter if that is more.
        name: name of the profile.
        model: name of the model.
        thoroughness: number of measurements.
        progress: called with (stage, done, total); 0 of 0 for a stage of unknown length.
        limits: returns the limits of the machine; None measures them.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ExecutorDriverError: the memory is too small for the measurements.
        ValueError: the model or its weights cannot be used.
        ExecutorError: a step could not be run.
    """
    if settings.engine.pipeline_parallel > 1:
        raise ConfigError("pipeline_parallel: stages compute one after the other, so measure a profile with one")
    how = thoroughness
    folder = Path(settings.model.model)
    config = read_model_config(folder)
    dtype = torch_dtype(config.dtype if settings.model.dtype == "auto" else settings.model.dtype)
    room_bytes = max(
        settings.engine.host_memory_bytes or 0, 2 * adapter_bytes(config.geometry(dtype.itemsize), how.ranks)
    )
    engine = msgspec.structs.replace(settings.engine, host_memory_bytes=room_bytes)
    settings = msgspec.structs.replace(settings, engine=engine)
    merging = msgspec.structs.replace(settings, engine=msgspec.structs.replace(engine, preset=_MERGING_PRESET))
    executor, _, sizes = build_torch_executor(merging, folder, progress, lambda: None)
    with closing(executor), random_adapters(sizes.geometry, how.ranks) as adapters:
        driver = ExecutorDriver(executor, sizes, config.vocab_size, how.kv_tokens)
        driver.write_kv(adapters.refs[how.ranks[-1]][0])
        # The speed of the machine drifts, so its limits are measured before, between and after the other measurements.
        measure_limits = limits or LimitMeter(dtype, device=engine.device).measure
        seen = [measure_limits()]
        bounds = SweepLimits(engine.max_num_seqs, engine.max_num_batched_tokens, sizes.max_model_len, driver.kv_tokens)
        steps = base_steps(bounds)
        tick = _ticker(progress, "steps", len(steps) * (how.step_rounds + 1))
        sweep = StepSweep(driver, steps, engine.num_scheduler_steps, engine.multi_step_limit_s, tick)
        sweep.measure(how.step_rounds // 2)
        tick = _ticker(progress, "transfers", transfer_ticks(driver, adapters, how.transfer_rounds))
        transfers = measure_transfers(driver, adapters, how.transfer_rounds, tick)
        adapted = lora_steps(adapters.digests(), bounds)
        tick = _ticker(progress, "adapters", len(adapted) * how.lora_rounds)
        lora = measure_lora(driver, adapted, how.lora_rounds, tick)
        tick = _ticker(progress, "merging", switch_ticks(adapters.digests(), how.switch_rounds))
        switching = measure_switching(driver, adapters.digests(), how.switch_rounds, tick)
        seen.append(measure_limits())
        sweep.measure(how.step_rounds - how.step_rounds // 2)
        seen.append(measure_limits())
        driver.clear()
        tick = _ticker(progress, "loop", LOOP_BATCHES)
        loop, loop_sequence = measure_loop(executor, sizes, settings, how.loop_tokens, tick)
        tick = _ticker(progress, "host workers", how.host_rounds)
        host_times = measure_host_lora(executor, sizes, engine, how.host_rounds, tick)
    progress("fitting", 0, 0)
    step = fit_step(sweep.measurements(), loop, loop_sequence)
    # The average is set last, because medians of limits and of host workers are compared with medians of steps.
    profile = CostProfile(
        name=name,
        device=_device(settings, median_limits(seen)),
        model=model,
        tensor_parallel=engine.tensor_parallel,
        origin="measured",
        made=_made(sizes),
        geometry=sizes.geometry,
        vocabulary=config.vocab_size,
        max_model_len=sizes.max_model_len,
        pool_bytes=sizes.total_blocks * sizes.block_bytes * engine.tensor_parallel,
        lora_modules=MODULES,
        step=msgspec.structs.replace(step, average=None),
        lora={form: fit_lora(points, form) for form, points in lora.items()},
        transfers=transfers,
        switching=switching,
        weight_bytes=_weight_bytes(config, dtype.itemsize),
        overlapped=sizes.async_scheduling,
    )
    return msgspec.structs.replace(
        profile,
        step=step,
        kernel_efficiency=kernel_efficiency(profile, config, seen),
        host_lora=host_lora(host_times, profile, engine.host_lora_workers) if host_times else None,
    )


def _weight_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return the bytes of a whole model. The embedding counts only if it is not tied to the output layer."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (model_cost(config, element_bytes).parameters + embedding) * element_bytes


def _ticker(progress: Progress, stage: str, total: int) -> Callable[[], None]:
    """Return a function that reports one more unit of a stage to ``progress``."""
    done = count(1)
    progress(stage, 0, total)
    return lambda: progress(stage, next(done), total)


def _device(settings: Settings, limits: MachineLimits) -> str:
    if settings.engine.device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{cpu_model()}, {limits.threads} threads"


def _made(sizes: EngineSizes) -> str:
    day = datetime.now(UTC).date().isoformat()
    return f"{day}, lorikeet {__version__}, torch {version('torch')}, {sizes.kernels} kernels"


def kernel_efficiency(profile: CostProfile, config: ModelConfig, seen: Sequence[MachineLimits]) -> dict[str, Constant]:
    """Return the share of the machine's limit that products of a step and adapters reach, by part.

    ``decode``: one row through all products and norms, relative to reading the weights once. ``prefill``: 512 rows,
    relative to multiplying them. ``lora``: eight decodes with eight adapters, relative to reading the adapters once. A
    part is left out if its fit gave zero, which noise can cause on a small model.

    Args:
        profile: profile of the model on this machine.
        config: the model's config.
        seen: limits of the machine at each measurement; errors are half of the whole range.
    """
    of_each = [_shares(profile, config, limits) for limits in seen]
    middle = _shares(profile, config, median_limits(seen))
    return {
        part: Constant(share, _UNIT, (max(each[part] for each in of_each) - min(each[part] for each in of_each)) / 2)
        for part, share in middle.items()
    }


def _shares(profile: CostProfile, config: ModelConfig, limits: MachineLimits) -> dict[str, float]:
    model = CostModel(profile, KernelForm.UNPADDED)
    bytes_each = profile.geometry.dtype_bytes
    base = model_cost(config, bytes_each)
    adapted = model_cost(config, bytes_each, _LORA_RANKS, profile.lora_modules)
    decode_s = model.step_s(StepWork(1, 1, 0, 0, 0, 0, None))
    prefill_s = model.step_s(StepWork(PREFILL_ROWS, 0, 0, 0, 0, 0, None))
    ranks = float(sum(_LORA_RANKS))
    adapters_s = lora_s(profile.lora_costs(KernelForm.UNPADDED), LoraWork(ranks, 0.0, ranks))
    limits_s = {
        "decode": (1 / decode_limit_tok_s(base, limits, 1), decode_s),
        "prefill": (PREFILL_ROWS / prefill_limit_tok_s(base, limits), prefill_s),
        "lora": (adapters_limit_s(adapted, limits, len(_LORA_RANKS)), adapters_s),
    }
    return {part: least_s / seconds for part, (least_s, seconds) in limits_s.items() if seconds}
