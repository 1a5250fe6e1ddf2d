"""Sizes as people write them."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes meant by ``text``: ``4GiB``, ``4Gi`` (powers of 1024), ``4GB``, ``500m`` (of 1000), ``4096``.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size; write for example 4GiB, 512MiB or a number of bytes")
    number, unit, binary = match.groups()
    return round(float(number) * (_BINARY if binary else _UNITS)[unit.lower()])


def format_size(size_bytes: int) -> str:
    """Return ``size_bytes`` for people, in powers of 1024."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
