"""Draws SVG charts of the offline benchmark and of memory use over time."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from benchmarks.memory_watch import PoolSample
from lorikeet.simulator.plot import svg_document

_BAR = 22
_GAP = 10
_LABEL = 90
_LENGTH = 420
_TOP = 34
"""Pixels: height of a bar and the space below it, width of the names, length of the longest bar, space above."""

_COLOURS = {"lorikeet": "#2a9d5c"}
_PEER_COLOUR = "#8a94a6"


def offline_bars(report: dict[str, Any]) -> str:
    """Draw the output tokens per second of every backend as horizontal bars, and the machine's limit as a dashed line.

    Args:
        report: report of :func:`benchmarks.offline_bench.run_offline`.
    """
    backends = {"lorikeet": report, **report["peers"]}
    limit = report["limit_output_tok_s"]
    longest = max(limit, *(figures["output_tok_s"] for figures in backends.values()))
    height = _TOP + len(backends) * (_BAR + _GAP) + 24
    shapes = []
    for i, (name, figures) in enumerate(backends.items()):
        value = figures["output_tok_s"]
        y = _TOP + i * (_BAR + _GAP)
        width = value / longest * _LENGTH
        colour = _COLOURS.get(name, _PEER_COLOUR)
        shapes += [
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{value:.0f}</text>',
        ]
    x = _LABEL + limit / longest * _LENGTH
    setup = report["setup"]
    adapters = f"{setup['adapters']} adapters" if setup["adapters"] else "base model"
    title = f"{setup['requests']} × ({setup['prompt_tokens']} + {setup['output_tokens']}), {adapters}: output tokens/s"
    shapes += [
        f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{height - 20}" stroke="#c0392b" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">limit {limit:.0f}</text>',
        f'<text x="{_LABEL}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    return svg_document(_LABEL + _LENGTH + 70, height, shapes, font_size=13)


_PANEL_WIDTH = 330
_PANEL_HEIGHT = 170
_PANEL_LEFT = 60
_PANEL_TOP = 60
_PANEL_GAP = 60
_PANELS_IN_A_ROW = 3
"""Pixels: a panel, the space left of it and above, and between panels; number of panels in a row."""

_POINTS = 300
_KINDS = {
    "adapters": "#2a6f9d",
    "kv_running": "#2a9d5c",
    "kv_cached": "#a5d6b8",
    "inflight": "#d9a441",
}
_WORDS = {"adapters": "adapters", "kv_running": "KV of running", "kv_cached": "KV kept", "inflight": "loading"}


def pool_areas(title: str, panels: Sequence[tuple[str, Sequence[PoolSample]]]) -> str:
    """Draw the share of device memory that each kind takes over time.

    Args:
        title: title above all panels.
        panels: name and samples of each run. A run without samples has an empty panel.
    """
    shapes = [f'<text x="{_PANEL_LEFT}" y="20" font-weight="bold">{escape(title)}</text>', *_legend()]
    for number, (name, samples) in enumerate(panels):
        row, column = divmod(number, _PANELS_IN_A_ROW)
        shapes += _panel(
            _PANEL_LEFT + column * (_PANEL_WIDTH + _PANEL_GAP),
            _PANEL_TOP + row * (_PANEL_HEIGHT + _PANEL_GAP),
            name,
            samples,
        )
    rows = -(-len(panels) // _PANELS_IN_A_ROW)
    width = _PANEL_LEFT + min(_PANELS_IN_A_ROW, len(panels)) * (_PANEL_WIDTH + _PANEL_GAP)
    return svg_document(width, _PANEL_TOP + rows * (_PANEL_HEIGHT + _PANEL_GAP), shapes)


def _legend() -> list[str]:
    shapes = []
    for number, (kind, colour) in enumerate(_KINDS.items()):
        x = _PANEL_LEFT + number * 110
        shapes.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 17}" y="40">{_WORDS[kind]}</text>')
    return shapes


def _panel(left: float, top: float, name: str, samples: Sequence[PoolSample]) -> list[str]:
    bottom = top + _PANEL_HEIGHT
    shapes = []
    if samples:
        times_s = np.array([sample.at_s for sample in samples])
        span_s = max(float(times_s[-1]), 1e-9)
        at_s = np.linspace(0.0, span_s, _POINTS)
        latest = np.clip(np.searchsorted(times_s, at_s, side="right") - 1, 0, None)
        across = left + at_s / span_s * _PANEL_WIDTH
        below = np.zeros(_POINTS)
        for kind, colour in _KINDS.items():
            shares = np.array([getattr(sample.device, kind) / max(sample.device.total, 1) for sample in samples])
            above = below + shares[latest]
            edge = [*zip(across, above, strict=True), *zip(across[::-1], below[::-1], strict=True)]
            points = " ".join(f"{x:.1f},{bottom - share * _PANEL_HEIGHT:.1f}" for x, share in edge)
            shapes.append(f'<polygon points="{points}" fill="{colour}"/>')
            below = above
        shapes.append(f'<text x="{left + _PANEL_WIDTH}" y="{bottom + 16}" text-anchor="end">{span_s:.4g} s</text>')
    shapes.append(
        f'<rect x="{left}" y="{top}" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}" fill="none" stroke="#8a94a6"/>'
    )
    shapes.append(f'<text x="{left}" y="{bottom + 16}">{escape(name)}</text>')
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * _PANEL_HEIGHT
        shapes.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>')
    return shapes
