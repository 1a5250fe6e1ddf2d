"""Pages that lines write: paragraphs with lines of one length, and tables."""

from collections.abc import Iterable, Sequence
from textwrap import fill

from benchmarks.accept.status import table_row


def page(*parts: str) -> str:
    """Return a page of headings, paragraphs, lists and tables, an empty line between them."""
    return "\n\n".join(map(_wrapped, "\n\n".join(parts).split("\n\n"))) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns but the first stand to the right."""
    ruler = "|---|" + "---:|" * (len(headings) - 1) + "\n"
    return (table_row(headings) + ruler + "".join(map(table_row, rows))).rstrip("\n")


def _wrapped(part: str) -> str:
    """Return a paragraph with lines of about one length; others as they are."""
    return part if part[0] in "#|*" else fill(part, 120, break_on_hyphens=False)
