"""Runs small Python processes beside the API process, which answer messages from their input one by one.

Their work would block the event loop or could end the process. Their memory and time are limited.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from lorikeet.http.errors import unexpected_failure
from lorikeet.http.helper_main import LENGTH
from lorikeet.http.logs import log

_START_S = 60.0


class HelperProcesses:
    """Runs one module in several processes, which start on demand and are replaced when they end.

    Each process reads its setup, answers it with an empty message when it is ready, and then answers every message.

    Args:
        module: the module to run.
        setup: returns the first message; it is called once.
        most: most processes.
    """

    def __init__(self, module: str, setup: Callable[[], bytes], most: int) -> None:
        self._module = module
        self._make_setup = setup
        self._setup = b""
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._starting: set[asyncio.Task[asyncio.subprocess.Process]] = set()
        self._free = asyncio.Semaphore(most)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [process.pid for process in self._all]

    async def ask(
        self, *message: bytes, timeout_s: float, go_on: Callable[[bytes], Awaitable[bytes | None]] | None = None
    ) -> bytes:
        """Send a message and return the answer. A process that does not answer in time is killed.

        Args:
            message: the parts of the message.
            timeout_s: time limit on an answer.
            go_on: takes the first answer and returns a second message for the same process, whose answer is then
                returned. The first answer is returned if ``go_on`` is None or returns None.

        Raises:
            EOFError, OSError: the process has ended.
            TimeoutError: the process did not answer in time.
            ApiError: no process could be started.
        """
        async with self._free:
            process = await self._process()
            answer = None
            try:
                answer = await _exchange(process, message, timeout_s)
                more = None if go_on is None else await go_on(answer)
                if more is not None:
                    answer = None
                    answer = await _exchange(process, (more,), timeout_s)
            finally:
                if answer is None:
                    self._end(process)
                else:
                    self._idle.append(process)
        return answer

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*self._starting, return_exceptions=True)
        for process in tuple(self._all):
            self._end(process)
            await process.wait()

    async def _process(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._end(process)
        # A task of its own: asyncio (3.11 to 3.13) may wait forever when the start of a process is cancelled.
        starting = asyncio.ensure_future(self._start())
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._keep)
            raise

    def _keep(self, started: asyncio.Task[asyncio.subprocess.Process]) -> None:
        if not started.cancelled() and started.exception() is None:
            self._idle.append(started.result())

    async def _start(self) -> asyncio.subprocess.Process:
        began_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Threads and their arenas would count as memory of the process.
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            # A Ctrl-C at the terminal should reach only the API process, and `_end` the children, too.
            start_new_session=True,
        )
        self._all.add(process)
        try:
            self._setup = self._setup or self._make_setup()
            async with asyncio.timeout(_START_S):
                assert process.stdin is not None
                process.stdin.writelines((LENGTH.pack(len(self._setup)), self._setup))
                await _message(process)
        except (EOFError, OSError, TimeoutError) as error:
            self._end(process)
            log.error("a helper process could not be started", module=self._module, error=repr(error))
            raise unexpected_failure() from error
        except BaseException:
            self._end(process)
            raise
        seconds = round(time.monotonic() - began_s, 1)
        log.info("helper process started", module=self._module, pid=process.pid, seconds=seconds)
        return process

    def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        # The whole group: a process whose children do the work would leave one that nobody waits for.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def _exchange(process: asyncio.subprocess.Process, message: Sequence[bytes], timeout_s: float) -> bytes:
    async with asyncio.timeout(timeout_s):
        assert process.stdin is not None
        process.stdin.writelines((LENGTH.pack(sum(map(len, message))), *message))
        await process.stdin.drain()
        return await _message(process)


async def _message(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(length)
