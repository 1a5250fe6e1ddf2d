"""Eviction rules by name: which unused node leaves first. One short file each, one row here."""

from collections.abc import Callable

from lorikeet.memory.policies.lru import lru
from lorikeet.memory.tree import Node

EvictionPolicy = Callable[[Node], float]
"""Gives an unused leaf its key; the smallest key leaves first. The key may not change while the leaf is unused."""

EVICTION: dict[str, EvictionPolicy] = {"lru": lru}
