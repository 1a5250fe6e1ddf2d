"""``lorikeet adapters``: manages the adapters of a running server, and inspects PEFT folders."""

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.core.sizes import format_size

app = typer.Typer(help="List, add, remove and inspect adapters.", no_args_is_help=True)

_PAGE = 1000


@app.command("list")
def list_adapters(url: Url = DEFAULT_URL, api_key: ApiKey = None, json_file: JsonFile = None) -> None:
    """List the adapters of a running server."""
    check_json_file(json_file)
    api = ServerClient(url, api_key)
    cards: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = api.get("/v1/adapters", limit=_PAGE, cursor=cursor)
        cards += page["data"]
        cursor = page["next_cursor"]
    if not write_json(json_file, cards):
        return
    table = Table("name", "rank", "size", "on device", "version", "source")
    for card in cards:
        if not card["loaded"]:
            table.add_row(card["name"], "-", "-", "-", "not loaded yet", card["source"])
            continue
        loaded = format_size(card["device_bytes"]) if card["device_bytes"] else "-"
        size = format_size(card["weight_bytes"])
        table.add_row(card["name"], str(card["rank"]), size, loaded, card["digest"][:12], card["source"])
    output().print(table)


@app.command("add")
def add_adapter(
    name: Annotated[str, typer.Argument(help="What clients will write in `model`.")],
    source: Annotated[str, typer.Argument(help="Folder below the server's --adapter-dir, or an allowed URL.")],
    replace: Annotated[bool, typer.Option("--replace", help="Let an existing name point to the new content.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Register an adapter on a running server."""
    card = ServerClient(url, api_key).post("/v1/adapters", {"name": name, "source": source, "replace": replace})
    for warning in card.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"added {card['name']}: rank {card['rank']}, {format_size(card['weight_bytes'])}, version {card['digest']}")


@app.command("remove")
def remove_adapter(
    name: Annotated[str, typer.Argument(help="The adapter's name.")], url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Remove an adapter from a running server, once its running requests have ended."""
    answer = ServerClient(url, api_key).delete(f"/v1/adapters/{quote(name)}")
    freed = answer["freed_bytes"]
    print(f"removed {name}: " + (f"{format_size(freed)} freed" if freed is not None else "freed when its requests end"))


@app.command("inspect")
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder with adapter_config.json.")], json_file: JsonFile = None
) -> None:
    """Print what a PEFT folder contains, or why it cannot be served. Needs no server."""
    from lorikeet.adapters.checkpoint import DescribeOptions
    from lorikeet.adapters.errors import AdapterError
    from lorikeet.adapters.reader import describe
    from lorikeet.cli import adapter_report

    check_json_file(json_file)
    try:
        description = adapter_report.describe(folder, describe(folder, DescribeOptions(read_weights=True)))
    except AdapterError as error:
        fail(str(error))
    if write_json(json_file, description):
        adapter_report.show(description)
