"""Runs on one machine by turns, a slice of time each, so that all of them meet it at the same speed.

A machine that others share is a few percent slower in one minute than in the next. Of two runs that go one after the
other, the one that meets the slower minutes looks worse, and near the most that a server can bear much worse.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from lorikeet.core.clock import MonotonicClock, WaitableClock
from lorikeet.core.garbage import long_lived

P = ParamSpec("P")
T = TypeVar("T")


class PausableClock:
    """A clock that goes only now and then, and more or less fast. It stands in the beginning.

    Args:
        clock: by which it goes; the machine's, if none is given.
    """

    def __init__(self, clock: WaitableClock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._now_s = self._began_s = self._clock.now()
        self._rate = 0.0

    def now(self) -> float:
        """Return the present time in seconds."""
        return self._now_s + (self._clock.now() - self._began_s) * self._rate

    def wait_until(self, when_s: float) -> None:
        """Wait until ``when_s``, while it goes."""
        self._clock.wait_until(self._clock.now() + (when_s - self.now()) / self._rate)

    @contextmanager
    def going(self, rate: float = 1.0) -> Iterator[None]:
        """Let it go until the end, so many seconds in each of the other clock's.

        Raises:
            RuntimeError: it goes already.
        """
        if self._rate:
            raise RuntimeError("the clock goes already")
        self._began_s, self._rate = self._clock.now(), rate
        try:
            yield
        finally:
            self._now_s, self._rate = self.now(), 0.0


def in_slices(
    runs: Sequence[tuple[PausableClock, Generator[None, None, T]]],
    slice_s: float,
    rate: Callable[[], float] = lambda: 1.0,
) -> list[T]:
    """Run all to their ends, by turns, and return what they return.

    A slice ends where its run stops next once it is over. What a run has left under way, such as a copy by a thread of
    its own, goes on while its clock stands: slices are to be long beside that.

    Args:
        runs: each with the clock that it goes by.
        slice_s: how long each goes on at a time, on its clock.
        rate: how fast clocks are to go, asked before each slice.
    """
    ends: dict[int, T] = {}
    with long_lived(), ExitStack() as closing:
        for _, run in runs:
            closing.callback(run.close)
        while len(ends) < len(runs):
            for number, (clock, run) in enumerate(runs):
                if number not in ends:
                    with clock.going(rate()):
                        try:
                            _go_on(run, clock, clock.now() + slice_s)
                        except StopIteration as end:
                            ends[number] = end.value
    return [ends[number] for number in range(len(runs))]


def to_end(begin: Callable[P, Generator[None, None, T]]) -> Callable[P, T]:
    """Return what begins a run with the same arguments, does not stop, and returns what the run returns."""

    @wraps(begin)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        run = begin(*args, **kwargs)
        while True:
            try:
                next(run)
            except StopIteration as end:
                result: T = end.value
                return result

    return whole


def _go_on(run: Iterator[None], clock: PausableClock, until_s: float) -> None:
    while clock.now() < until_s:
        next(run)
