"""Error texts for names that do not exist."""

from collections.abc import Sequence
from difflib import get_close_matches

_MOST_CLOSE, _MOST_LISTED = 3, 10


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """Return what to say about a ``kind`` called ``name`` that does not exist.

    Names that begin with it or look like it are suggested. If there are none, the first known names are listed.
    """
    close = [each for each in known if name and each.startswith(name)]
    close += [each for each in get_close_matches(name, known, _MOST_CLOSE) if each not in close]
    if close:
        *others, last = close[:_MOST_CLOSE]
        words = f"{', '.join(others)} or {last}" if others else last
        return f"unknown {kind} {name!r}; did you mean {words}?"
    more = f" and {len(known) - _MOST_LISTED} more" if len(known) > _MOST_LISTED else ""
    return f"unknown {kind} {name!r}; choose one of: {', '.join(known[:_MOST_LISTED])}{more}"
