"""Holds the files and batches of a server: the storage, opened on first use, and the runner."""

import asyncio
from collections.abc import Callable

from lorikeet.http.errors import ApiError
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread
from lorikeet.serving.batches.dispatch import BatchDispatcher
from lorikeet.serving.batches.runner import BatchRunner
from lorikeet.serving.batches.storage import BatchStorage, StorageTaken

_UPLOADS = 4
"""Files that are received at the same time; others wait to be read."""


class Batches:
    """Holds the storage and the runner of a server's batches.

    Args:
        storage: the storage of files and batches.
        concurrency: returns the largest number of requests to answer at the same time.
        dispatcher: makes the dispatcher, which answers the requests.

    Attributes:
        storage: the storage of files and batches.
        runner: answers the requests of all batches.
        uploads: lock that is held while a file is received.
        changes: lock that is held while files and batches change.
    """

    def __init__(
        self, storage: BatchStorage, concurrency: Callable[[], int], dispatcher: Callable[[], BatchDispatcher]
    ) -> None:
        self.storage = storage
        self.runner = BatchRunner(storage, concurrency, dispatcher)
        self.uploads = asyncio.Semaphore(_UPLOADS)
        self.changes = asyncio.Lock()
        self._is_open = False

    async def open(self) -> BatchStorage:
        """Open the storage and return it. The first call also continues the unfinished batches.

        Raises:
            ApiError: 501, another server uses the folder; 500, the folder cannot be used.
        """
        async with self.changes:
            if not self._is_open:
                try:
                    await in_daemon_thread(self.storage.open)
                except StorageTaken as error:
                    said = "Another server has the folder for batches; start this one with a --batch-dir of its own."
                    raise ApiError(501, said) from error
                except OSError as error:
                    log.error("the folder for batches cannot be used", error=str(error))
                    said = f"The folder for batches cannot be used: {error.strerror}."
                    raise ApiError(500, said, headers={"x-should-retry": "false"}) from error
                self._is_open = True
                self.runner.start()
        return self.storage

    async def resume(self) -> None:
        """Continue the batches of an earlier run. A folder that another server owns is ignored."""
        if not self.storage.exists:
            return
        try:
            await self.open()
        except ApiError as error:
            log.warning("batches are not available", reason=error.message)

    async def close(self) -> None:
        """Stop the runner and close the storage. Unfinished batches continue at the next start."""
        await self.runner.close()
        self.storage.close()
