"""How one row's memory behaves, beside its eviction and prefetch policies."""

import msgspec


class MemoryRules(msgspec.Struct, frozen=True):
    """See the module.

    Attributes:
        keep_kv: KV stays after its request has finished.
        host_kv: KV that leaves the device goes to the host while there is room; else it is gone.
        dependent: only leaves leave the device, and KV is there only below its adapter and earlier KV (ELORA's
            tree). Else any unneeded node may leave, and KV can stay behind without its adapter.
        adapter_share: part of the device set aside for adapters, the rest for KV; None: both share all of it.
        padded_slots: an adapter takes as many device blocks as the largest known one.
        keep_adapters: an adapter stays when its last running request has ended, while nobody needs its room.
        tick_s: time between the swapper's ticks; 0 for none.
        prefetch_below: it prefetches while less than this share of the device is in use, and up to it.
        evict_to: share of the device in use that it leaves when it finds the device full.
    """

    keep_kv: bool = True
    host_kv: bool = True
    dependent: bool = True
    adapter_share: float | None = None
    padded_slots: bool = False
    keep_adapters: bool = True
    tick_s: float = 0.0
    prefetch_below: float = 0.7
    evict_to: float = 0.95
