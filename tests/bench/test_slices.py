"""Runs that take turns on one machine."""

from collections.abc import Generator

import pytest

from lorikeet.bench.in_process import PausableClock, in_slices, run_to_end
from lorikeet.core.clock import VirtualClock


def steps(
    machine: VirtualClock, clock: PausableClock, count: int, seen: list[tuple[float, float]]
) -> Generator[None, None, float]:
    """Take a second a step; note when each ended, on the machine's clock and on the own one."""
    start_s = clock.now()
    for _ in range(count):
        machine.advance(1.0)
        seen.append((machine.now(), clock.now() - start_s))
        yield
    return clock.now() - start_s


def test_runs_take_turns_and_none_sees_the_time_of_another() -> None:
    machine = VirtualClock(100.0)
    clocks = [PausableClock(machine) for _ in range(2)]
    seen: list[list[tuple[float, float]]] = [[], []]
    runs = [steps(machine, clock, count, each) for clock, count, each in zip(clocks, (5, 3), seen, strict=True)]
    assert in_slices(list(zip(clocks, runs, strict=True)), 2.0) == [5.0, 3.0]
    # Two seconds each in turn; the second ends a second into its turn, and the first goes on alone.
    assert seen[0] == [(101.0, 1.0), (102.0, 2.0), (105.0, 3.0), (106.0, 4.0), (108.0, 5.0)]
    assert seen[1] == [(103.0, 1.0), (104.0, 2.0), (107.0, 3.0)]


def test_a_clock_that_has_stood_waits_for_as_long_as_it_says() -> None:
    machine = VirtualClock()
    clock = PausableClock(machine)
    machine.advance(7.0)
    with clock.going():
        assert clock.now() == 0.0
        clock.wait_until(3.0)
        with pytest.raises(RuntimeError, match="goes already"), clock.going():
            pass
    machine.advance(1.0)
    assert (machine.now(), clock.now()) == (11.0, 3.0)


def test_a_slow_clock_waits_for_longer() -> None:
    machine = VirtualClock(10.0)
    clock = PausableClock(machine)
    with clock.going(0.5):
        machine.advance(2.0)
        assert clock.now() == 11.0
        clock.wait_until(13.0)
        assert machine.now() == 16.0


def test_clocks_go_as_fast_as_is_said_before_each_slice() -> None:
    machine = VirtualClock()
    clock, rates = PausableClock(machine), iter((1.0, 0.5, 2.0, 1.0))
    assert in_slices([(clock, steps(machine, clock, 7, []))], 2.0, lambda: next(rates)) == [2.0 + 2.0 + 2.0]


def test_where_one_fails_all_are_closed() -> None:
    closed = []

    def failing() -> Generator[None, None, None]:
        yield
        raise OSError("broken")

    def patient() -> Generator[None, None, None]:
        try:
            while True:
                machine.advance(1.0)
                yield
        finally:
            closed.append("patient")

    machine = VirtualClock()
    with pytest.raises(OSError, match="broken"):
        in_slices([(PausableClock(machine), patient()), (PausableClock(machine), failing())], 1.0)
    assert closed == ["patient"]


def test_a_run_is_run_to_its_end() -> None:
    def run(said: str, *, times: int) -> Generator[None, None, str]:
        for _ in range(times):
            yield
        return said

    assert run_to_end(run)("done", times=2) == "done"
