"""What others on the hardware did while something was measured."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from benchmarks.accept.disturbance import undisturbed

Times = namedtuple("Times", ("user", "idle", "steal"))


def measured(
    monkeypatch: pytest.MonkeyPatch, stolen: list[float], drifts: list[dict[str, float]] | None = None
) -> tuple[dict[str, Any], int]:
    """Measure while so many of 100 seconds are stolen each time; return what came out, and how often."""
    numbers = iter(range(100))
    steals = iter([each for seconds in stolen for each in (0.0, seconds)])
    clock: Iterator[int] = iter(range(100))

    def times() -> Times:
        steal = next(steals)
        return Times(100.0 * next(clock) - steal, 0.0, steal)

    monkeypatch.setattr(psutil, "cpu_times", times)

    def measure() -> dict[str, Any]:
        number = next(numbers)
        return {"number": number, **(drifts[number] if drifts else {})}

    return undisturbed(measure), next(numbers)


def test_what_nobody_disturbed_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [1.0, 0.0]) == ({"number": 0, "stolen": 0.01}, 1)


def test_what_others_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [5.0, 0.5]) == ({"number": 1, "stolen": 0.005}, 2)


def test_of_disturbed_measurements_the_least_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, [3.0, 4.0, 0.0]) == ({"number": 0, "stolen": 0.03}, 2)


@pytest.mark.parametrize(
    ("stolen", "drifts", "counts", "times"),
    [
        ([0.5], [0.09], 0, 1),
        ([0.5], [-0.09], 0, 1),
        ([0.5, 0.5], [0.2, 0.05], 1, 2),
        ([0.5, 0.5], [-0.2, 0.3], 0, 2),
        ([0.5, 3.0], [0.2, 0.0], 0, 2),
    ],
)
def test_a_machine_that_left_its_profile_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, stolen: list[float], drifts: list[float], counts: int, times: int
) -> None:
    found, attempts = measured(monkeypatch, stolen, [{"drift": drift} for drift in drifts])
    assert (found["number"], attempts) == (counts, times)
