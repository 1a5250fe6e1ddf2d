"""Limits how many adapters are loaded and removed at the same time, and keeps the tasks that drop them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from anyio import CapacityLimiter

from lorikeet.adapters.sources import host_of
from lorikeet.http.errors import ApiError

LOADS_AT_ONCE = 4
"""Loads from one host at the same time, or from local folders."""

MAX_WAITING = 64
"""Loads from one host that wait for a place; further ones are refused."""


@dataclass
class _Host:
    """Places of one host, and the number of loads that have or want one."""

    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOADS_AT_ONCE))
    loads: int = 0


class LoadLimits:
    """Limits loads of adapters. Each host has places of its own, so that a host that hangs delays no other."""

    def __init__(self) -> None:
        self._hosts: dict[str | None, _Host] = {}

    @asynccontextmanager
    async def of(self, source: str, *, may_refuse: bool = True) -> AsyncIterator[None]:
        """Wait for a place to load an adapter from ``source``, and keep it during the block.

        Args:
            source: folder or URL.
            may_refuse: False waits however many others do.

        Raises:
            ApiError: 429, too many are waiting.
        """
        name = host_of(source)
        host = self._hosts.setdefault(name, _Host())
        if may_refuse and host.loads >= LOADS_AT_ONCE + MAX_WAITING:
            raise ApiError(
                429,
                f"{host.loads} adapters are being loaded from {name or 'local folders'}; try again later.",
                headers={"Retry-After": "5"},
            )
        host.loads += 1
        try:
            async with host.places:
                yield
        finally:
            host.loads -= 1
            if not host.loads:
                del self._hosts[name]


@dataclass
class AdapterChanges:
    """Changes of adapters in progress.

    Attributes:
        loads: limits loads by host. They have threads of their own, so that slow downloads delay no tokenization.
        removals: limits removals to one at a time, as the catalog does. They never wait for a download.
        drops: tasks that drop versions; kept here so that they are not garbage-collected.
    """

    loads: LoadLimits = field(default_factory=LoadLimits)
    removals: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    drops: set[asyncio.Task[int]] = field(default_factory=set)
