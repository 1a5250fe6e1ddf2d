"""Feeds an engine in this process with requests as they arrive, on the engine's clock."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from lorikeet.core.clock import WaitableClock
from lorikeet.core.executor import ExecutorError
from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request
from lorikeet.engine.loop import Engine


class RequestSource(Protocol):
    """Requests that come by and by; some of them perhaps only after others have been answered."""

    def next_s(self) -> float:
        """Return when the next one comes, on the engine's clock; infinity if none comes before an answer has ended."""
        ...

    def take(self) -> Request:
        """Return that one."""
        ...


class ScheduledRequests:
    """Arrivals that depend on nothing.

    Args:
        requests: by ascending ``arrival_s``; taken one by one, as late as possible.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._arriving = iter(requests)
        self._coming = deque[Request]()

    def next_s(self) -> float:
        """See ``RequestSource``."""
        if not self._coming:
            self._coming.extend(request for request in [next(self._arriving, None)] if request is not None)
        return self._coming[0].arrival_s if self._coming else math.inf

    def take(self) -> Request:
        """See ``RequestSource``."""
        return self._coming.popleft()


def drive(
    engine: Engine,
    clock: WaitableClock,
    arrivals: RequestSource,
    *,
    coalesced: bool = False,
) -> Iterator[StepOutputs]:
    """Submit each request when it comes and run until all have ended; between requests the engine does its chores.

    Requests come when they do, however far behind the engine is. Their ``arrival_s`` stays what it is, so a request
    that comes while a step runs has waited since then.

    Args:
        engine: on ``clock``.
        clock: real or virtual.
        arrivals: on that clock, and in order.
        coalesced: on a virtual clock, run steps together that would be planned alike (``Engine.step``).

    Yields:
        What each turn brought. ``arrivals`` is asked again, and the next turn runs, when the next is asked for.

    Raises:
        ExecutorError: a step failed, or no request can ever go on.
    """
    while True:
        submitted = False
        while (coming_s := arrivals.next_s()) <= clock.now():
            engine.submit(arrivals.take())
            submitted = True
        if not (engine.has_requests or submitted):  # one that was refused has ended, and a turn tells it
            if coming_s == math.inf:
                return
            if not engine.has_chores:
                clock.wait_until(coming_s)
                continue
        yield engine.step(coming_s if coalesced else None)
        if not engine.is_busy:
            rest(engine, clock, arrivals.next_s())


def rest(engine: Engine, clock: WaitableClock, until_s: float) -> None:
    """Wait until the engine has something to do again: a transfer has ended, a tick is due, or it is ``until_s``.

    Raises:
        ExecutorError: none of these will come, and requests wait.
    """
    until_s = min(until_s, engine.due_s)
    if engine.has_transfers:
        engine.wait_for_transfer(None if until_s == math.inf else max(0.0, until_s - clock.now()))
    elif until_s < math.inf:
        clock.wait_until(until_s)
    elif engine.has_requests:
        raise ExecutorError("requests wait, and nothing is under way that could let one go on")
