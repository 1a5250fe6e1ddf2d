"""A bar chart of an offline comparison, as SVG."""

from html import escape
from typing import Any

from lorikeet.bench.svg import svg_document

_BAR, _GAP, _LABEL, _LENGTH, _TOP = 22, 10, 90, 420, 34
"""Pixels: height of a bar and the space below it, width of the names, length of the longest bar, space above."""

_COLOURS = {"lorikeet": "#2a9d5c"}
_PEER_COLOUR = "#8a94a6"


def offline_bars(report: dict[str, Any]) -> str:
    """Return output tokens per second of every side as horizontal bars, the machine's limit as a dashed line.

    Args:
        report: of :func:`lorikeet.bench.offline.run_offline`.
    """
    sides = {"lorikeet": report, **report["peers"]}
    limit = report["limit_output_tok_s"]
    longest = max(limit, *(figures["output_tok_s"] for figures in sides.values()))
    height = _TOP + len(sides) * (_BAR + _GAP) + 24
    shapes = []
    for i, (name, figures) in enumerate(sides.items()):
        value, y = figures["output_tok_s"], _TOP + i * (_BAR + _GAP)
        width = value / longest * _LENGTH
        colour = _COLOURS.get(name, _PEER_COLOUR)
        shapes += [
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{value:.0f}</text>',
        ]
    x, setup = _LABEL + limit / longest * _LENGTH, report["setup"]
    adapters = f"{setup['adapters']} adapters" if setup["adapters"] else "base model"
    title = f"{setup['requests']} × ({setup['prompt_tokens']} + {setup['output_tokens']}), {adapters}: output tokens/s"
    shapes += [
        f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{height - 20}" stroke="#c0392b" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">limit {limit:.0f}</text>',
        f'<text x="{_LABEL}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    return svg_document(_LABEL + _LENGTH + 70, height, shapes, font_size=13)
