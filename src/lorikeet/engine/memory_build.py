"""From a preset to the memory of a replica."""

from collections.abc import Callable
from functools import lru_cache

from lorikeet.config import ConfigError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.plan import AS_THEY_LIE, Order
from lorikeet.engine.executor import EngineSizes
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.layer_groups import block_runs
from lorikeet.memory.memory import Assist, Memory
from lorikeet.memory.packing import pack
from lorikeet.memory.policies import EVICTION, PREFETCH
from lorikeet.memory.rules import MemoryRules
from lorikeet.presets import ColdStart, KvAfterFinish, MemorySplit, Preset

_Ranks = tuple[tuple[str, tuple[int, ...]], ...]
_KEPT = 1024
"""Results by ranks: versions with ranks of their own on every layer must not add up for ever."""


def build_memory(preset: Preset, sizes: EngineSizes, max_num_batched_tokens: int) -> Memory:
    """Build the memory of a replica.

    Args:
        preset: says how it behaves.
        sizes: of the engine.
        max_num_batched_tokens: of a step.

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
        memory_rules(preset),
        _assist(preset, sizes, max_num_batched_tokens),
    )


def memory_rules(preset: Preset) -> MemoryRules:
    """Return what a preset says of the memory.

    Raises:
        ConfigError: it names a policy that does not exist.
    """
    for policy, table in ((preset.eviction, EVICTION), (preset.prefetch, PREFETCH)):
        if policy not in table:
            raise ConfigError(f"preset: no policy is called {policy!r}; there are: {', '.join(table)}")
    return MemoryRules(
        keep_kv=preset.kv_after_finish is KvAfterFinish.KEPT,
        host_kv=preset.host_kv,
        dependent=preset.dependency_tree,
        adapter_share=preset.adapter_share if preset.memory_split is MemorySplit.STATIC else None,
        padded_slots=preset.padded_slots,
        keep_adapters=preset.keep_adapters,
        tick_s=preset.swap_interval_s,
        prefetch_below=preset.prefetch_below,
        evict_to=preset.evict_to,
    )


def _adapter_sizes(sizes: EngineSizes) -> Callable[[AdapterRef], AdapterSize]:
    """Return a function that tells what an adapter takes. Thousands of versions share a few sizes, computed once."""
    geometry = sizes.local_geometry
    block_elements = geometry.block_elements(sizes.block_size)

    @lru_cache(_KEPT)
    def size(ranks: _Ranks) -> AdapterSize:
        packing = pack(dict(ranks), geometry, block_elements)
        return AdapterSize(packing.blocks, packing.used_elements * geometry.dtype_bytes)

    return lambda ref: size(tuple(ref.ranks.items()))


def _assist(preset: Preset, sizes: EngineSizes, max_num_batched_tokens: int) -> Assist:
    """Return a function that tells how an adapter is to arrive whose prefill is assisted.

    What counts is the first step's part of the prompt: the sooner that is done, the sooner is all of it, and an adapter
    arrives during one part or two.
    """
    costs = sizes.assist
    if costs is None or preset.cold_start not in (ColdStart.ASSIST, ColdStart.AUTO):
        return lambda ref, tokens: AS_THEY_LIE
    geometry = sizes.local_geometry
    block_elements = geometry.block_elements(sizes.block_size)
    is_wanted = costs.pays if preset.cold_start is ColdStart.AUTO else lambda ref, tokens: costs.can_assist(ref)

    @lru_cache(_KEPT)
    def planned(ranks: _Ranks, tokens: int) -> Order:
        ref = AdapterRef(AdapterName(""), AdapterDigest(""), "", dict(ranks), 0)
        groups = costs.layer_groups(ref, tokens)
        runs = block_runs(pack(ref.ranks, geometry, block_elements), groups)
        return Order(runs, groups[-1] if costs.is_static else (0, 0))

    def order(ref: AdapterRef, tokens: int) -> Order:
        tokens = min(tokens, max_num_batched_tokens)
        if not is_wanted(ref, tokens):
            return AS_THEY_LIE
        return planned(tuple(ref.ranks.items()), 1 << (tokens - 1).bit_length())  # all that the groups depend on

    return order
