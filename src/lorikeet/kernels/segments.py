"""Segments of a batch's rows as numbers, as kernels on a device read them."""

from collections.abc import Sequence

Segment = tuple[int, int, int, int]
"""First row, the row after the last, address of the table of its adapter's weights, address of their index."""

MOST_ROWS = 64
"""Of a segment in a table on a device: a launch has as many programs for each as the longest has work for."""


def cut_segments(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Cut segments of more than ``most`` rows."""
    return [
        (start, min(stop, start + most), table, index)
        for first, stop, table, index in segments
        for start in range(first, stop, most)
    ]
