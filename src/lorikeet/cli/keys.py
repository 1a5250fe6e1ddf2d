"""``lorikeet keys``: makes, lists, changes, rotates and revokes the keys of tenants, on a server with ``--tenants``."""

import inspect
import sys
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, fail, output, parse_size, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.core.text import format_size

app = typer.Typer(help="Make and change the keys of tenants.", no_args_is_help=True)

_SETTINGS = {
    "use": Annotated[
        list[str] | None,
        typer.Option(
            help="Models that its requests may name, as globs such as acme/*; repeatable.", show_default="all"
        ),
    ],
    "see": Annotated[
        list[str] | None, typer.Option(help="Further models that it sees listed; repeatable.", show_default="none")
    ],
    "load": Annotated[
        list[str] | None,
        typer.Option(
            help="Adapters that it may add, and folders that it adds them from; repeatable.", show_default="none"
        ),
    ],
    "requests_per_minute": Annotated[
        int | None, typer.Option(min=0, help="Most in a minute of the clock; 0 for no limit.")
    ],
    "tokens_per_minute": Annotated[
        int | None, typer.Option(min=0, help="Most in a minute of the clock; 0 for no limit.")
    ],
    "tokens_per_day": Annotated[int | None, typer.Option(min=0, help="Most in a day of UTC; 0 for no limit.")],
    "concurrent_requests": Annotated[int | None, typer.Option(min=0, help="Most unfinished requests; 0 for no limit.")],
    "max_adapters": Annotated[int | None, typer.Option(min=0, help="Most adapters that it owns; 0 for no limit.")],
    "max_adapter_size": Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes of their weights, such as 2GiB; 0 for no limit.")
    ],
    "priority": Annotated[int | None, typer.Option(help="Lower runs earlier, with presets that use it.")],
    "weight": Annotated[float | None, typer.Option(help="Weight in presets that share between tenants.")],
    "cache_group": Annotated[str | None, typer.Option(help="Keys of one group reuse each other's KV.")],
}
"""The options of ``create`` and ``change``; None if one is not given."""


def _with_settings(command: Any) -> Any:
    """Replace ``**settings`` in a command's signature by the options of the table, which typer reads."""
    first, *others = (p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD)
    options = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
        for name, kind in _SETTINGS.items()
    ]
    command.__signature__ = inspect.Signature([first, *options, *others], return_annotation=None)
    return command


@app.command("create")
@_with_settings
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, for people.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
    **settings: Any,
) -> None:
    """Make a key. The secret is printed once, and the server keeps only its hash."""
    check_json_file(json_file)
    card = ServerClient(url, api_key).post("/v1/keys", {"name": name, "settings": _given(**settings)})
    if write_json(json_file, card):
        _show_secret(card)


@app.command("change")
@_with_settings
def change(
    key: Annotated[str, typer.Argument(help="The key's id.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    **settings: Any,
) -> None:
    """Change the rights and limits of a key. Rights without an option stay unchanged."""
    card = ServerClient(url, api_key).patch(f"/v1/keys/{quote(key)}", {"settings": _given(**settings)})
    print(f"changed {card['id']} ({card['name']}): {_limits(card['settings']) or 'no limits'}")


@app.command("list")
def list_keys(url: Url = DEFAULT_URL, api_key: ApiKey = None, json_file: JsonFile = None) -> None:
    """List the keys."""
    check_json_file(json_file)
    cards = ServerClient(url, api_key).get("/v1/keys")["data"]
    if not write_json(json_file, cards):
        return
    table = Table("key", "name", "uses", "loads", "limits", "made", "state")
    for card in cards:
        settings = card["settings"]
        made = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%d")
        state = "valid" if card["revoked"] is None else "revoked"
        uses, loads = (" ".join(settings[scope]) or "-" for scope in ("use", "load"))
        table.add_row(*map(escape, (card["id"], card["name"], uses, loads, _limits(settings) or "-")), made, state)
    output().print(table)


@app.command("rotate")
def rotate(
    key: Annotated[str, typer.Argument(help="The key's id.")],
    overlap: Annotated[float, typer.Option(min=0, help="Seconds for which the present secret stays valid.")] = 3600.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
) -> None:
    """Give a key a new secret. Its id, limits and usage stay."""
    check_json_file(json_file)
    card = ServerClient(url, api_key).post(f"/v1/keys/{quote(key)}/rotate", {"overlap_s": overlap})
    if write_json(json_file, card):
        _show_secret(card)


@app.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id.")], url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Refuse a key from now on. Its usage records and its adapters stay."""
    card = ServerClient(url, api_key).delete(f"/v1/keys/{quote(key)}")
    print(f"revoked {card['id']} ({card['name']})")


def _given(max_adapter_size: str | None, **others: Any) -> dict[str, Any]:
    """Return the given settings under the server's names."""
    settings = {name: value for name, value in others.items() if value is not None}
    if max_adapter_size is not None:
        try:
            settings["max_adapter_bytes"] = parse_size(max_adapter_size)
        except ValueError as error:
            fail(f"--max-adapter-size: {error}", code=2)
    return settings


def _show_secret(card: dict[str, Any]) -> None:
    """Print the secret alone on standard output, so that a script can take it."""
    print(f"key {card['id']} ({card['name']}); its secret is shown only now:", file=sys.stderr)
    print(card["secret"])


def _limits(settings: dict[str, Any]) -> str:
    words = {
        "requests_per_minute": "requests/min",
        "tokens_per_minute": "tokens/min",
        "tokens_per_day": "tokens/day",
        "concurrent_requests": "at once",
        "max_adapters": "adapters",
    }
    said = [f"{settings[name]} {unit}" for name, unit in words.items() if settings[name]]
    if settings["max_adapter_bytes"]:
        said.append(f"{format_size(settings['max_adapter_bytes'])} of adapters")
    return ", ".join(said)
