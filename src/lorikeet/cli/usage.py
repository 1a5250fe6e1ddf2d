"""``lorikeet usage``, ``lorikeet audit``: print tenants' usage and all changes, on a server with ``--tenants``."""

import csv
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url

_SUMMED_BY = ("day", "key", "key_name", "base", "adapter")
_COUNTS = ("requests", "aborted", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")


def usage(
    start: Annotated[
        str, typer.Option(metavar="DAY", help="First day, as 2026-11-29.", show_default="30 days ago")
    ] = "",
    end: Annotated[str, typer.Option(metavar="DAY", help="Last day of UTC.", show_default="today")] = "",
    key: Annotated[str, typer.Option(help="Only of this key, by its id.", show_default="all")] = "",
    model: Annotated[str, typer.Option(help="Only of this model.", show_default="all")] = "",
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV there.", show_default=False)
    ] = None,
    json_file: JsonFile = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Print usage by day, key and adapter: everyone's with an admin key, else the key's own."""
    check_json_file(json_file)
    asked = {"start": start, "end": end, "key": key, "model": model}
    given = {name: value for name, value in asked.items() if value}
    rows = ServerClient(url, api_key).get("/v1/usage", **given)["data"]
    if csv_file is not None:
        _write_csv(csv_file, rows)
    if not write_json(json_file, rows) or csv_file is not None:
        return
    table = Table("day", "key", "name", "model", *(Column(name.replace("_", " "), justify="right") for name in _COUNTS))
    for row in rows:
        words = (row["day"], row["key"], row["key_name"], row["adapter"] or row["base"])
        table.add_row(*map(escape, words), *(str(row[name]) for name in _COUNTS))
    output().print(table)


def _write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    try:
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, (*_SUMMED_BY, *_COUNTS))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        fail(f"--csv {file}: {error.strerror}")


def audit(
    subject: Annotated[str, typer.Argument(help="Only of this adapter, or key by its id.", show_default="all")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most changes to show.")] = 100,
    json_file: JsonFile = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Print who changed which adapter and which key, the latest first."""
    check_json_file(json_file)
    rows = ServerClient(url, api_key).get("/v1/audit", subject=subject, limit=limit)["data"]
    if not write_json(json_file, rows):
        return
    table = Table("time (UTC)", "who", "did", "to", "detail")
    for row in rows:
        at = datetime.fromtimestamp(row["unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        settings = row["detail"].pop("settings", {})
        detail = ", ".join(f"{name}={value}" for name, value in {**row["detail"], **settings}.items())
        table.add_row(at, *map(escape, (row["actor"] or "-", row["action"], row["subject"], detail)))
    output().print(table)
