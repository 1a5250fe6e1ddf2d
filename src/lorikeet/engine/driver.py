"""Drives an engine in this process: submits requests at their arrival times on its clock, and runs the loop."""

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
    """A source of requests with arrival times. Requests may depend on the answers to earlier requests."""

    def next_s(self) -> float:
        """Return the next request's arrival time on the engine's clock, or infinity if it depends on an answer."""
        ...

    def take(self) -> Request:
        """Return the next request."""
        ...


class ScheduledRequests:
    """Requests that arrive at fixed times.

    Args:
        requests: the requests by ascending ``arrival_s``. The iterator is advanced one by one, as late as possible.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)
        self._next = deque[Request]()

    def next_s(self) -> float:
        """Return the ``arrival_s`` of the next request, or infinity after the last."""
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

    The workload is open-loop: requests arrive at their times even if the engine is far behind. A request that arrives
    while a step runs is submitted after the step, with its original ``arrival_s``. Between requests the engine runs its
    transfers and ticks.

    Args:
        engine: an engine that uses ``clock``.
        clock: a real or virtual clock.
        arrivals: the requests, in order of arrival on this clock.
        coalesced: whether one turn runs several steps that would be planned alike, on a virtual clock
            (``Engine.step``).

    Yields:
        The outputs of each turn. A turn runs only when the caller requests the next item.

    Raises:
        ExecutorError: a step failed, or no waiting request can ever run.
    """
    while True:
        submitted = False
        while (arrival_s := arrivals.next_s()) <= clock.now():
            engine.submit(arrivals.take())
            submitted = True
        if not (engine.has_requests or submitted):  # A refused request has ended, and the next turn reports its end.
            if arrival_s == math.inf:
                return
            if not engine.has_chores:
                clock.wait_until(arrival_s)
                continue
        yield engine.step(arrival_s if coalesced else None)
        if not engine.is_busy:
            wait_for_work(engine, clock, arrivals.next_s())


def wait_for_work(engine: Engine, clock: WaitableClock, until_s: float) -> None:
    """Wait until a transfer has ended, a tick is due, or the clock reaches ``until_s``.

    Raises:
        ExecutorError: requests wait, and none of these events can happen.
    """
    until_s = min(until_s, engine.due_s)
    if engine.has_transfers:
        engine.wait_for_transfer(None if until_s == math.inf else max(0.0, until_s - clock.now()))
    elif until_s < math.inf:
        clock.wait_until(until_s)
    elif engine.has_requests:
        raise ExecutorError("requests wait, and no transfer or tick can make one of them run")
