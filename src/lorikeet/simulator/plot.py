"""Plots distributions of a run, and the costs of a plan, as SVG."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

_WIDTH = 260
_HEIGHT = 180
_LEFT = 50
_TOP = 40
_GAP = 60
"""Pixels between two panels, the size of a panel, and the space to its left and above it."""

_POINTS = 200
_COLOUR = "#2a9d5c"
_LIMIT_COLOUR = "#c0392b"
_OTHER_COLOUR = "#8a94a6"
_FRAME_COLOUR = "#8a94a6"
_LIMIT_LINE = f'stroke="{_LIMIT_COLOUR}" stroke-dasharray="4 3"'
_TICKS = (1, 2, 5)


def svg_document(width: float, height: float, shapes: Iterable[str], font_size: int = 12) -> str:
    """Return an SVG file with ``shapes`` on a white background. Sizes are in pixels."""
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="{font_size}">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


class Panel(NamedTuple):
    """Holds the distribution that a panel shows.

    Attributes:
        name: name of the values.
        seconds: the values. Values of 0 are not drawn.
        limit_s: limit of the SLO in seconds; None for no limit.
    """

    name: str
    seconds: Sequence[float]
    limit_s: float | None = None


def distribution_panels(title: str, panels: Sequence[Panel]) -> str:
    """Draw a panel for each distribution: its cumulative curve, P50, P95 and P99, and the limit as a dashed line.

    The axis of seconds is logarithmic and ends at the largest value.

    Args:
        title: title above all panels.
        panels: the panels. A panel without a value above 0 stays empty.
    """
    shapes = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        values = np.sort([s for s in panel.seconds if s > 0])
        shapes += _panel(_LEFT + number * (_WIDTH + _GAP), panel, values)
    return svg_document(_LEFT + len(panels) * (_WIDTH + _GAP), _TOP + _HEIGHT + 66, shapes)


def _panel(left: int, panel: Panel, values: np.ndarray) -> list[str]:
    bottom = _TOP + _HEIGHT
    shapes = [
        _frame(left, _TOP, _WIDTH, _HEIGHT),
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">{escape(panel.name)}, s</text>',
    ]
    for share in (0.5, 0.95, 0.99):
        y = bottom - share * _HEIGHT
        shapes.append(f'<line x1="{left}" y1="{y}" x2="{left + _WIDTH}" y2="{y}" stroke="#d5dae2"/>')
        # The labels of P95 and P99 are close together, so they alternate in height.
        shapes.append(
            f'<text x="{left - 6}" y="{y + (4 if share != 0.99 else -3)}" text-anchor="end">{share:.0%}</text>'
        )
    if not len(values):
        return shapes
    ends = [values[0], values[-1], *([panel.limit_s] if panel.limit_s else [])]
    low = np.log10(min(ends))
    span = max(np.log10(max(ends)) - low, 1e-9)

    def across(seconds: float) -> float:
        return float(left + (np.log10(seconds) - low) / span * _WIDTH)

    shares = np.linspace(0, 1, _POINTS)
    points = " ".join(
        f"{across(value):.1f},{bottom - share * _HEIGHT:.1f}"
        for value, share in zip(np.quantile(values, shares), shares, strict=True)
    )
    shapes.append(f'<polyline points="{points}" fill="none" stroke="{_COLOUR}" stroke-width="2"/>')
    for value in _ticks(min(ends), max(ends)):
        x = across(value)
        shapes.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="{_FRAME_COLOUR}"/>')
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    p99 = float(np.quantile(values, 0.99))
    shapes.append(f'<circle cx="{across(p99):.1f}" cy="{bottom - 0.99 * _HEIGHT:.1f}" r="4" fill="{_COLOUR}"/>')
    said = f"P99 {p99:.3g} s"
    if panel.limit_s:
        x = across(panel.limit_s)
        met = float((values <= panel.limit_s).mean())
        shapes.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" {_LIMIT_LINE}/>')
        said += f", limit {panel.limit_s:g} s: {met:.1%} within"
    shapes.append(f'<text x="{left + _WIDTH / 2}" y="{bottom + 50}" text-anchor="middle">{said}</text>')
    return shapes


def _frame(left: int, top: int, width: int, height: int) -> str:
    return f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="{_FRAME_COLOUR}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round values between two."""
    first = int(np.floor(np.log10(low)))
    last = int(np.ceil(np.log10(high)))
    steps = _TICKS if last - first <= 2 else (1,)
    return [
        step * 10.0**power for power in range(first, last + 1) for step in steps if low <= step * 10.0**power <= high
    ]


class Bar(NamedTuple):
    """Describes a system in a comparison.

    Attributes:
        name: name of the system.
        values: one value for each seed. The bar shows their mean, and a line goes from the smallest to the largest.
        is_best: whether the system is the best.
    """

    name: str
    values: Sequence[float]
    is_best: bool


