"""What all pictures begin and end with."""

from collections.abc import Iterable


def svg_document(width: float, height: float, shapes: Iterable[str], font_size: int = 12) -> str:
    """Return an SVG file of ``shapes`` on white; sizes in pixels."""
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="{font_size}">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
