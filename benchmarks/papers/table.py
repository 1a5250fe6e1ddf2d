"""The table of all claims: printed, ours, ratio and verdict."""

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from benchmarks.harness import print_table
from benchmarks.papers.cache import Cache
from benchmarks.papers.claims import Claim, Reason, read_claims, read_notes
from benchmarks.papers.measure import Answer, Paper, Run
from benchmarks.papers.verdicts import Judged, Share, Verdict, judge, share_of


class Row(NamedTuple):
    """A claim with our result.

    Attributes:
        claim: printed claim.
        ours: our figure; ``None`` if there is none.
        judged: ratio and verdict.
        reason: reason why the claim is not testable.
        cause: cause of a deviation, in Markdown; may be empty.
        revisions: revisions of the code that computed its runs.
    """

    claim: Claim
    ours: Answer | None
    judged: Judged
    reason: Reason | None = None
    cause: str = ""
    revisions: tuple[str, ...] = ()

    def as_object(self) -> dict[str, Any]:
        """Return the row as plain data; readers may rely on the first five fields."""
        return {
            "claim": self.claim.name,
            "printed": self.claim.value,
            "ours": self.ours and _digits(self.ours.value),
            "ratio": _digits(self.judged.ratio),
            "verdict": self.judged.verdict.value,
            "unit": self.claim.unit,
            "interval": (self.ours and self.ours.low is not None and [_digits(each) for each in self.ours[1:]]) or None,
            "headline": self.claim.headline,
            "excluded": self.claim.excluded,
            "reason": self.reason,
            "cause": self.cause or None,
            "revisions": list(self.revisions),
        }


def load_paper(name: str) -> Paper | None:
    """Return the declarations of a paper's module; ``None`` if it has none."""
    found = getattr(import_module(f"benchmarks.papers.{name}"), "PAPER", None)
    return found if isinstance(found, Paper) else None


def rows_of(name: str, cache: Cache, claims: Iterable[str] | None = None) -> list[Row]:
    """Return a row for each claim of a paper, or for some claims, from the stored runs.

    Raises:
        KeyError: the paper does not print one of ``claims``.
    """
    paper, printed = load_paper(name), {claim.id: claim for claim in read_claims(name).claim}
    return [_row(paper, printed[claim], cache) for claim in (printed if claims is None else claims)]


def runs_of(name: str, claims: Iterable[str] | None = None) -> list[Run]:
    """Return the runs that some claims of a paper need; without ``claims``, all runs for its table and page."""
    paper, wanted = load_paper(name), None if claims is None else list(claims)
    return [] if paper is None else [run for each in paper.measurements for run in each.runs(wanted)]


def _row(paper: Paper | None, claim: Claim, cache: Cache) -> Row:
    if paper is None:
        return Row(claim, None, Judged(None, Verdict.NOT_RUN))
    if claim.reason is not None:
        return Row(claim, None, Judged(None, Verdict.NOT_TESTABLE), claim.reason)
    figure = paper.figure(claim.id)
    kept = [cache.get(run) for run in figure.runs] if figure else []
    there = [each for each in kept if each is not None]
    if figure is None or len(there) < len(kept):
        return Row(claim, None, Judged(None, Verdict.NOT_RUN))
    made = figure.of([each.result for each in there])
    ours = made if isinstance(made, Answer) else Answer(float(made))
    revisions = tuple(sorted({each.revision for each in there}))
    cause = read_notes(claim.paper).causes.get(claim.id, "")
    return Row(claim, ours, judge(claim.form, claim.value, ours.value), None, cause, revisions)


# --- printing ----------------------------------------------------------------------------------------


def shares(rows: Sequence[Row]) -> tuple[Share, Share]:
    """Return the shares of claims that match the printed figure or are better: among all, and among headlines."""
    judged = [(row.claim, row.judged.verdict) for row in rows]
    return share_of(judged), share_of(each for each in judged if each[0].headline)


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows of one paper, and its shares below."""
    headings = ["claim", "printed", "ours", "95 %", "unit", "ratio", "verdict", "revision"]
    lines = [
        [
            row.claim.name + (" *" if row.claim.headline else ""),
            number(row.claim.value),
            number(row.ours.value) if row.ours else "",
            interval(row.ours) if row.ours else "",
            row.claim.unit,
            "" if row.judged.ratio is None else f"{row.judged.ratio:.2f}",
            verdict_words(row),
            " ".join(row.revisions),
        ]
        for row in rows
    ]
    print_table(read_claims(rows[0].claim.paper).title, headings, lines)


def share_words(rows: Sequence[Row]) -> str:
    """Return the shares of a paper as a line."""
    everything, headlines = shares(rows)
    name = read_claims(rows[0].claim.paper).name
    words = f"{name}: {_of(everything)} of the testable claims as printed or better, headlines alone {_of(headlines)}"
    missing = sum(row.judged.verdict is Verdict.NOT_RUN for row in rows)
    return f"{words}; {missing} not run, which do not count as such" if missing else words


def verdict_words(row: Row) -> str:
    """Return a row's verdict, with the reason if it is not testable or does not count."""
    about = row.reason or (row.claim.excluded and f"{row.claim.excluded}, not counted")
    return f"{row.judged.verdict} ({about})" if about else row.judged.verdict.value


def number(value: float) -> str:
    """Return a figure with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def interval(ours: Answer) -> str:
    """Return the ends of an interval; empty for none."""
    return "" if ours.low is None or ours.high is None else f"{number(ours.low)} to {number(ours.high)}"


def as_json(rows: Iterable[Row]) -> str:
    """Return rows as a JSON list of objects."""
    return json.dumps([row.as_object() for row in rows], indent=1, ensure_ascii=False) + "\n"


def _of(share: Share) -> str:
    return "none of 0" if share.percent is None else f"{share.good} of {share.counted} ({share.percent:.0f} %)"


def _digits(value: float | None) -> float | None:
    """Return a figure as written to JSON: six digits, so that the last bits of a mean do not matter."""
    return None if value is None else float(f"{value:.6g}")
