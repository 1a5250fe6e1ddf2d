"""Formats texts for users: sizes, errors about unknown names, and commands that install an extra."""

from collections.abc import Sequence
from difflib import get_close_matches

DISTRIBUTION = "lorikeet-serve"
"""Name on the package index. The import package and the command are called ``lorikeet``."""

_MAX_SUGGESTED = 3
_MAX_LISTED = 10


def format_size(size_bytes: int) -> str:
    """Return a number of bytes as text, with units that are powers of 1024."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the error text for a name that does not exist.

    The text suggests known names that begin with the name or look similar. If there are none, the text lists the first
    known names.

    Args:
        kind: kind of the name, for the text.
        name: the unknown name.
        known: the names that exist.
    """
    close = [each for each in known if name and each.startswith(name)]
    close += [each for each in get_close_matches(name, known, _MAX_SUGGESTED) if each not in close]
    if close:
        *others, last = close[:_MAX_SUGGESTED]
        words = f"{', '.join(others)} or {last}" if others else last
        return f"unknown {kind} {name!r}; did you mean {words}?"
    more = f" and {len(known) - _MAX_LISTED} more" if len(known) > _MAX_LISTED else ""
    return f"unknown {kind} {name!r}; choose one of: {', '.join(known[:_MAX_LISTED])}{more}"


def install_command(extra: str) -> str:
    """Return the shell command that installs one of the extras in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
