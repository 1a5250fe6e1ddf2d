"""Holds requests back while generation is paused: all of it, that of some adapters or of some tenants, or asleep."""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from lorikeet.core.request import Request


class SleepTag(StrEnum):
    """A part of the engine that sleeps and wakes by itself, named as in vLLM."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"
    """No memory: the engine runs, and computes nothing."""


IN_MEMORY = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})
"""Parts that take memory."""


class Scope(NamedTuple):
    """The requests that a pause is about: those of adapters or of a tenant, or all of them.

    Attributes:
        adapters: names of models.
        tenant: a tenant; None for every tenant.
    """

    adapters: frozenset[str] = frozenset()
    tenant: str | None = None

    @property
    def is_all(self) -> bool:
        """Whether the pause is about all requests."""
        return not self.adapters and self.tenant is None

    def covers(self, request: Request) -> bool:
        """Return whether the pause is about a running request."""
        name = "" if request.adapter is None else request.adapter.name
        return self.is_all or name in self.adapters or request.tenant == self.tenant

    def shown(self) -> dict[str, Any]:
        """Return the fields for the log."""
        shown = {"adapters": sorted(self.adapters), "tenant": self.tenant}
        return {name: value for name, value in shown.items() if value}


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
        self.tenants: set[str | None] = set()
        self.asleep: frozenset[SleepTag] = frozenset()
        self._changed = asyncio.Event()

    @property
    def stops_all(self) -> bool:
        """Whether all requests wait."""
        return self.everything or bool(self.asleep)

    def shown(self) -> dict[str, Any]:
        """Return the pauses for JSON. ``all`` is a pause of all requests, ``asleep`` the parts that sleep."""
        tenants = sorted(filter(None, self.tenants))
        return {
            "all": self.everything,
            "asleep": sorted(self.asleep),
            "adapters": sorted(self.adapters),
            "tenants": tenants,
        }

    @property
    def weights_sleep(self) -> bool:
        """Whether the weights sleep, and with them the pool: both belong to the engine's process."""
        return SleepTag.WEIGHTS in self.asleep

    @property
    def pool_sleeps(self) -> bool:
        """Whether the pool sleeps."""
        return bool(self.asleep & IN_MEMORY)

    def holds(self, model: str, tenant: str) -> bool:
        """Return whether requests of a tenant to a model wait."""
        return self.stops_all or model in self.adapters or tenant in self.tenants

    def hold(self, scope: Scope) -> None:
        """Let later requests of a scope wait."""
        self.everything = self.everything or scope.is_all
        self.adapters |= scope.adapters
        self.tenants |= {scope.tenant} - {None}

    def release(self, scope: Scope) -> None:
        """Let requests of a scope go on, unless another pause is about them."""
        self.everything = self.everything and not scope.is_all
        self.adapters -= scope.adapters
        self.tenants -= {scope.tenant}

    def covers(self, scope: Scope) -> bool:
        """Return whether a scope was paused."""
        if scope.is_all:
            return self.everything
        return scope.adapters <= self.adapters and (scope.tenant is None or scope.tenant in self.tenants)

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
