"""Leases of adapter versions: a request keeps one version from the lookup of its name until its end."""

import asyncio
from collections import Counter
from types import TracebackType

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import UnknownAdapter
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.http.errors import ApiError


class VersionChanged(ApiError):
    """A version was replaced or removed since it was looked up."""

    def __init__(self, name: str) -> None:
        super().__init__(409, f"The adapter `{name}` has just changed; send the request again.")


class Lease:
    """Keeps one version for one request, or nothing for the base model.

    Its files stay until :meth:`close`. A removal of the adapter also waits until :meth:`submitted`, since the engine
    must get the requests that use a version before the message that drops it. As a context manager it closes unless
    the request was submitted; from then on the request's end closes it.

    Args:
        leases: counts it.
        digest: the version; None for the base model.
    """

    def __init__(self, leases: "AdapterLeases", digest: AdapterDigest | None) -> None:
        self._leases = leases
        self._digest = digest
        self._is_submitted = False
        self._is_closed = False

    def submitted(self) -> None:
        """Note that the engine has the request; a second call does nothing."""
        if not self._is_submitted:
            self._is_submitted = True
            if self._digest is not None:
                self._leases.count_submitted(self._digest)

    def close(self) -> None:
        """Give the version back; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.submitted()
        if self._digest is not None:
            self._leases.give_back(self._digest)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_submitted:
            self.close()


class AdapterLeases:
    """Gives out leases, so that no answer mixes versions of an adapter.

    An engine keeps the versions of its requests. It must get these requests before the message that drops a version,
    which :meth:`all_submitted` waits for.

    Args:
        catalog: keeps the files.
    """

    def __init__(self, catalog: AdapterCatalog) -> None:
        self._catalog = catalog
        self._unsubmitted: Counter[AdapterDigest] = Counter()
        self._waiting: dict[AdapterDigest, list[asyncio.Future[None]]] = {}

    def take(self, adapter: AdapterRef | None) -> Lease:
        """Lease a version; None stands for the base model, which needs no lease.

        Raises:
            VersionChanged: it was replaced or removed since it was looked up.
        """
        if adapter is None:
            return Lease(self, None)
        try:
            self._catalog.acquire(adapter.digest)
        except UnknownAdapter:
            raise VersionChanged(adapter.name) from None
        self._unsubmitted[adapter.digest] += 1
        return Lease(self, adapter.digest)

    async def all_submitted(self, digest: AdapterDigest) -> None:
        """Wait until the engine has every request that leases a version."""
        if digest in self._unsubmitted:
            submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(digest, []).append(submitted)
            await submitted

    def count_submitted(self, digest: AdapterDigest) -> None:
        """Count one lease as submitted; called by the lease."""
        self._unsubmitted[digest] -= 1
        if not self._unsubmitted[digest]:
            del self._unsubmitted[digest]
            for waiting in self._waiting.pop(digest, ()):
                if not waiting.done():
                    waiting.set_result(None)

    def give_back(self, digest: AdapterDigest) -> None:
        """Release the files of one lease; called by the lease."""
        self._catalog.release(digest)
