"""Answers the lines of all unfinished batches in turn, a limited number at the same time."""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import msgspec

from lorikeet.http.errors import bad_request, unexpected_failure
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread, off_the_loop
from lorikeet.observe.json_lines import drop_partial_line
from lorikeet.serving.batches.dispatch import BatchDispatcher, LineAnswer
from lorikeet.serving.batches.lines import (
    RequestLine,
    answer_line,
    answered,
    error_line,
    numbered_lines,
    read_request,
)
from lorikeet.serving.batches.storage import BatchJob, BatchStorage

_LINES_READ = 64
"""Most lines that are read from a file at once."""
_BYTES_READ = 2**20
"""Bytes after which no further line is read."""
_MAX_HELD_BYTES = 32 * 2**20
"""Most bytes of the requests that are being answered; a larger one is answered alone."""
_RETRIED = {429, 503}
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_DISK_PAUSE_S = 10.0


class _Asked(msgspec.Struct):
    """Fields of a body that batches do not support."""

    stream: bool | None = None
    background: bool | None = None


class BatchRun:
    """Holds an unfinished batch, with its unanswered and running requests.

    Args:
        batch: an unfinished batch.
        storage: the batch's storage.

    Attributes:
        batch: the batch.
        tasks: tasks that answer the batch's requests.
        calls: calls of routes in progress.
        is_expired: whether a request was abandoned because the batch's time had passed.
    """

    def __init__(self, batch: BatchJob, storage: BatchStorage) -> None:
        self.batch = batch
        self.tasks: set[asyncio.Task[None]] = set()
        self.calls: set[asyncio.Task[LineAnswer]] = set()
        self.is_expired = False
        self._storage = storage
        self._requests: Iterator[RequestLine] | None = None
        self._ahead: deque[RequestLine] = deque()
        self._source: BinaryIO | None = None
        self._writing = asyncio.Lock()

    async def next(self) -> RequestLine | None:
        """Return the next request without an answer; None after the last.

        Raises:
            OSError, ValueError: a file cannot be read.
        """
        if not self._ahead:
            self._ahead.extend(await in_daemon_thread(self._read))
        return self._ahead.popleft() if self._ahead else None

    def _read(self) -> list[RequestLine]:
        if self._requests is None:
            self._requests = self._open()
        requests = list[RequestLine]()
        size_bytes = 0
        for request in islice(self._requests, _LINES_READ):
            requests.append(request)
            size_bytes += len(request.body)
            if size_bytes > _BYTES_READ:
                break
        return requests

    def _open(self) -> Iterator[RequestLine]:
        """Find the requests that have an answer, and return the other ones."""
        batch = self.batch
        storage = self._storage
        done = set[str]()
        counts = list[int]()
        for file_id in (batch.output_file_id, batch.error_file_id):
            path = storage.data_path(file_id)
            drop_partial_line(path)
            ids = answered(path)
            done |= ids
            counts.append(len(ids))
        batch.completed, batch.failed = counts
        self._source = storage.data_path(batch.input_file_id).open("rb")
        lines = numbered_lines(self._source, storage.max_line_bytes)
        requests = (read_request(content, number) for number, content in lines)
        return (request for request in requests if request.custom_id not in done)

    def close(self) -> None:
        """Close the file of requests."""
        if self._source is not None:
            self._source.close()

    async def write(self, line: bytes, *, is_error: bool) -> None:
        """Append an answer to the output or error file. While the disk is full, try again."""
        batch = self.batch
        path = self._storage.data_path(batch.error_file_id if is_error else batch.output_file_id)

        def append() -> None:
            with path.open("ab", buffering=0) as file:
                begin = file.seek(0, os.SEEK_END)
                if file.write(line) != len(line):
                    file.truncate(begin)
                    raise OSError("no space is left")

        async with self._writing:
            while True:
                try:
                    await off_the_loop(append, len(line))
                    break
                except OSError as error:
                    log.error("an answer of a batch cannot be written", batch=batch.id, error=str(error))
                    await asyncio.sleep(_DISK_PAUSE_S)
            batch.failed += is_error
            batch.completed += not is_error


