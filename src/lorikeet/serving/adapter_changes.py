"""Limits how many adapters load or unload at the same time, and keeps the tasks that free their memory."""

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
    """Counts the running and waiting loads of one host."""

    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LOADS_AT_ONCE))
    loads: int = 0


class LoadLimits:
    """Limits the loads of adapters per host, so that a host that hangs does not delay loads from other hosts."""

    def __init__(self) -> None:
        self._hosts: dict[str | None, _Host] = {}

    @asynccontextmanager
    async def of(self, source: str, *, may_refuse: bool = True) -> AsyncIterator[None]:
        """Wait until an adapter may load from ``source``, and count its load until the block ends.

        Args:
            source: the adapter's folder or URL.
            may_refuse: whether the load is refused if too many loads wait. If False, it always waits.

        Raises:
            ApiError: 429, too many loads of the host are waiting.
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
    """Holds the limits and tasks of adapter changes in progress.

    Attributes:
        loads: limits loads per host. Loads run in separate threads, so that slow downloads do not delay tokenization.
        removals: limits removals to one at a time, like the catalog. A removal never waits for a download.
        drops: tasks that drop versions. The set keeps them from being garbage-collected.
    """

    loads: LoadLimits = field(default_factory=LoadLimits)
    removals: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    drops: set[asyncio.Task[int]] = field(default_factory=set)
