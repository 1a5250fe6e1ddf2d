"""Keeps account of the embeddings of images that the executor has.

Embeddings are larger than tokens and smaller than KV, and only prefills read them. So they have a memory of their own
beside the arenas, of limited size, from which the least recently used leave first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from lorikeet.core.messages import ImageStats


class ImageMemory:
    """Chooses the images whose embeddings the executor keeps.

    Args:
        limit_tokens: largest number of tokens whose embeddings are kept. Those of one step may exceed it.
    """

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._kept_tokens = 0
        self._left: list[bytes] = []
        self._computed = self._computed_tokens = self._reused = 0
        self._tower_s = 0.0

    def has(self, key: bytes) -> bool:
        """Return whether the executor has the embeddings of a key."""
        return key in self._tokens

    def use(self, keys: Iterable[bytes], reused: int) -> None:
        """Record that a step uses kept embeddings, those of ``reused`` images for the first time in a request."""
        for key in keys:
            self._tokens.move_to_end(key)
        self._reused += reused

    def add(self, new: Mapping[bytes, int], used: Iterable[bytes]) -> tuple[bytes, ...]:
        """Add the embeddings that a step computes, and return the keys of those that leave.

        Args:
            new: number of tokens of each new key.
            used: further keys that the step uses, which stay.
        """
        self._tokens.update(new)
        self._kept_tokens += sum(new.values())
        stay = {*used, *new}
        for key in [key for key in self._tokens if key not in stay]:
            if self._kept_tokens <= self._limit_tokens:
                break
            self._kept_tokens -= self._tokens.pop(key)
            self._left.append(key)
        left = tuple(self._left)
        self._left = []
        return left

    def computed(self, keys: Iterable[bytes], failed: Iterable[bytes], tower_s: float) -> None:
        """Record the images that a step has computed.

        Args:
            keys: the images' keys.
            failed: those of requests with an image that could not be computed. Their embeddings leave.
            tower_s: seconds that it took.
        """
        for key in failed:
            self._kept_tokens -= self._tokens.pop(key, 0)
            self._left.append(key)
        done = [self._tokens[key] for key in keys if key in self._tokens]
        self._computed += len(done)
        self._computed_tokens += sum(done)
        self._tower_s += tower_s

    def stats(self) -> ImageStats:
        """Return the counters, and the number of tokens whose embeddings are kept."""
        return ImageStats(self._computed, self._computed_tokens, self._reused, self._tower_s, self._kept_tokens)
