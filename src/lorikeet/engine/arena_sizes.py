"""How many blocks a rank's arenas get."""

import psutil
import torch

from lorikeet.config import ConfigError, Settings
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.first_steps import measure_step_bytes
from lorikeet.engine.rank_setup import RankModel
from lorikeet.memory.packing import pack

_SHARE_OF_FREE = 0.4
"""Of a CPU's memory."""
_CPU_BYTES = 4 * 2**30
_ADAPTER_BYTES = 4 * 2**30
_SMALLEST_RANK, _LARGE_RANK = 8, 128


def arena_blocks(settings: Settings, model: RankModel, longest_tokens: int) -> int:
    """Return how many blocks this rank's arena gets.

    ``memory_bytes`` if given. Else a share of a CPU's free memory, or what weights and the largest step leave of
    ``gpu_memory_utilization`` of a GPU, but no more than all running sequences could fill at full length beside some adapters,
    and on a CPU, whose memory others want too, no more than 4 GiB or the least that works.

    Raises:
        ConfigError: that cannot hold the longest sequence and a small adapter.
        ExecutorError: the device cannot run the largest step.
    """
    engine = settings.engine
    step_bytes = measured_step_bytes(settings, model, longest_tokens)
    block_bytes = model.geometry.block_bytes(engine.block_size)
    sequence_blocks = -(-longest_tokens // engine.block_size)
    least_blocks = sequence_blocks + _adapter_blocks(settings, model.geometry, _SMALLEST_RANK)
    if engine.memory_bytes:
        blocks = engine.memory_bytes // block_bytes
    else:
        useful_bytes = engine.max_num_seqs * sequence_blocks * block_bytes + _ADAPTER_BYTES
        if model.device.type == "cpu":
            free_bytes = int(psutil.virtual_memory().available / engine.tensor_parallel * _SHARE_OF_FREE)
            useful_bytes = min(useful_bytes, max(_CPU_BYTES, least_blocks * block_bytes))
        else:
            free_bytes, total_bytes = torch.cuda.mem_get_info(model.device)
            free_bytes = share_left_bytes(engine.gpu_memory_utilization, total_bytes, free_bytes, step_bytes)
        blocks = min(free_bytes, useful_bytes) // block_bytes
    if blocks < least_blocks:
        raise ConfigError(
            f"an arena of {blocks * block_bytes:,} bytes is too small: one sequence of {longest_tokens} tokens and a "
            f"small adapter take {least_blocks * block_bytes:,}; raise memory_bytes or lower max_model_len"
        )
    return blocks


def host_arena_blocks(settings: Settings, model: RankModel) -> int:
    """Return how many blocks this rank's host arena gets; none unless a size is given."""
    return settings.engine.host_memory_bytes // model.geometry.block_bytes(settings.engine.block_size)


def share_left_bytes(share: float, total_bytes: int, free_bytes: int, step_bytes: int) -> int:
    """Return what is left of a share of a GPU beside whatever is on it, this server's or not, and steps.

    Those that are called take ``step_bytes`` at most, and graphs as much again: theirs are smaller, but they keep it.
    """
    return max(0, int(share * total_bytes) - (total_bytes - free_bytes) - 2 * step_bytes)


def measured_step_bytes(settings: Settings, model: RankModel, longest_tokens: int) -> int:
    """Run steps on this rank's GPU and return what the largest takes, 0 on a CPU. Every rank must call this.

    With them kernels are compiled and libraries loaded: what cannot be used says so before there are requests.

    Raises:
        ExecutorError: it cannot be run.
    """
    if model.device.type == "cpu":
        return 0
    rank = (settings.adapters.max_rank or _LARGE_RANK) if settings.adapters.enabled else 0
    try:
        return measure_step_bytes(model, settings.engine, rank, longest_tokens)
    except Exception as error:  # of torch, of Triton's compiler or of a library's
        raise ExecutorError(
            f"a step of {settings.engine.max_num_batched_tokens} tokens in {settings.engine.max_num_seqs} sequences cannot be "
            f"run by the kernels {model.kernels.name!r}: {type(error).__name__}: {error}"
        ) from error


def _adapter_blocks(settings: Settings, geometry: ModelGeometry, rank: int) -> int:
    if not settings.adapters.enabled:
        return 0
    ranks = dict.fromkeys(LORA_MODULES, (rank,) * geometry.layers)
    try:
        return pack(ranks, geometry, geometry.block_elements(settings.engine.block_size)).blocks
    except ValueError as error:
        raise ConfigError(f"block_size: {error}; make blocks larger, or disable adapters") from error
