"""Reads weighted mixtures of adapters in requests, and keeps the latest ones."""

import asyncio
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from lorikeet.adapters.mixture import Part
from lorikeet.http.errors import bad_request

MAX_PARTS = 16
MAX_MIXTURES = 32
"""Number of mixtures that are kept. Each has its own files and memory; the least recently used goes first."""
PREFIX = "mixture-"
MIXED = frozenset("*+")
"""Characters that only mixtures have, not names of adapters."""
_MAX_WEIGHT = 1000.0
_SPELLED = re.compile(r"\s*([^*+\s]+)\s*(?:\*\s*(-?[0-9]*\.?[0-9]+(?:[eE]-?[0-9]+)?)\s*)?")


def spelled(model: str) -> list[tuple[str, float]] | None:
    """Return the names and weights of ``a*0.7+b*0.3``; None for any other text.

    A missing weight is 1. An adapter's name cannot contain ``*`` or ``+``.

    Raises:
        ApiError: 400, the adapters are too many, or a weight is too large.
    """
    if not MIXED.intersection(model):
        return None
    found = [_SPELLED.fullmatch(part) for part in model.split("+")]
    parts = [(each[1], float(each[2] or 1.0)) for each in found if each is not None]
    if len(parts) != len(found):
        return None
    if len(parts) > MAX_PARTS:
        raise bad_request(f"model: a mixture may have at most {MAX_PARTS} adapters, not {len(parts)}.", "model")
    if wrong := [name for name, weight in parts if not abs(weight) <= _MAX_WEIGHT]:
        raise bad_request(f"model: the weight of {wrong[0]!r} is beyond ±{_MAX_WEIGHT:g}.", "model")
    return parts


def spelling(parts: Sequence[tuple[str, float]]) -> str:
    """Return the text that :func:`spelled` reads."""
    return "+".join(f"{name}*{weight!r}" for name, weight in parts)


def name_of(parts: Sequence[Part]) -> str:
    """Return the name under which a mixture is registered; it depends on versions and weights."""
    key = msgspec.json.encode([(ref.digest, float(weight)) for ref, weight in parts])
    return PREFIX + hashlib.sha256(key).hexdigest()[:24]


class Mixtures:
    """Keeps mixtures, and makes each only once for all requests that need it at the same time.

    Args:
        make: registers a mixture under a name.
        remove: removes a mixture, after the requests that use it.
    """

    def __init__(
        self, make: Callable[[str, Sequence[Part]], Awaitable[Any]], remove: Callable[[str], Awaitable[Any]]
    ) -> None:
        self._make = make
        self._remove = remove
        self._kept: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._removing: set[asyncio.Task[None]] = set()

    async def get(self, parts: Sequence[Part]) -> str:
        """Register a mixture if necessary, and return its name.

        Raises:
            ApiError: ``make`` failed.
        """
        name = name_of(parts)
        task = self._kept.get(name)
        if task is None:
            task = self._kept[name] = asyncio.create_task(self._made(name, parts))
            while len(self._kept) > MAX_MIXTURES:
                self._forget(next(iter(self._kept)))
        self._kept.move_to_end(name)
        await asyncio.shield(task)  # A client that hangs up must not cancel it for the others.
        return name

    def lost(self, name: str) -> None:
        """Drop a mixture that has been removed, so that the next request makes it again."""
        self._kept.pop(name, None)

    async def _made(self, name: str, parts: Sequence[Part]) -> None:
        try:
            await self._make(name, parts)
        except BaseException:
            self._kept.pop(name, None)
            raise

    def _forget(self, name: str) -> None:
        async def remove(made: asyncio.Task[None]) -> None:
            await asyncio.wait([made])
            if name not in self._kept:
                await self._remove(name)

        task = asyncio.create_task(remove(self._kept.pop(name)))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)


def of_fields(lora: Sequence[Any] | None, merged: Any) -> str:
    """Return the mixture in the fields of llama.cpp and LoRAX, in the form of :func:`spelled`; "" without one.

    Args:
        lora: llama.cpp's ``lora``: objects with ``id``, a name or an index in ``/v1/adapters``, and ``scale``.
        merged: LoRAX' ``merged_adapters`` or ``adapter_parameters``, with ``ids`` and ``weights``.

    Raises:
        ValueError: a field is not valid, or both are set.
    """
    if lora and merged is not None:
        raise ValueError("lora and merged_adapters exclude each other")
    if lora:
        return spelling([(str(each.id), each.scale) for each in lora])
    if merged is None or not merged.ids:
        return ""
    weights = merged.weights or [1.0] * len(merged.ids)
    if len(weights) != len(merged.ids):
        raise ValueError(f"{len(merged.ids)} ids have {len(weights)} weights")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError("a weight is not finite")
    return spelling(list(zip(merged.ids, weights, strict=True)))
