"""Holds requests back while generation is paused: all of it, that of some adapters or of some tenants, or asleep."""

import asyncio
from collections.abc import Callable
from enum import StrEnum


class SleepTag(StrEnum):
    """A part of the engine that sleeps and wakes by itself, named as in vLLM."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"
    """No memory: the engine runs, and computes nothing."""


IN_MEMORY = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})
"""Parts for which the engine ends."""


class Pauses:
    """The pauses of a server.

    Attributes:
        everything: whether all requests wait.
        adapters: names of models whose requests wait.
        tenants: tenants whose requests wait.
        asleep: the parts that sleep; while any does, all requests wait.
    """

    def __init__(self) -> None:
        self.everything = False
        self.adapters: set[str] = set()
        self.tenants: set[str] = set()
        self.asleep: frozenset[SleepTag] = frozenset()
        self._changed = asyncio.Event()

    @property
    def stops_all(self) -> bool:
        """Whether all requests wait."""
        return self.everything or bool(self.asleep)

    @property
    def engine_is_gone(self) -> bool:
        """Whether the engine has ended, since a part of its memory sleeps."""
        return bool(self.asleep & IN_MEMORY)

    def holds(self, model: str, tenant: str) -> bool:
        """Return whether requests of a tenant to a model wait."""
        return self.stops_all or model in self.adapters or tenant in self.tenants

    def change(self, edit: Callable[["Pauses"], None]) -> None:
        """Edit the pauses, and let requests that no longer wait go on."""
        edit(self)
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def wait(self, model: str, tenant: str) -> None:
        """Wait until requests of a tenant to a model may start; ``model`` is empty before it is known."""
        while self.holds(model, tenant):
            await self._changed.wait()