class BatchRunner:
    """Runs all unfinished batches.

    Args:
        storage: the storage of all batches.
        concurrency: returns the largest number of requests to answer at the same time.
        dispatcher: makes the dispatcher on first use.
        now: returns the present Unix time in seconds.
    """

    def __init__(
        self,
        storage: BatchStorage,
        concurrency: Callable[[], int],
        dispatcher: Callable[[], BatchDispatcher],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._concurrency = concurrency
        self._make_dispatcher = dispatcher
        self._now = now
        self._dispatcher: BatchDispatcher | None = None
        self._runs: dict[str, BatchRun] = {}
        self._turns: deque[BatchRun] = deque()
        self._answering: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._held_bytes = 0
        self._pump: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Continue the unfinished batches of the storage, which must be open."""
        for batch in self._storage.unfinished():
            self.add(batch)

    def add(self, batch: BatchJob) -> None:
        """Start a batch."""
        run = self._runs[batch.id] = BatchRun(batch, self._storage)
        self._turns.append(run)
        log.info("batch running", batch=batch.id, requests=batch.total)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._take_turns())

    async def cancel(self, batch: BatchJob) -> None:
        """Stop a batch: abort its running requests, and write an error for every request without an answer.

        Raises:
            OSError: the new status cannot be stored.
        """
        await in_daemon_thread(partial(self._storage.note, batch, "cancelling"))
        if batch.id in self._runs:
            for call in tuple(self._runs[batch.id].calls):
                call.cancel()
        else:
            self.add(batch)  # The batch could not run before.

    async def close(self) -> None:
        """Stop all batches. Running requests are computed again after the next start."""
        tasks = [*self._answering, *self._endings, *([] if self._pump is None else [self._pump])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            run.close()

    # --- internals -----------------------------------------------------------------------------------

    async def _take_turns(self) -> None:
        while self._turns:
            run = self._turns.popleft()
            try:
                request = await run.next()
            except (OSError, ValueError) as error:
                log.error("a batch cannot continue before the next start", batch=run.batch.id, error=str(error))
                self._forget(run)
                continue
            if request is None:
                self._keep(self._endings, self._end(run))
                continue
            await self._wait_for_place(run, len(request.body))
            self._turns.append(run)
            task = self._keep(self._answering, self._answer(run, request))
            run.tasks.add(task)
            task.add_done_callback(run.tasks.discard)

    @staticmethod
    def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _wait_for_place(self, run: BatchRun, size_bytes: int) -> None:
        """Wait until one more request may run. Requests of a stopped batch do not wait."""
        while self._answering and self._why_stopped(run.batch) is None:
            if len(self._answering) < self._concurrency() and self._held_bytes + size_bytes <= _MAX_HELD_BYTES:
                return
            await asyncio.wait(self._answering, return_when=asyncio.FIRST_COMPLETED)

    def _why_stopped(self, batch: BatchJob) -> str | None:
        if batch.status == "cancelling":
            return "batch_cancelled"
        return "batch_expired" if self._now() >= batch.expires_at else None

    async def _answer(self, run: BatchRun, request: RequestLine) -> None:
        """Answer one request and write the answer."""
        batch = run.batch
        line_id = f"batch_req_{secrets.token_hex(12)}"
        size_bytes = len(request.body)
        self._held_bytes += size_bytes
        try:
            why = self._why_stopped(batch)
            if why is None:
                call = asyncio.create_task(self._ask(batch, request, line_id))
                run.calls.add(call)
                call.add_done_callback(run.calls.discard)
                try:
                    status, body = await call
                except asyncio.CancelledError:
                    call.cancel()
                    if batch.status != "cancelling" or self._is_cancelled():
                        raise  # The server stops.
                    why = "batch_cancelled"
                except TimeoutError:
                    why = "batch_expired"
                except Exception as error:
                    log.error("a request of a batch failed", batch=batch.id, line=line_id, exc_info=error)
                    status = 500
                    body = bytes(unexpected_failure().response().body)
            if why is None:
                line = await off_the_loop(
                    lambda: answer_line(line_id, request.custom_id, status, line_id, body), len(body)
                )
                await run.write(line, is_error=status >= 400)
            else:
                run.is_expired |= why == "batch_expired"
                said = f"The batch {'was cancelled' if why == 'batch_cancelled' else 'expired'} before this request."
                await run.write(error_line(line_id, request.custom_id, why, said), is_error=True)
        finally:
            self._held_bytes -= size_bytes

    @staticmethod
    def _is_cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def _ask(self, batch: BatchJob, request: RequestLine, line_id: str) -> LineAnswer:
        """Call the route and return its answer. Retry while the server is overloaded or has no engine.

        Raises:
            TimeoutError: the batch has expired.
        """
        if (refused := _refusal(request)) is not None:
            return refused
        if self._dispatcher is None:
            self._dispatcher = self._make_dispatcher()
        pause_s = _FIRST_PAUSE_S
        async with asyncio.timeout(max(0.0, batch.expires_at - self._now())):
            while True:
                answer = await self._dispatcher.post(request.url, request.body, batch.tenant, line_id)
                if answer.status not in _RETRIED:
                    return answer
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _end(self, run: BatchRun) -> None:
        """Publish the answers of a batch after its last requests have ended."""
        while run.tasks:
            await asyncio.wait(run.tasks)
        batch = run.batch
        status = "cancelled" if batch.status == "cancelling" else "expired" if run.is_expired else "completed"
        while True:
            try:
                await in_daemon_thread(partial(self._storage.finish, batch, status))
                break
            except OSError as error:
                log.error("a batch cannot be ended", batch=batch.id, error=str(error))
                await asyncio.sleep(_DISK_PAUSE_S)
        self._forget(run)
        log.info("batch ended", batch=batch.id, status=status, completed=batch.completed, failed=batch.failed)

    def _forget(self, run: BatchRun) -> None:
        run.close()
        self._runs.pop(run.batch.id, None)


def _refusal(request: RequestLine) -> LineAnswer | None:
    """Return an error for a request that batches do not support; None for other requests."""
    try:
        asked = msgspec.json.decode(request.body, type=_Asked)
    except msgspec.DecodeError:
        return None  # The route's answer will name the error.
    for name in ("stream", "background"):
        if getattr(asked, name):
            error = bad_request(f"{name}: not in a batch.", name)
            return LineAnswer(error.status, bytes(error.response().body))
    return None
