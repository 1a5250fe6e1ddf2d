"""Adapter versions that engines were told to drop, and who waits for that."""

import asyncio
from collections.abc import Iterator

from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.connection import EngineError


class Drops:
    """Drops under way at one engine."""

    def __init__(self) -> None:
        self._waiting: dict[AdapterDigest, list[asyncio.Future[int]]] = {}

    def __iter__(self) -> Iterator[AdapterDigest]:
        """Yield the versions that are being dropped."""
        return iter(tuple(self._waiting))

    def __contains__(self, digest: AdapterDigest) -> bool:
        """Whether a version is being dropped."""
        return digest in self._waiting

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return what will be the bytes that were freed."""
        freed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(digest, []).append(freed)
        return freed

    def ended(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """A version has been dropped."""
        for freed in self._waiting.pop(digest, ()):
            if not freed.done():
                freed.set_result(freed_bytes)

    def fail(self, failure: EngineError) -> None:
        """Nothing will be dropped any more."""
        for waiting in self._waiting.values():
            for freed in waiting:
                if not freed.done():
                    freed.set_exception(failure)
        self._waiting.clear()
