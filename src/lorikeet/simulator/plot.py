"""Plots distributions of a run as SVG."""

from collections.abc import Sequence
from html import escape

import numpy as np

from lorikeet.bench.plots import svg_document

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 260, 180, 50, 40, 60
"""Pixels: a panel, the space left of it and above, and between panels."""

_POINTS = 200
_COLOUR = "#2a9d5c"


def distribution_panels(title: str, panels: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return one panel for each (name, seconds): the cumulative distribution of the values.

    The axis of seconds is logarithmic and ends at the largest value.

    Args:
        title: above all panels.
        panels: those without values above 0 stay empty.
    """
    shapes = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for number, (name, seconds) in enumerate(panels):
        shapes += _panel(_LEFT + number * (_WIDTH + _GAP), name, np.sort([s for s in seconds if s > 0]))
    return svg_document(_LEFT + len(panels) * (_WIDTH + _GAP), _TOP + _HEIGHT + 50, shapes)


def _panel(left: int, name: str, values: np.ndarray) -> list[str]:
    bottom = _TOP + _HEIGHT
    shapes = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#8a94a6"/>',
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">{escape(name)}, s</text>',
    ]
    for share in (0.5, 0.95):
        y = bottom - share * _HEIGHT
        shapes.append(f'<line x1="{left}" y1="{y}" x2="{left + _WIDTH}" y2="{y}" stroke="#d5dae2"/>')
        shapes.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    if not len(values):
        return shapes
    low = np.log10(values[0])
    span = max(np.log10(values[-1]) - low, 1e-9)
    shares = np.linspace(0, 1, _POINTS)
    across = left + (np.log10(np.quantile(values, shares)) - low) / span * _WIDTH
    points = " ".join(f"{x:.1f},{bottom - share * _HEIGHT:.1f}" for x, share in zip(across, shares, strict=True))
    shapes.append(f'<polyline points="{points}" fill="none" stroke="{_COLOUR}" stroke-width="2"/>')
    for x, value, anchor in ((left, values[0], "start"), (left + _WIDTH, values[-1], "end")):
        shapes.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="{anchor}">{value:.3g}</text>')
    return shapes
