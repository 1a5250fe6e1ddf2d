"""Sends the requests of a file to a server, and appends the answers to another file."""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import aiohttp
import msgspec

from lorikeet.cli.http_client import connector_to
from lorikeet.http.urls import unix_socket
from lorikeet.observe.json_lines import drop_partial_line
from lorikeet.serving.batches.lines import (
    RequestLine,
    answer_line,
    answered,
    check_requests,
    error_line,
    numbered_lines,
    read_request,
)

MAX_LINE_BYTES = 2**28
"""Longer lines are refused, since each is read whole."""
_RETRIED = {429, 503}
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MAX_FAILURES = 8
"""Times that a connection may fail one after the other before the server counts as gone."""


class BatchError(RuntimeError):
    """The batch cannot continue; the message has the reason."""


class BatchCounts(NamedTuple):
    """Holds the progress of a batch.

    Attributes:
        total: number of requests in the file.
        done: number of requests with an answer.
        failed: number of answers with an error in this run.
    """

    total: int
    done: int
    failed: int = 0


class BatchFiles:
    """Holds a file of requests and the file of their answers, which this process owns.

    Args:
        source: the file of requests.
        target: the file of answers. It is created if missing, and continued if it exists.

    Raises:
        LineError: a line of a file is wrong.
        BatchError: another process writes the answers.
        OSError: a file cannot be read or written.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        if target.exists() and target.samefile(source):
            raise BatchError(f"{target}: the answers cannot be in the file of the requests")
        with source.open("rb") as file:
            self.total = check_requests(file, 2**62, MAX_LINE_BYTES).lines
        self._target: BinaryIO = target.open("ab", buffering=0)
        try:
            fcntl.flock(self._target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._target.close()
            raise BatchError(f"{target}: another process writes to it") from error
        try:
            drop_partial_line(target)
            self._answered = answered(target)
        except (OSError, ValueError) as error:
            self._target.close()
            raise BatchError(f"{target}: the file exists and does not contain answers of a batch: {error}") from error

    @property
    def counts(self) -> BatchCounts:
        """Return the progress."""
        return BatchCounts(self.total, min(self.total, len(self._answered)))

    def unanswered(self) -> Iterator[RequestLine]:
        """Yield the requests that had no answer when the file was opened."""
        with self._source.open("rb") as file:
            for number, content in numbered_lines(file, MAX_LINE_BYTES):
                request = read_request(content, number)
                if request.custom_id not in self._answered:
                    yield request

    def append(self, line: bytes) -> None:
        """Append an answer.

        Raises:
            OSError: the line cannot be written completely.
        """
        begin = self._target.seek(0, os.SEEK_END)
        if self._target.write(line) != len(line):
            self._target.truncate(begin)
            raise OSError("no space is left")

    def close(self) -> None:
        """Release the file of answers for other processes."""
        self._target.close()


async def send_batch(
    files: BatchFiles,
    url: str,
    api_key: str | None,
    concurrency: int,
    show: Callable[[BatchCounts], None],
) -> BatchCounts:
    """Send all requests without an answer, until every request has one.

    Args:
        files: the files of requests and answers.
        url: the server's URL; ``unix:PATH`` for a Unix socket.
        api_key: key that is sent as a bearer token.
        concurrency: number of requests at the same time.
        show: function that is called with the counts after every answer.

    Raises:
        BatchError: the server cannot be reached, or refuses the key.
        OSError: an answer cannot be written.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    root, connector = connector_to(url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    counts = files.counts
    waiting = iter(files.unanswered())
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, trust_env=not unix_socket(url), auto_decompress=True
    ) as session:

        async def work() -> None:
            nonlocal counts
            for request in waiting:  # The senders share the iterator, so that each request is sent once.
                line, has_failed = await _answer(session, root, request)
                files.append(line)
                counts = counts._replace(done=counts.done + 1, failed=counts.failed + has_failed)
                show(counts)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, counts.total - counts.done)):
                    group.create_task(work())
        except* (BatchError, OSError) as errors:
            raise errors.exceptions[0] from None
    return counts


async def _answer(session: aiohttp.ClientSession, root: str, request: RequestLine) -> tuple[bytes, bool]:
    """Send a request. Return the line with the answer, and whether the answer is an error."""
    line_id = f"batch_req_{secrets.token_hex(12)}"
    try:
        body = _in_background(request.body)
    except ValueError as error:
        return error_line(line_id, request.custom_id, "BadRequestError", str(error)), True
    pause_s = _FIRST_PAUSE_S
    failures = 0
    while True:
        try:
            async with session.post(
                root + request.url, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failures += 1
            if failures == _MAX_FAILURES:
                raise BatchError(f"{root}: {str(error) or type(error).__name__}") from error
        else:
            failures = 0
            if status == 401:
                raise BatchError(f"{root}: 401, the server needs a key (--api-key)")
            if status not in _RETRIED:
                request_id = response.headers.get("X-Request-Id", "")
                return answer_line(line_id, request.custom_id, status, request_id, content), status >= 400
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _in_background(body: bytes) -> bytes:
    """Return a body whose request runs when no other request waits, unless the body sets a priority.

    Raises:
        ValueError: the body requests a stream.
    """
    fields: dict[str, Any] = msgspec.json.decode(body)
    if fields.get("stream"):
        raise ValueError("stream: not supported in a batch")
    return body if "service_tier" in fields else msgspec.json.encode({**fields, "service_tier": "flex"})
