"""Defines the memory options of a preset besides its eviction and prefetch policies."""

import msgspec

from lorikeet.presets import HostKv


class MemoryOptions(msgspec.Struct, frozen=True):
    """Options that decide which adapters and KV the memory keeps, and when the swapper moves them.

    Attributes:
        keep_kv: whether KV stays cached after its request has finished.
        host_kv: choice of the KV that is copied to the host.
        dependent: whether only leaves of the tree are evicted, so that KV is on the device only with its adapter and
            all earlier KV (ELORA). If False, any unneeded node may be evicted, and KV can stay without its adapter.
        adapter_share: share of the device reserved for adapters, with the rest for KV. None if both use the whole
            device.
        padded_slots: whether each adapter takes as many device blocks as the largest registered adapter.
        adapter_chain: whether an adapter is a chain of nodes of one block. Such an adapter is evicted from its end, as
            far as blocks are needed, and its remaining blocks are not copied again. If False, an adapter is one node.
        keep_adapters: whether an adapter stays cached after its last running request, until its blocks are needed.
        tick_s: seconds between ticks of the swapper; 0 for none.
        guard: parts with an alternative act only while they cost less (``core.guard``).
    """

    keep_kv: bool = True
    host_kv: HostKv = HostKv.EVICTED
    dependent: bool = True
    adapter_share: float | None = None
    padded_slots: bool = False
    adapter_chain: bool = False
    keep_adapters: bool = True
    tick_s: float = 0.0
    guard: bool = False
