"""Leases adapter versions: a request keeps one version from the lookup of its name until its end."""

import asyncio
from collections import Counter
from types import TracebackType

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import UnknownAdapter
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.http.errors import ApiError


class VersionChanged(ApiError):
    """A version was replaced or removed after its lookup."""

    def __init__(self, name: str) -> None:
        super().__init__(409, f"The adapter `{name}` has just changed; send the request again.")


class Lease:
    """Keeps an adapter version for one request. The lease of the base model keeps nothing.

    The version's files stay until :meth:`close`. A removal of the adapter also waits until :meth:`submitted`, since the
    engine must get the requests that use a version before the message that drops it. As a context manager, the lease
    closes at the end of the block unless the request was submitted. After the submission, the request's end closes the
    lease.

    Args:
        leases: counts the open leases.
        digest: the version's digest; None for the base model.
    """

    def __init__(self, leases: "AdapterLeases", digest: AdapterDigest | None) -> None:
        self._leases = leases
        self._digest = digest
        self._is_submitted = False
        self._is_closed = False

    def submitted(self) -> None:
        """Record that the engine has the request. A second call does nothing."""
        if not self._is_submitted:
            self._is_submitted = True
            if self._digest is not None:
                self._leases.count_submitted(self._digest)

    def close(self) -> None:
        """Release the version. A second call does nothing."""
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
    """Grants leases of adapter versions, so that no answer mixes two versions of an adapter.

    An engine keeps the versions of its requests. It must receive these requests before the message that drops a
    version: call :meth:`all_submitted` first.

    Args:
        catalog: the registered adapters, which keeps the files.
    """

    def __init__(self, catalog: AdapterCatalog) -> None:
        self._catalog = catalog
        self._unsubmitted: Counter[AdapterDigest] = Counter()
        self._waiting: dict[AdapterDigest, list[asyncio.Future[None]]] = {}

    def take(self, adapter: AdapterRef | None) -> Lease:
        """Lease a version. For the base model (None), the lease keeps nothing.

        Raises:
            VersionChanged: the version was replaced or removed after its lookup.
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
        """Wait until the engine has all requests that lease a version."""
        if digest in self._unsubmitted:
            submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(digest, []).append(submitted)
            await submitted

    def count_submitted(self, digest: AdapterDigest) -> None:
        """Count one lease as submitted. Only the lease calls this."""
        self._unsubmitted[digest] -= 1
        if not self._unsubmitted[digest]:
            del self._unsubmitted[digest]
            for waiting in self._waiting.pop(digest, ()):
                if not waiting.done():
                    waiting.set_result(None)

    def give_back(self, digest: AdapterDigest) -> None:
        """Release the files of one lease. Only the lease calls this."""
        self._catalog.release(digest)
