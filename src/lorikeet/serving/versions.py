"""Adapter versions in use by requests that no engine has yet."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import UnknownAdapter
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.http.errors import ApiError


class HeldVersions:
    """Keeps the version of a request from when it is resolved, so that no answer mixes versions of an adapter.

    An engine keeps the versions of its own requests. It is told to drop one after all requests that use it were sent.

    Args:
        catalog: keeps the files.
    """

    def __init__(self, catalog: AdapterCatalog) -> None:
        self._catalog = catalog
        self._held: Counter[AdapterDigest] = Counter()
        self._waiting: dict[AdapterDigest, list[asyncio.Future[None]]] = {}

    @contextmanager
    def hold(self, adapter: AdapterRef | None) -> Iterator[None]:
        """Keep a version within the context; None does nothing.

        Raises:
            ApiError: 409, it was replaced or removed since it was resolved.
        """
        if adapter is None:
            yield
            return
        try:
            self._catalog.acquire(adapter.digest)
        except UnknownAdapter:
            raise ApiError(409, f"The adapter `{adapter.name}` has just changed; send the request again.") from None
        self._held[adapter.digest] += 1
        try:
            yield
        finally:
            self._held[adapter.digest] -= 1
            if not self._held[adapter.digest]:
                del self._held[adapter.digest]
                for waiting in self._waiting.pop(adapter.digest, ()):
                    if not waiting.done():
                        waiting.set_result(None)
            self._catalog.release(adapter.digest)

    def hold_for_now(self, adapter: AdapterRef) -> bool:
        """Keep a version until the caller gives up control; return False if it is gone already."""
        holding = ExitStack()
        try:
            holding.enter_context(self.hold(adapter))
        except ApiError:
            return False
        asyncio.get_running_loop().call_soon(holding.close)
        return True

    async def all_sent(self, digest: AdapterDigest) -> None:
        """Wait until no request holds a version."""
        if digest in self._held:
            sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(digest, []).append(sent)
            await sent
