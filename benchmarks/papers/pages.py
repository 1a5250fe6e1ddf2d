"""Writes one page per paper: its shares, and each measurement with its setting, plots and table."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.papers.cache import Cache
from benchmarks.papers.claims import read_claims, read_notes
from benchmarks.papers.measure import Measurement, Run
from benchmarks.papers.svg import Dot, claims_plot, lines_plot
from benchmarks.papers.table import Row, interval, load_paper, number, rows_of, share_words, verdict_words
from benchmarks.papers.verdicts import Verdict


def write_page(name: str, folder: Path, cache: Cache) -> Path:
    """Write the page of a paper and its plots into a folder, and return the page.

    Plots and tables whose runs are missing are left out.

    Raises:
        LookupError: the paper's module declares nothing.
    """
    paper, printed = load_paper(name), read_claims(name)
    if paper is None:
        raise LookupError(f"benchmarks.papers.{name} has no PAPER")
    folder.mkdir(parents=True, exist_ok=True)
    rows = {row.claim.id: row for row in rows_of(name, cache)}
    parts = [
        f"# {printed.name}",
        f"[//]: # (Made by `python -m benchmarks.papers pages {name}`.)",
        f"*{printed.title}* ({printed.authors}).",
        read_notes(name).about,
        f"{share_words(list(rows.values()))}. [What the verdicts mean](../papers.md#verdicts).",
    ]
    for measurement in paper.measurements:
        parts += _measurement(name, measurement, rows, folder, cache)
    parts += ["## Why some came out otherwise", *_causes(rows.values())]
    parts += ["## Not testable", _not_testable(rows.values())]
    page = folder / f"{name}.md"
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _measurement(
    name: str, measurement: Measurement, rows: dict[str, Row], folder: Path, cache: Cache
) -> Iterable[str]:
    own = [rows[claim] for claim in measurement.figures]
    yield f"## {measurement.title}"
    yield _markdown(["setting", ""], [[about, value] for about, value in measurement.setting.items()])
    stem = f"{name}-{re.sub('[^a-z0-9]+', '-', measurement.title.lower()).strip('-')}"
    shown = sorted((row for row in own if row.ours is not None), key=lambda row: row.claim.unit)
    for unit, group in groupby(shown, key=lambda row: row.claim.unit):
        dots = [Dot(row.claim.id, row.claim.value, row.ours) for row in group if row.ours is not None]
        if len(dots) == 1:
            continue  # the table says as much
        file = folder / f"{stem}-{re.sub('[^a-z0-9]+', '', unit.lower()) or 'percent'}.svg"
        file.write_text(claims_plot(measurement.title, unit, dots))
        yield f"![{measurement.title}, in {unit}: ours beside the printed figures]({file.name})"
    for order, plot in enumerate(measurement.plots, start=1):
        if (results := _results(plot.runs, cache)) is not None:
            file = folder / f"{stem}-{order}.svg"
            file.write_text(lines_plot(plot, plot.series(results)))
            yield f"![{plot.title}]({file.name})"
    headings = ["claim", "printed", "ours", "95 % interval", "unit", "ratio", "verdict", "revision"]
    yield _markdown(headings, [_cells(row) for row in own])
    for table in measurement.tables:
        if (results := _results(table.runs, cache)) is not None:
            yield f"{table.title}:"
            yield _markdown(table.headings, table.rows(results))


def _cells(row: Row) -> list[str]:
    ours = row.ours
    return [
        f"**{row.claim.id}**" if row.claim.headline else row.claim.id,
        number(row.claim.value),
        number(ours.value) if ours else "",
        interval(ours) if ours else "",
        row.claim.unit,
        "" if row.judged.ratio is None else f"{row.judged.ratio:.2f}",
        verdict_words(row),
        " ".join(f"`{each}`" for each in row.revisions),
    ]


def _causes(rows: Iterable[Row]) -> Iterable[str]:
    """Yield each cause once, after the claims that deviate because of it."""
    by_cause: dict[str, list[Row]] = {}
    for row in rows:
        if row.cause and row.judged.verdict not in (Verdict.SAME, Verdict.BETTER):
            by_cause.setdefault(row.cause, []).append(row)
    for cause, own in by_cause.items():
        yield f"**{', '.join(f'{row.claim.id} ({row.judged.verdict})' for row in own)}.** {cause}"


def _not_testable(rows: Iterable[Row]) -> str:
    lines = [[row.claim.id, number(row.claim.value), row.claim.unit, row.reason] for row in rows if row.reason]
    return _markdown(["claim", "printed", "unit", "why"], lines)


def _results(runs: Sequence[Run], cache: Cache) -> list[Any] | None:
    """Return the results of runs; ``None`` if some are missing."""
    kept = [each for each in map(cache.get, runs) if each is not None]
    return [each.result for each in kept] if len(kept) == len(runs) else None


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def unexplained(rows: Iterable[Row]) -> list[str]:
    """Return the names of claims that need a cause and have none."""
    wanting = (Verdict.OPPOSITE, Verdict.OVERSHOOTS)
    return [row.claim.name for row in rows if row.judged.verdict in wanting and not row.cause]
