"""What the commands share: notes and errors on stderr, and sizes as people write them."""

import re
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

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


def note(text: str) -> None:
    """Print one line for the user's attention."""
    Console(stderr=True, highlight=False).print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True)


def fail(text: str, code: int = 1) -> NoReturn:
    """Print what went wrong and end the command with ``code``."""
    Console(stderr=True, highlight=False).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
    raise SystemExit(code)


def given_options(context: typer.Context) -> list[str]:
    """Return the names of the options that were given, and did not get their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, place in sources.items() if place is not None and place.name != "DEFAULT"]
