"""Seconds between measured points, and beyond them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.interpolation import interpolate

POINTS = ((4, 1.0), (8, 2.0), (16, 6.0))


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, 1.0), (1, 1.0), (4, 1.0), (6, 1.5), (8, 2.0), (12, 4.0), (16, 6.0), (20, 8.0)]
)
def test_points_are_met_and_the_way_between_them_is_straight(count: int, seconds: float) -> None:
    assert interpolate(POINTS, count) == pytest.approx(seconds)


def test_extrapolation_ignores_slope_between_close_last_points() -> None:
    # As in the profiles that are made of Vidur's tables: 32 tokens apart, and the later one faster.
    points = ((1, 0.01), (2048, 0.05), (4064, 0.0905), (4096, 0.0900))
    assert interpolate(points, 8192) == pytest.approx(0.09 + 0.04 / 2048 * 4096)


def test_one_point_holds_everywhere() -> None:
    assert [interpolate(((8, 2.0),), count) for count in (0, 8, 1000)] == [2.0, 2.0, 2.0]


def test_what_was_measured_is_not_rounded() -> None:
    points = ((1, 0.0), (3, 5e-324))  # what lies between them is not twice as large as half of it
    assert interpolate(points, 3) == 5e-324


@given(
    seconds=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 1000), min_size=6, max_size=6, unique=True),
    beyond=st.integers(0, 10_000),
)
def test_more_than_was_measured_never_takes_less(seconds: list[float], counts: list[int], beyond: int) -> None:
    points = tuple(zip(sorted(counts), seconds, strict=False))
    assert interpolate(points, points[-1][0] + beyond) >= points[-1][1]
