"""Adapter versions that are being dropped from a whole cluster, and who waits for that."""

import asyncio
from collections import Counter
from collections.abc import Callable

from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.connection import EngineError
from lorikeet.engine.drops import Drops


class Retiring:
    """A version is dropped when nobody uses or holds it, and the last of its copies has been deleted."""

    def __init__(self) -> None:
        self._drops = Drops()
        self._deletes = Counter[AdapterDigest]()
        self._freed_bytes = Counter[AdapterDigest]()

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return what will be the bytes freed on all replicas."""
        return self._drops.begin(digest)

    def deletes(self, digest: AdapterDigest, change: int) -> None:
        """So many more copies are being deleted."""
        self._deletes[digest] += change
        if not self._deletes[digest]:
            del self._deletes[digest]

    def freed(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """A replica's engine has forgotten a version."""
        if digest in self._drops:
            self._freed_bytes[digest] += freed_bytes

    def cancel(self, digest: AdapterDigest) -> None:
        """A version is wanted again: whoever waits for its end hears of what has been freed so far."""
        self._drops.ended(digest, self._freed_bytes.pop(digest, 0))

    def ended(self, is_used: Callable[[AdapterDigest], bool]) -> list[AdapterDigest]:
        """Tell those who wait for versions that are gone by now; return these versions."""
        gone = [digest for digest in self._drops if not self._deletes[digest] and not is_used(digest)]
        for digest in gone:
            self.cancel(digest)
        return gone

    def fail(self, failure: EngineError) -> None:
        """Nothing will be dropped any more."""
        self._drops.fail(failure)
