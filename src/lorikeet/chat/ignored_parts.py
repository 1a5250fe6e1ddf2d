"""Names the parts of a request that are left out because they do not change its answer."""

from collections.abc import Iterable

IGNORED = "X-Lorikeet-Ignored"
"""The header of an answer that lists them."""

_LONGEST_KIND = 60
_MOST_NAMED = 20


def ignored_tools(tools: Iterable[tuple[str, bool]]) -> list[str]:
    """Return the tools that are left out, as ``tools.3 (web_search)``.

    Args:
        tools: the type of each tool of a request, and whether it is served.
    """
    return [
        f"tools.{at} ({kind[:_LONGEST_KIND].encode('unicode_escape').decode()})"
        for at, (kind, is_served) in enumerate(tools)
        if not is_served
    ]


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """Return the headers that list parts of a request; none without such parts."""
    more = [f"and {len(ignored) - _MOST_NAMED} more"] if len(ignored) > _MOST_NAMED else []
    return {IGNORED: ", ".join([*ignored[:_MOST_NAMED], *more])} if ignored else {}
