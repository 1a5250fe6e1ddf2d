"""Eviction and prefetch policies by name.

A new policy is one file here and one entry in its table. docs/decisions/memory-policies.md explains the choices.
"""

from collections.abc import Callable
from functools import partial

from lorikeet.memory.policies.all_prefetch import AllPrefetch
from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, PrefetchPolicy
from lorikeet.memory.policies.bfs import Bfs
from lorikeet.memory.policies.chameleon import Chameleon
from lorikeet.memory.policies.elora import Elora, Factor
from lorikeet.memory.policies.halp import Halp
from lorikeet.memory.policies.hawkeye import Hawkeye
from lorikeet.memory.policies.histogram_prefetch import HistogramPrefetch
from lorikeet.memory.policies.lru import Lru, LruWithReuse
from lorikeet.memory.policies.prefetch import BestFirst, BestFirstFlat, Branches, NewestFirst
from lorikeet.memory.policies.queue_prefetch import QueuePrefetch
from lorikeet.memory.policies.rrip import Srrip
from lorikeet.memory.policies.wom import Wom

EVICTION: dict[str, Callable[[MemoryView], EvictionPolicy]] = {
    "lru": Lru,
    "lru:reuse": LruWithReuse,
    "elora": Elora,
    "elora:wom": Wom,
    "elora:wol": partial(Elora, without=Factor.LORA_EVAL),
    "elora:wov": partial(Elora, without=Factor.VISIT),
    "elora:wou": partial(Elora, without=Factor.RECENCY),
    "bfs": Bfs,
    "rrip": Srrip,
    "hawkeye": Hawkeye,
    "halp": Halp,
    "chameleon": Chameleon,
    "chameleon:lru": partial(Chameleon, frequency=0.0, recency=1.0, size=0.0),
    "chameleon:fairshare": partial(Chameleon, frequency=1 / 3, recency=1 / 3, size=1 / 3),
}

PREFETCH: dict[str, Callable[[MemoryView, EvictionPolicy], PrefetchPolicy]] = {
    "none": PrefetchPolicy,
    "all": AllPrefetch,
    "best-first": BestFirst,
    "best-first:flat": BestFirstFlat,
    "newest-first": NewestFirst,
    "branches": Branches,
    "queue": QueuePrefetch,
    "histogram": HistogramPrefetch,
}
