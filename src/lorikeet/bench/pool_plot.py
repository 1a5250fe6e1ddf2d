"""What fills the device over time, as SVG: one panel for each run, kinds stacked upon each other."""

from collections.abc import Sequence
from html import escape

import numpy as np

from lorikeet.bench.memory_watch import PoolSample
from lorikeet.bench.svg import svg_document

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _COLUMNS = 330, 170, 60, 60, 60, 3
"""Pixels: a panel, the space left of it and above, and between panels; how many stand beside each other."""

_POINTS = 300
_KINDS = {
    "adapters": "#2a6f9d",
    "kv_running": "#2a9d5c",
    "kv_cached": "#a5d6b8",
    "inflight": "#d9a441",
}
_WORDS = {"adapters": "adapters", "kv_running": "KV of running", "kv_cached": "KV kept", "inflight": "on its way"}


def pool_areas(title: str, panels: Sequence[tuple[str, Sequence[PoolSample]]]) -> str:
    """Return the share of the device that each kind takes (up) over time (right).

    Args:
        title: above all.
        panels: name and samples of each run; one without samples stays empty.
    """
    shapes = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>', *_legend()]
    for number, (name, samples) in enumerate(panels):
        row, column = divmod(number, _COLUMNS)
        shapes += _panel(_LEFT + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP), name, samples)
    rows = -(-len(panels) // _COLUMNS)
    width = _LEFT + min(_COLUMNS, len(panels)) * (_WIDTH + _GAP)
    return svg_document(width, _TOP + rows * (_HEIGHT + _GAP), shapes)


def _legend() -> list[str]:
    shapes = []
    for number, (kind, colour) in enumerate(_KINDS.items()):
        x = _LEFT + number * 110
        shapes.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 17}" y="40">{_WORDS[kind]}</text>')
    return shapes


def _panel(left: float, top: float, name: str, samples: Sequence[PoolSample]) -> list[str]:
    bottom = top + _HEIGHT
    shapes = []
    if samples:
        times_s = np.array([sample.at_s for sample in samples])
        span_s = max(float(times_s[-1]), 1e-9)
        at_s = np.linspace(0.0, span_s, _POINTS)
        latest = np.clip(np.searchsorted(times_s, at_s, side="right") - 1, 0, None)
        across = left + at_s / span_s * _WIDTH
        below = np.zeros(_POINTS)
        for kind, colour in _KINDS.items():
            shares = np.array([getattr(sample.device, kind) / max(sample.device.total, 1) for sample in samples])
            above = below + shares[latest]
            edge = [*zip(across, above, strict=True), *zip(across[::-1], below[::-1], strict=True)]
            points = " ".join(f"{x:.1f},{bottom - share * _HEIGHT:.1f}" for x, share in edge)
            shapes.append(f'<polygon points="{points}" fill="{colour}"/>')
            below = above
        shapes.append(f'<text x="{left + _WIDTH}" y="{bottom + 16}" text-anchor="end">{span_s:.4g} s</text>')
    shapes.append(f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#8a94a6"/>')
    shapes.append(f'<text x="{left}" y="{bottom + 16}">{escape(name)}</text>')
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _HEIGHT
        shapes.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>')
    return shapes
