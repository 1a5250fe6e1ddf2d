"""Computes the sizes of adapters and KV as an engine stores them, and the smallest memory of a working engine."""

import msgspec

from lorikeet.config import MEMORY_BITS, ConfigError, EngineSettings, Settings
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.text import format_size, unknown_name
from lorikeet.memory.packing import pack

_SMALLEST_RANK = 8


def stored_geometry(engine: EngineSettings, geometry: ModelGeometry) -> ModelGeometry:
    """Return a geometry with the element sizes in which an engine stores adapters and KV.

    Raises:
        ConfigError: a setting names an unknown dtype, or the dtype does not fit the model.
    """
    bits = MEMORY_BITS
    for name, dtype in (("lora_dtype", engine.lora_dtype), ("kv_cache_dtype", engine.kv_cache_dtype)):
        if dtype not in bits:
            raise ConfigError(unknown_name(name, dtype, tuple(bits)))
    stored = msgspec.structs.replace(geometry, lora_bits=bits[engine.lora_dtype], kv_bits=bits[engine.kv_cache_dtype])
    try:
        stored.kv_elements_per_token()
    except ValueError as error:
        raise ConfigError(f"kv_cache_dtype: {error}") from error
    return stored


def adapter_blocks(settings: Settings, geometry: ModelGeometry, rank: int) -> int:
    """Return the number of blocks of an adapter with this rank on every module; 0 if adapters are disabled.

    Raises:
        ConfigError: a block is too small for a row of the adapter.
    """
    if not settings.adapters.enabled:
        return 0
    try:
        return pack(geometry.full_ranks(rank), geometry, geometry.block_elements(settings.engine.block_size)).blocks
    except ValueError as error:
        raise ConfigError(f"block_size: {error}; make blocks larger, or disable adapters") from error


def min_blocks(settings: Settings, geometry: ModelGeometry, longest_tokens: int) -> int:
    """Return the number of blocks that the longest sequence and a small adapter need.

    Args:
        settings: settings of the server.
        geometry: geometry of one rank's share of the model.
        longest_tokens: largest number of tokens in a sequence.

    Raises:
        ConfigError: a block is too small for a row of the adapter.
    """
    return sequence_blocks(settings, geometry, longest_tokens) + adapter_blocks(settings, geometry, _SMALLEST_RANK)


def sequence_blocks(settings: Settings, geometry: ModelGeometry, tokens: int) -> int:
    """Return the number of blocks of the keys, values and state of a sequence.

    Raises:
        ConfigError: a part of the state is larger than a block.
    """
    size = settings.engine.block_size
    try:
        return -(-tokens // size) + geometry.state_blocks(size)
    except ValueError as error:
        raise ConfigError(f"block_size: {error}; make blocks larger") from error


def check_blocks(settings: Settings, geometry: ModelGeometry, longest_tokens: int, blocks: int) -> None:
    """Check that an arena of this many blocks is large enough.

    Raises:
        ConfigError: the arena is too small; the message names the necessary size.
    """
    least = min_blocks(settings, geometry, longest_tokens)
    block_bytes = geometry.block_bytes(settings.engine.block_size)
    if blocks >= least:
        return
    given = "memory_bytes" if settings.engine.memory_bytes else "free memory of"
    given_bytes = settings.engine.memory_bytes or blocks * block_bytes
    least_mib = -(-least * block_bytes // 2**20)
    raise ConfigError(
        f"{given} {format_size(given_bytes)} is too small for a sequence of {longest_tokens} tokens and an adapter; at "
        f"least {least_mib} MiB, or lower max_model_len"
    )
