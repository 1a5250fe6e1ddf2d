"""Knows the cached KV of backends by the events that they publish, and finds the cached part of a prompt."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from lorikeet.core.ids import ReplicaId

EXPECTED_S = 10.0
"""Seconds for which a prompt's blocks count as cached where the prompt was sent, before their events arrive."""
_MAX_EXPECTED = 65_536
"""Most expected blocks of a backend."""
_KEY_BYTES = 16
_FIELDS = tuple("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys".split())
"""Fields of ``BlockStored`` in the order in which older versions of vLLM send them as an array."""


class _Block(msgspec.Struct):
    """A block of one backend: its key here, and the media that hold it."""

    key: bytes
    media: set[str]


class _Replica:
    """The blocks of one backend, by the backend's own hashes."""

    def __init__(self) -> None:
        self.block_size = 0
        self.blocks: dict[int | bytes, _Block] = {}
        self.counts: dict[bytes, int] = {}
        """Number of hashes of each key."""
        self.expected: dict[bytes, float] = {}

    def holds(self, key: bytes, now_s: float) -> bool:
        return key in self.counts or self.expected.get(key, 0.0) > now_s


class KvIndex:
    """Finds how many leading tokens of a prompt each backend has cached.

    The hashes in events differ between servers and cannot be computed from outside, so blocks get keys here: from the
    tokens, the adapter's name and the cache salt.

    Args:
        clock: returns the monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[ReplicaId, _Replica] = {}

    def __bool__(self) -> bool:
        """Return whether events of a backend have arrived."""
        return bool(self._replicas)

    def blocks(self, replica: ReplicaId) -> int:
        """Return the number of known blocks of a backend."""
        known = self._replicas.get(replica)
        return 0 if known is None else len(known.blocks)

    def clear(self, replica: ReplicaId) -> None:
        """Forget all blocks of a backend."""
        self._replicas.pop(replica, None)

    def apply(self, replica: ReplicaId, batch: bytes) -> None:
        """Apply a batch of events.

        Args:
            replica: the backend.
            batch: msgpack array of time, events and rank, in vLLM's format. Each event is a map, or an array.

        Raises:
            ValueError: the batch is not in this format.
        """
        known = self._replicas.setdefault(replica, _Replica())
        try:
            for event in msgspec.msgpack.decode(batch)[1]:
                _apply(known, event)
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a batch of events of KV: {error!r}") from error

    def cached_tokens(self, name: str, salt: str, token_ids: Sequence[int]) -> dict[ReplicaId, int]:
        """Return the number of leading tokens that each backend with events has cached.

        Args:
            name: name of the adapter; empty for the base model.
            salt: the cache salt; empty for none.
            token_ids: tokens of the prompt.
        """
        now_s = self._clock()
        found = dict.fromkeys(self._replicas, 0)
        for size in {each.block_size for each in self._replicas.values()} - {0}:
            having = [each for each, known in self._replicas.items() if known.block_size == size]
            for number, key in enumerate(_keys(name, salt, token_ids, size), 1):
                having = [each for each in having if self._replicas[each].holds(key, now_s)]
                if not having:
                    break
                found.update(dict.fromkeys(having, number * size))
        return found

    def expect(self, replica: ReplicaId, name: str, salt: str, token_ids: Sequence[int]) -> None:
        """Count a prompt that was just sent to a backend as cached there, until its events arrive."""
        known = self._replicas.get(replica)
        if known is None or not known.block_size:
            return
        until_s = self._clock() + EXPECTED_S
        for key in _keys(name, salt, token_ids, known.block_size):
            known.expected.pop(key, None)
            known.expected[key] = until_s
        while known.expected and (
            len(known.expected) > _MAX_EXPECTED or next(iter(known.expected.values())) <= self._clock()
        ):
            del known.expected[next(iter(known.expected))]


def _apply(known: _Replica, event: Any) -> None:
    if isinstance(event, list):
        kind, *values = event
        names = ("block_hashes", "medium") if kind == "BlockRemoved" else _FIELDS
        event = dict(zip(names, values, strict=False))
    else:
        kind = event["type"]
    if kind == "AllBlocksCleared":
        known.blocks.clear()
        known.counts.clear()
        known.expected.clear()
    elif kind == "BlockRemoved":
        for each in event["block_hashes"]:
            _remove(known, each, event.get("medium") or "GPU")
    elif kind == "BlockStored":
        _store(known, event)


def _store(known: _Replica, event: dict[str, Any]) -> None:
    """Add a chain of blocks, up to the first that depends on more than tokens, adapter and salt."""
    name = event.get("lora_name")
    if name is None and event.get("lora_id") is not None:
        return  # Older versions of vLLM number adapters, in an order that only they know.
    size = known.block_size = event["block_size"]
    parent = event["parent_block_hash"]
    above = None if parent is None else known.blocks.get(parent)
    if parent is not None and above is None:
        return  # The blocks before were reported before this router listened.
    key = b"" if above is None else above.key
    token_ids = event["token_ids"]
    extra_keys = event.get("extra_keys") or ()
    for index, each in enumerate(event["block_hashes"]):
        extra = list(extra_keys[index] or ()) if index < len(extra_keys) else []
        if name in extra:
            extra.remove(name)
        if above is None and index == 0:
            if len(extra) > 1 or not all(isinstance(one, str) for one in extra):
                return
            key = _root(_salt_of_request(extra[0]) if extra else "")
        elif extra:
            return
        key = _next(key, name or "", token_ids[index * size : (index + 1) * size])
        block = known.blocks.get(each)
        if block is None:
            block = known.blocks[each] = _Block(key, set())
            known.counts[key] = known.counts.get(key, 0) + 1
            known.expected.pop(key, None)
        block.media.add(event.get("medium") or "GPU")


def _remove(known: _Replica, each: int | bytes, medium: str) -> None:
    block = known.blocks.get(each)
    if block is None:
        return
    block.media.discard(medium)
    if not block.media:
        del known.blocks[each]
        known.counts[block.key] -= 1
        if not known.counts[block.key]:
            del known.counts[block.key]


def _salt_of_request(salt: str) -> str:
    """Return the request's own part of a salt. A Lorikeet with keys puts the tenant and a zero character before it.

    The router makes a salt for each client, so no two tenants share one.
    """
    tenant, separator, own = salt.partition("\0")
    return own if separator else tenant


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()


def _next(key: bytes, name: str, token_ids: Sequence[int]) -> bytes:
    return blake2b(key + name.encode() + b"\0" + array("q", token_ids).tobytes(), digest_size=_KEY_BYTES).digest()


def _keys(name: str, salt: str, token_ids: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield the keys of the whole blocks of a prompt."""
    key = _root(salt)
    for begin in range(0, len(token_ids) - size + 1, size):
        key = _next(key, name, token_ids[begin : begin + size])
        yield key
