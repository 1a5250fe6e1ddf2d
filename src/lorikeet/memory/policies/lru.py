"""Least recently used: adapters and KV alike, by the last use alone."""

from lorikeet.memory.tree import Node


def lru(node: Node) -> float:
    """Return the time of last use in seconds."""
    return node.last_use_s
