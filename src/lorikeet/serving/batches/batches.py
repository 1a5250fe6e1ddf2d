"""The files and batches of a server: its storage, opened when it is needed, and what runs them."""

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
    """Files and batches of a server.

    Args:
        storage: has them.
        concurrency: returns how many requests are answered at once, at most.
        dispatcher: makes what answers them.

    Attributes:
        storage: as given.
        runner: answers the requests.
        uploads: held while a file is received.
        changes: held while files and batches are changed.
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
        """Return the storage, open, and go on with its batches if it was not open before.

        Raises:
            ApiError: 501, another server uses the folder; 500, it cannot be used.
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
        """Go on with what an earlier server has left; a folder that is another's is left alone."""
        if not self.storage.exists:
            return
        try:
            await self.open()
        except ApiError as error:
            log.warning("batches are not available", reason=error.message)

    async def close(self) -> None:
        """Stop; unfinished batches go on at the next start."""
        await self.runner.close()
        self.storage.close()