_BAR_HEIGHT = 18
_BAR_GAP = 10
_NAMES = 150


def bar_panels(title: str, panels: Sequence[tuple[str, float | None, Sequence[Bar]]]) -> str:
    """Draw a panel for each (name, limit or None, bars), with horizontal bars and the limit as a dashed line."""
    rows = max((len(bars) for _, _, bars in panels), default=0)
    bottom = _TOP + rows * (_BAR_HEIGHT + _BAR_GAP) + _BAR_GAP
    shapes = [f'<text x="20" y="20" font-weight="bold">{escape(title)}</text>']
    for number, (name, limit, bars) in enumerate(panels):
        left = _NAMES + number * (_WIDTH + _GAP)
        most = 1.15 * max([*(value for bar in bars for value in bar.values), limit or 0.0, 1e-9])
        shapes += [
            _frame(left, _TOP, _WIDTH, bottom - _TOP),
            f'<text x="{left + _WIDTH / 2}" y="{bottom + 18}" text-anchor="middle">{escape(name)}</text>',
        ]
        for row, bar in enumerate(bars):
            y = _TOP + _BAR_GAP + row * (_BAR_HEIGHT + _BAR_GAP)
            mean = sum(bar.values) / len(bar.values)
            width, least, largest = (value / most * _WIDTH for value in (mean, min(bar.values), max(bar.values)))
            colour = _COLOUR if bar.is_best else _OTHER_COLOUR
            middle = y + _BAR_HEIGHT / 2
            shapes.append(
                f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}" fill="{colour}"/>'
                f'<line x1="{left + least:.1f}" y1="{middle}" x2="{left + largest:.1f}" y2="{middle}" stroke="black"/>'
            )
            shapes.append(f'<text x="{left + 4}" y="{y + 13}">{mean:.3g}</text>')
            if not number:
                shapes.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(bar.name)}</text>')
        if limit:
            x = left + limit / most * _WIDTH
            shapes.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" {_LIMIT_LINE}/>')
    return svg_document(_NAMES + len(panels) * (_WIDTH + _GAP), bottom + 40, shapes)


class CostPoint(NamedTuple):
    """Describes a candidate of a plan.

    Attributes:
        name: name of the hardware and preset.
        cost: cost per hour.
        attainment: share of requests that met the SLO.
        is_choice: whether the candidate was chosen.
    """

    name: str
    cost: float
    attainment: float
    is_choice: bool


_PLAN_WIDTH = 420
_PLAN_HEIGHT = 260
_PLAN_LEFT = 70
_PLAN_TOP = 50
_LEGEND = 330
_MOST_NAMED = 16


def cost_plot(title: str, points: Sequence[CostPoint], target: float) -> str:
    """Draw cost against attainment.

    The plot has a numbered mark for each candidate, the target as a dashed line, and a legend.
    """
    left = _PLAN_LEFT
    bottom = _PLAN_TOP + _PLAN_HEIGHT
    right = left + _PLAN_WIDTH
    most = max((point.cost for point in points), default=1.0) * 1.1 or 1.0
    shapes = [
        f'<text x="{left}" y="22" font-weight="bold">{escape(title)}</text>',
        _frame(left, _PLAN_TOP, _PLAN_WIDTH, _PLAN_HEIGHT),
        f'<text x="{left + _PLAN_WIDTH / 2}" y="{bottom + 36}" text-anchor="middle">price of an hour</text>',
        f'<text x="16" y="{_PLAN_TOP + _PLAN_HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {_PLAN_TOP + _PLAN_HEIGHT / 2})">requests within the SLO</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * _PLAN_HEIGHT
        shapes.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
        cost = share * most
        shapes.append(
            f'<text x="{left + share * _PLAN_WIDTH}" y="{bottom + 18}" text-anchor="middle">{cost:.3g}</text>'
        )
    y = bottom - target * _PLAN_HEIGHT
    shapes.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" {_LIMIT_LINE}/>')
    # The choice is drawn last, above the others.
    for number, point in sorted(enumerate(points, 1), key=lambda item: item[1].is_choice):
        x = left + point.cost / most * _PLAN_WIDTH
        y = bottom - point.attainment * _PLAN_HEIGHT
        colour = _COLOUR if point.is_choice else _OTHER_COLOUR
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if point.is_choice else 4}" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 9:.1f}" y="{y + 4:.1f}">{number}</text>')
    for number, point in enumerate(points[:_MOST_NAMED], 1):
        weight = ' font-weight="bold"' if point.is_choice else ""
        shapes.append(
            f'<text x="{right + 20}" y="{_PLAN_TOP + 16 * number}"{weight}>{number} {escape(point.name)}</text>'
        )
    return svg_document(right + _LEGEND, bottom + 50, shapes)
