"""What others on the hardware took while something was measured."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from benchmarks.accept.disturbance import undisturbed

Times = namedtuple("Times", ("user", "idle", "steal"))


def measured(monkeypatch: pytest.MonkeyPatch, stolen: list[float]) -> tuple[dict[str, Any], int]:
    """Measure while so many of 100 seconds are stolen each time; return what came out, and how often."""
    numbers = iter(range(100))
    steals = iter([each for seconds in stolen for each in (0.0, seconds)])
    clock: Iterator[int] = iter(range(100))

    def times() -> Times:
        steal = next(steals)
        return Times(100.0 * next(clock) - steal, 0.0, steal)

    monkeypatch.setattr(psutil, "cpu_times", times)
    return undisturbed(lambda: {"number": next(numbers)}), next(numbers)


def test_what_nobody_disturbed_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [1.0, 0.0]) == ({"number": 0, "stolen": 0.01}, 1)


def test_what_others_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [5.0, 0.5]) == ({"number": 1, "stolen": 0.005}, 2)


def test_of_disturbed_measurements_the_least_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [3.0, 4.0, 0.0]) == ({"number": 0, "stolen": 0.03}, 2)
