"""From a profile to an executor that takes its time, on either clock."""

from collections.abc import Callable
from pathlib import Path

from lorikeet.config import ConfigError, EngineSettings, Settings
from lorikeet.core.clock import VirtualClock, WaitableClock
from lorikeet.costs.assisted import assist_costs
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.transfers import TransferModel
from lorikeet.engine.executor import EngineSizes
from lorikeet.engine.links import ModelledLink
from lorikeet.engine.modelled import ModelledExecutor, SeededTokens
from lorikeet.engine.modelled_times import ModelledTimes
from lorikeet.models.config import read_model_config
from lorikeet.presets import Preset
from lorikeet.scheduling.coldstart.costs import AssistCosts

CATCH_UP_S = 0.01
"""A step that begins so soon after the last one's end counts as beginning right then: the loop's own time between two
steps is the model's, not this machine's."""

_ORDINARY_TOKENS = (300, 10_000)
"""Ordinary tokens in the usual vocabularies: special and byte tokens lie below, or far above."""


def build_modelled_executor(
    settings: Settings, profile: CostProfile, preset: Preset, clock: VirtualClock, *, coalesced: bool
) -> tuple[ModelledExecutor, EngineSizes]:
    """Build the executor of a simulation.

    Args:
        settings: of the engine; ``settings.model.max_model_len`` may exceed the profile's, since no time depends
            on it.
        profile: what things cost.
        preset: of the replica.
        clock: is moved by it.
        coalesced: whether a repeat stands for as many turns of the engine's loop (see ``Engine.step``).

    Raises:
        ConfigError: a setting does not fit the profile.
    """
    transfers = transfer_model(settings.engine, profile)
    times = ModelledTimes(transfers, preset, loop_each_step=coalesced)
    link = ModelledLink(transfers.course)
    executor = ModelledExecutor(clock, times, link, _tokens_of(profile), coalesced=coalesced)
    return executor, sizes_of(settings, profile, "modelled")._replace(assist=_assist(settings, transfers, preset))


def build_paced_executor(
    settings: Settings, preset: Preset, clock: WaitableClock, on_transfer_done: Callable[[], None]
) -> tuple[ModelledExecutor, EngineSizes]:
    """Build the executor of a replica without arithmetic.

    Args:
        settings: all; ``engine.profile`` is a name or a file, ``model.model`` a folder with the same model's
            ``config.json`` and tokenizer, whose weights nobody reads.
        preset: of the replica.
        clock: the real one.
        on_transfer_done: called, on another thread, when a transfer has ended.

    Raises:
        ConfigError: no profile is named, or a setting does not fit it.
        ProfileError: there is no such profile.
        ValueError: the model's config cannot be read.
    """
    if not settings.engine.profile:
        raise ConfigError("engine.profile: a paced executor needs the name or the file of a profile")
    profile = load_profile(settings.engine.profile)
    geometry = read_model_config(Path(settings.model.model)).geometry(profile.geometry.dtype_bytes)
    if geometry != profile.geometry:
        raise ConfigError(f"profile {profile.name} is of {profile.model}, {settings.model.model} is another model")
    if settings.model.max_model_len > profile.max_model_len:
        raise ConfigError(
            f"max_model_len: {settings.model.max_model_len} is more than the {profile.max_model_len} of "
            f"profile {profile.name}"
        )
    transfers = transfer_model(settings.engine, profile)
    times = ModelledTimes(transfers, preset, loop_each_step=False)
    link = ModelledLink(transfers.course, on_transfer_done)
    executor = ModelledExecutor(clock, times, link, _tokens_of(profile), CATCH_UP_S)
    return executor, sizes_of(settings, profile, "paced")._replace(assist=_assist(settings, transfers, preset))


def _assist(settings: Settings, transfers: TransferModel, preset: Preset) -> AssistCosts | None:
    """Return what assisted prefills cost, on as many cores as the profile says; None without workers or host memory."""
    engine = settings.engine
    return assist_costs(transfers, preset) if engine.host_lora_workers and engine.host_memory_bytes else None


def transfer_model(engine: EngineSettings, profile: CostProfile) -> TransferModel:
    """Return what transfers cost an engine with these settings, by ``profile`` or by the link that they declare."""
    return TransferModel(profile, profile.geometry.block_bytes(engine.block_size), engine.link_bytes_per_s)


def sizes_of(settings: Settings, profile: CostProfile, executor: str) -> EngineSizes:
    """Return the sizes of a replica by ``profile``: ``engine.memory_bytes`` of device memory, or all that it has.

    A modelled replica is one rank however many the profile stands for: blocks are of the whole model.

    Raises:
        ConfigError: that cannot hold the longest sequence.
    """
    engine, geometry = settings.engine, profile.geometry
    longest_tokens = settings.model.max_model_len or profile.max_model_len
    block_bytes = geometry.block_bytes(engine.block_size)
    total_blocks = (engine.memory_bytes or profile.pool_bytes) // block_bytes
    sequence_blocks = -(-longest_tokens // engine.block_size)
    if total_blocks <= sequence_blocks:
        raise ConfigError(
            f"memory of {total_blocks} blocks cannot hold a sequence of {longest_tokens} tokens, "
            f"{sequence_blocks} blocks of {block_bytes} bytes, beside an adapter"
        )
    return EngineSizes(
        geometry=geometry,
        local_geometry=geometry,
        total_blocks=total_blocks,
        host_blocks=engine.host_memory_bytes // block_bytes,
        block_size=engine.block_size,
        max_model_len=longest_tokens,
        max_adapter_blocks=total_blocks - sequence_blocks,
        kernels=f"none: {executor} by profile {profile.name}",
        overlaps=profile.overlapped and not engine.enforce_eager and engine.tensor_parallel == 1,
    )


def _tokens_of(profile: CostProfile) -> SeededTokens:
    low, high = _ORDINARY_TOKENS
    return SeededTokens(min(low, profile.vocabulary // 2), min(high, profile.vocabulary - 1))
