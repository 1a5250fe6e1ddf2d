"""Drives an engine in this process: submits requests when they arrive, on the engine's clock, and runs its loop."""

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
    """Requests with arrival times. Some may depend on the answers to earlier ones."""

    def next_s(self) -> float:
        """Return when the next request arrives, on the engine's clock; infinity if that depends on an answer."""
        ...

    def take(self) -> Request:
        """Return that request."""
        ...


class ScheduledRequests:
    """Requests that arrive at fixed times.

    Args:
        requests: by ascending ``arrival_s``. The iterator is advanced one by one, as late as possible.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)
        self._next = deque[Request]()

    def next_s(self) -> float:
        """Return the ``arrival_s`` of the next request, infinity after the last."""
        if not self._next:
            self._next.extend(request for request in [next(self._requests, None)] if request is not None)
        return self._next[0].arrival_s if self._next else math.inf

    def take(self) -> Request:
        """Return the next request."""
        return self._next.popleft()


def drive(
    engine: Engine,
    clock: WaitableClock,
    arrivals: RequestSource,
    *,
    coalesced: bool = False,
) -> Iterator[StepOutputs]:
    """Submit each request when it arrives and run the engine until all have ended.

    The workload is open-loop: requests arrive at their times however far behind the engine is. A request that arrives
    while a step runs is submitted after it, with its original ``arrival_s``. Between requests the engine runs its
    transfers and ticks.

    Args:
        engine: on ``clock``.
        clock: real or virtual.
        arrivals: on that clock, in order.
        coalesced: on a virtual clock, run together steps that would be planned alike (``Engine.step``).

    Yields:
        The outputs of each turn. The next turn runs when the next item is requested.

    Raises:
        ExecutorError: a step failed, or no waiting request can ever run.
    """
    while True:
        submitted = False
        while (arrival_s := arrivals.next_s()) <= clock.now():
            engine.submit(arrivals.take())
            submitted = True
        if not (engine.has_requests or submitted):  # a refused request has ended, and the next turn reports it
            if arrival_s == math.inf:
                return
            if not engine.has_chores:
                clock.wait_until(arrival_s)
                continue
        yield engine.step(arrival_s if coalesced else None)
        if not engine.is_busy:
            wait_for_work(engine, clock, arrivals.next_s())


def wait_for_work(engine: Engine, clock: WaitableClock, until_s: float) -> None:
    """Wait until a transfer has ended, a tick is due, or it is ``until_s``.

    Raises:
        ExecutorError: none of these will happen, and requests wait.
    """
    until_s = min(until_s, engine.due_s)
    if engine.has_transfers:
        engine.wait_for_transfer(None if until_s == math.inf else max(0.0, until_s - clock.now()))
    elif until_s < math.inf:
        clock.wait_until(until_s)
    elif engine.has_requests:
        raise ExecutorError("requests wait, and no transfer or tick can make one of them run")
