"""The results of all lines: one JSON file each, and ``docs/status.md`` made from them."""

import datetime
import json
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.accept.lines import NOT_RUN, Figure, Line, Result, UnknownLineError, find_line
from benchmarks.accept.machine import describe_machine, machine_words
from benchmarks.accept.runs import ROOT, STATUS, revision

_HEAD = """\
# Status

What has been measured, line by line. Made by `make status` from the files in `docs/status/`; do not edit.
Run a line again with `make accept LINE=<line>`.

| line | what it shows | figure | bound | met | revision | date |
|---|---|---|---|---|---|---|
"""


def write_result(line: Line, result: Result, folder: Path = STATUS) -> Path:
    """Write ``<line>.json`` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{line.name}.json"
    here = {"revision": revision(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    cause = _without_places(result.cause)
    earlier = json.loads(path.read_text()) if path.is_file() else {}
    if result.figure != NOT_RUN or earlier.get("figure", NOT_RUN) == NOT_RUN:
        record = {
            "line": line.name,
            "title": line.title,
            "command": f"make accept LINE={line.name}",
            "figure": result.figure,
            "bound": line.bound,
            "interval": result.interval,
            "pass": result.passed,
            "cause": cause,
            "notes": result.notes,
            "details": result.details,
            "machine": describe_machine(),
            **here,
        }
    else:
        record = earlier | {"not_run": {"cause": cause, **here}}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def _without_places(text: str) -> str:
    """Return what an error says, on one line, without where this machine keeps its files."""
    places = {
        sysconfig.get_path("purelib"): "<packages>",
        str(ROOT): ".",
        tempfile.gettempdir(): "<temporary>",
        str(Path.home()): "~",
    }
    for place, name in places.items():
        if place != "/":
            text = text.replace(place, name)
    return " ".join(text.split())


def write_status(folder: Path = STATUS) -> Path:
    """Make the table beside ``folder`` from the files in it and return its path."""
    records = sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=_order)
    text = _HEAD + "".join(_row(record) for record in records) + _causes(records) + _machines(records)
    path = folder.with_suffix(".md")
    path.write_text(text)
    return path


def _order(record: dict[str, Any]) -> tuple[str, int]:
    area, _, number = record["line"].partition(".")
    return area, int(number)


def _row(record: dict[str, Any]) -> str:
    figure = format_figure(record["figure"])
    if record["interval"]:
        low, high = record["interval"]
        figure += f" (95 %: {low:.3g} to {high:.3g})"
    cells = (
        f"[{record['line']}](status/{record['line']}.json)",
        record["title"],
        figure,
        record["bound"],
        ("yes" if record["pass"] else "**no**") + ("" if _is_judged_as_now(record) else ", by an earlier bound"),
        f"`{record['revision']}`",
        record["date"],
    )
    return table_row(cells)


def _is_judged_as_now(record: dict[str, Any]) -> bool:
    """Whether a line's bound is still what it was when it was run."""
    try:
        return bool(record["bound"] == find_line(record["line"]).bound)
    except UnknownLineError:
        return True


def table_row(cells: Iterable[str]) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def format_figure(figure: Figure) -> str:
    """Return a figure for people: numbers to four digits or whole, several joined by commas."""
    if isinstance(figure, dict):
        return ", ".join(f"{name} {format_figure(value)}" for name, value in figure.items())
    if isinstance(figure, float):
        return f"{figure:.4g}" if abs(figure) < 1e4 else f"{figure:,.0f}"
    return str(figure)


def _causes(records: list[dict[str, Any]]) -> str:
    texts = [f"- **{r['line']}**: {words}\n" for r in records if (words := _note(r))]
    return "\n## Notes\n\n" + "".join(texts) if texts else ""


def _note(record: dict[str, Any]) -> str:
    words = str(record["cause"] or record["notes"])
    if later := record.get("not_run"):
        words = f"not run at `{later['revision']}` ({later['cause']}); at `{record['revision']}`: {words}"
    return words


def _machines(records: list[dict[str, Any]]) -> str:
    lines_by_machine: dict[str, list[str]] = {}
    for record in records:
        device = record.get("details", {}).get("limits", {}).get("device")
        name = f"{record['line']} (judged there, measured on {device})" if device else record["line"]
        lines_by_machine.setdefault(machine_words(record["machine"]), []).append(name)
    texts = [f"- {words}: {', '.join(names)}\n" for words, names in lines_by_machine.items()]
    return "\n## Machines\n\n" + "".join(texts) if texts else ""
