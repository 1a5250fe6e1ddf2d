"""Draws small plots as SVG: claims with our figure beside the printed one, and lines over an axis."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from benchmarks.papers.measure import Answer, Plot, Series

WIDTH, LINE, TOP, BOTTOM, LEFT, RIGHT = 760, 22, 46, 46, 64, 24
"""Sizes in pixels of the picture, of one claim's line, and of the margins."""
NAMES = 250
"""Pixels for the names of claims."""
PLOT_HEIGHT = 340
OURS, PRINTED, GRID, TEXT = "#1f6feb", "#d1242f", "#8c959f", "#57606a"
COLOURS = ("#1f6feb", "#1a7f37", "#8250df", "#bf8700", "#0a7ea4", "#6e7781")
LABEL_SHARE = 0.6
"""Width of a letter, as a share of its height."""


class Dot(NamedTuple):
    """One claim of a plot."""

    name: str
    printed: float
    ours: Answer


class Axis(NamedTuple):
    """Maps values to pixels, and has the ticks."""

    place: Callable[[float], float]
    ticks: Sequence[float]


def claims_plot(title: str, unit: str, dots: Sequence[Dot]) -> str:
    """Return a plot with one line per claim: the printed figure as a ring, ours as a dot with its interval."""
    values = [value for dot in dots for value in (dot.printed, *dot.ours) if value is not None]
    height = TOP + LINE * len(dots) + BOTTOM
    axis = _axis(values, NAMES, WIDTH - RIGHT)
    bottom = TOP + LINE * len(dots)
    parts = [_text(8, 18, title, bold=True), *_key([("printed", PRINTED, True), ("ours", OURS, False)])]
    parts += [*_vertical_grid(axis, bottom), _text((NAMES + WIDTH - RIGHT) / 2, height - 8, unit, anchor="middle")]
    for number, dot in enumerate(dots):
        y = TOP + LINE * (number + 0.5)
        parts.append(_text(NAMES - 10, y + 4, dot.name, anchor="end"))
        if dot.ours.low is not None and dot.ours.high is not None:
            parts.append(_line(axis.place(dot.ours.low), y, axis.place(dot.ours.high), y, OURS, 2))
        parts.append(_dot(axis.place(dot.printed), y, PRINTED, hollow=True))
        parts.append(_dot(axis.place(dot.ours.value), y, OURS))
    return _picture(height, parts, title)


def lines_plot(plot: Plot, lines: Sequence[Series]) -> str:
    """Return a plot of lines; the paper's lines are dashed and have rings."""
    height = TOP + PLOT_HEIGHT + BOTTOM
    bottom = TOP + PLOT_HEIGHT
    across = _axis([x for line in lines for x in line.xs], LEFT, WIDTH - RIGHT)
    up = _axis([y for line in lines for y in line.ys], bottom, TOP, log=plot.log_y)
    colours = [PRINTED if line.printed else COLOURS[number % len(COLOURS)] for number, line in enumerate(lines)]
    parts = [_text(8, 18, plot.title, bold=True)]
    parts += _key([(line.label, colour, line.printed) for line, colour in zip(lines, colours, strict=True)])
    parts += _vertical_grid(across, bottom)
    for tick in up.ticks:
        parts.append(_line(LEFT, up.place(tick), WIDTH - RIGHT, up.place(tick), GRID, 0.4))
        parts.append(_text(LEFT - 6, up.place(tick) + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 8, plot.x_label, anchor="middle"))
    middle = TOP + PLOT_HEIGHT / 2
    turned = _text(14, middle, plot.y_label, anchor="middle")
    parts.append(f'<g transform="rotate(-90 14 {middle:.1f})">{turned}</g>')
    for line, colour in zip(lines, colours, strict=True):
        points = [(across.place(x), up.place(y)) for x, y in zip(line.xs, line.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if line.printed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        parts += [_dot(x, y, colour, hollow=line.printed) for x, y in points]
    return _picture(height, parts, plot.title)


# --- parts -------------------------------------------------------------------------------------------


def _axis(values: Sequence[float], start: float, end: float, log: bool = False) -> Axis:
    if log and min(values) > 0:
        first_power = math.floor(math.log10(min(values)))
        last_power = max(math.ceil(math.log10(max(values))), first_power + 1)
        return Axis(
            lambda value: start + (math.log10(value) - first_power) / (last_power - first_power) * (end - start),
            [10.0**power for power in range(first_power, last_power + 1)],
        )
    low, high = min(0.0, *values), max(0.0, *values)
    step = _step((high - low) or 1.0)
    first, last = math.floor(low / step), math.ceil(high / step) or 1
    ticks = [number * step for number in range(first, last + 1)]
    return Axis(lambda value: start + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (end - start), ticks)


def _step(span: float) -> float:
    """Return a round distance of which four to ten fit into a span."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(power * times for times in (5, 2, 1) if power * times <= span / 4)


def _vertical_grid(axis: Axis, bottom: float) -> list[str]:
    parts = []
    for tick in axis.ticks:
        parts.append(_line(axis.place(tick), TOP, axis.place(tick), bottom, GRID, 0.4))
        parts.append(_text(axis.place(tick), bottom + 16, f"{tick:g}", anchor="middle"))
    return parts


def _key(entries: Sequence[tuple[str, str, bool]]) -> list[str]:
    parts, x = [], 14.0
    for label, colour, hollow in entries:
        parts += [_dot(x, 34, colour, hollow=hollow), _text(x + 9, 38, label)]
        x += 30 + LABEL_SHARE * 12 * len(label)
    return parts


def _dot(x: float, y: float, colour: str, hollow: bool = False) -> str:
    fill = "none" if hollow else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="1.8"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def _picture(height: float, parts: Sequence[str], title: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>\n{body}\n</svg>\n'
    )
