"""The predictor process, seen from the API process."""

import asyncio
import itertools
import os
import sys
import time
from contextlib import suppress

import msgspec

from lorikeet.scheduling.prediction.messages import (
    FROM_PROCESS,
    TEXT_TOKENS,
    Ask,
    Ready,
    Setup,
    Told,
    frame,
    take_frames,
)
from lorikeet.server.logs import log

MOST_WAITING = 32
"""Questions that the process has not dealt with, beyond which it is busy and gets no more."""

_FIRST_REST_S, _LAST_REST_S = 1.0, 60.0
"""Before a process that has ended is started again; doubled each time until one has answered something."""

_STUCK_S = 30.0
"""A busy process that has dealt with no question for so long is ended, and another started."""

_READ_BYTES = 2**16


class PredictorProcess:
    """Keeps a predictor process running and asks it.

    Args:
        setup: what it predicts with.
        timeout_s: an answer that takes longer is not waited for.

    Attributes:
        restarts: how often another process was started after one had ended.
        late: questions that were not answered in time.
        refused: questions that were not asked, as the process was busy or not there.
    """

    def __init__(self, setup: Setup, timeout_s: float) -> None:
        self.restarts = 0
        self.late = 0
        self.refused = 0
        self._setup = setup
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[int | None]] = {}
        self._waiting = 0
        self._dealt_s = 0.0
        """When it last dealt with a question, or got one after a pause."""
        self._rest_s = _FIRST_REST_S
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._cpu_s = self._ended_cpu_s = 0.0
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes so far, in seconds, as they said with their last answers."""
        return self._ended_cpu_s + self._cpu_s

    @property
    def process_id(self) -> int | None:
        """Process id of the one that can be asked, None while there is none."""
        return self._process.pid if self._process is not None and self._ready.is_set() else None

    async def wait_until_ready(self) -> None:
        """Wait until there is one that can be asked."""
        await self._ready.wait()

    async def predict(self, prompt: list[int], adapter: str | None) -> int | None:
        """Return how many tokens the answer to ``prompt`` will have; None if nobody says so in time.

        Args:
            prompt: token ids.
            adapter: name, None for the base model.
        """
        process = self._process
        if not self._ready.is_set() or self._waiting >= MOST_WAITING or process is None or process.stdin is None:
            self.refused += 1
            if self._waiting and time.monotonic() - self._dealt_s > _STUCK_S and process is not None:
                log.error("the predictor process deals with nothing", questions=self._waiting)
                _kill(process)
            return None
        if not self._waiting:
            self._dealt_s = time.monotonic()
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer = self._asked[number] = loop.create_future()
        self._waiting += 1
        until_s = time.monotonic() + self._timeout_s
        process.stdin.write(frame(Ask(number, prompt[-TEXT_TOKENS:], len(prompt), adapter, until_s)))
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            self.late += 1
            return None
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """End the process."""
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        if self._process is not None and self._process.returncode is None:
            _kill(self._process)
            await self._process.wait()

    async def _supervise(self) -> None:
        """Run one process after the other."""
        while True:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "lorikeet.engine.length_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # a Ctrl-C at the terminal is for the API process
                )
            except OSError as error:
                log.error("the predictor process cannot be started", error=str(error), again_in_s=self._rest_s)
            else:
                await self._listen(process)
                log.error("the predictor process ended", code=await process.wait(), starts_again_in_s=self._rest_s)
            self._give_up()
            await asyncio.sleep(self._rest_s)
            self._rest_s = min(2 * self._rest_s, _LAST_REST_S)
            self.restarts += 1

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Take what a process says until it ends, or says what nobody understands, which ends it."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frame(self._setup))
        received = bytearray()
        try:
            while content := await process.stdout.read(_READ_BYTES):
                received += content
                for message in map(FROM_PROCESS.decode, take_frames(received)):
                    self._cpu_s = message.cpu_s
                    match message:
                        case Ready():
                            self._ready.set()
                        case Told():
                            self._take(message)
        except msgspec.DecodeError as error:
            log.error("the predictor process cannot be understood", error=str(error))
            _kill(process)
        self._ready.clear()  # before anybody else asks it

    def _take(self, told: Told) -> None:
        self._rest_s = _FIRST_REST_S
        self._dealt_s = time.monotonic()
        self._waiting -= told.taken
        for number, tokens in told.predictions:
            answer = self._asked.get(number)
            if answer is not None and not answer.done():
                answer.set_result(tokens)

    def _give_up(self) -> None:
        """Nobody will answer what was asked so far."""
        self._ready.clear()
        self._waiting = 0
        self._ended_cpu_s += self._cpu_s
        self._cpu_s = 0.0
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
