"""Interpolates a time between a few measured points."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def interpolate(points: Sequence[tuple[int, float]], count: int) -> float:
    """Return the seconds at ``count``: constant up to the first point, then linear between points.

    Beyond the last point it extrapolates with the slope over the upper half of the range, never downwards. The slope
    between the last two points alone could be noise if they lie close together.

    Args:
        points: at least one pair of (count, seconds), in ascending order.
        count: the count, at least 0.
    """
    first = points[0]
    last = points[-1]
    if count <= first[0] or len(points) == 1:
        return first[1]
    if count >= last[0]:
        half = points[max(0, bisect_right(points, last[0] / 2, key=_count) - 1)]
        return last[1] + max(0.0, _slope(half, last)) * (count - last[0])
    right = bisect_left(points, count, key=_count)
    return points[right - 1][1] + _slope(points[right - 1], points[right]) * (count - points[right - 1][0])


def _count(point: tuple[int, float]) -> int:
    return point[0]


def _slope(few: tuple[int, float], many: tuple[int, float]) -> float:
    return (many[1] - few[1]) / (many[0] - few[0])
