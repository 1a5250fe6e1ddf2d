"""``lorikeet top``: shows a running server's load, memory and slowest adapters in the terminal, with updates."""

import time
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lorikeet.cli.console import JsonFile, check_json_file, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.core.text import format_size
from lorikeet.observe.sort_by import SortBy

_KINDS = (
    ("kv_running", "KV in use"),
    ("kv_cached", "KV cached"),
    ("adapters", "adapters"),
    ("inflight", "in transfer"),
    ("free", "free"),
)

_MOST_REASONS = 5


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    sort: Annotated[SortBy, typer.Option(help="Order of the adapters.")] = SortBy.SLOWNESS,
    adapters: Annotated[int, typer.Option(min=0, max=1000, help="Adapters to show.")] = 20,
    match: Annotated[str, typer.Option(help="Only adapters with this in their name.", show_default="all")] = "",
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show what a running server does now: load, latencies, memory, and the slowest adapters with the reason.

    Ends with Ctrl-C. With --json, the answer of `/v1/stats` is written once.
    """
    check_json_file(json_file)
    api = ServerClient(url, api_key)

    def look() -> dict[str, Any]:
        return api.get("/v1/stats", sort=sort, adapters=adapters, match=match, ascending=int(sort is SortBy.NAME))

    stats = look()
    if not write_json(json_file, stats) or json_file is not None:
        return
    console = output()
    if once or not console.is_terminal:
        console.print(_screen(stats))
        return
    with Live(_screen(stats), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                live.update(_screen(look()), refresh=True)
        except KeyboardInterrupt:
            return


def _screen(stats: dict[str, Any]) -> Group:
    """Return the whole screen."""
    requests = stats["requests"]
    rates = stats["per_s"]
    waiting = ", ".join(
        f"{cause.replace('_', ' ')} {count}" for cause, count in requests["waiting_by"].items() if count
    )
    lines = [
        f"{stats['model']}: {stats['status']}, {requests['running']} running, {requests['waiting']} waiting"
        + (f" ({waiting})" if waiting else ""),
        f"{rates['generation_tokens']:.1f} tokens/s, {rates['prompt_tokens']:.1f} of prompts, {rates['requests']:.2f} "
        f"requests/s; {requests['finished']} finished, {requests['failed']} failed, {requests['aborted']} aborted",
        f"TTFT {_percentiles(stats['ttft_s'])}; ITL {_percentiles(stats['itl_s'])}",
    ]
    for each in stats.get("backends", ()):  # Only a router's statistics have this field.
        trouble = f" ({each['why']})" if each["why"] else ""
        lines.append(
            f"{each['id']} {each['status']}{trouble}: {each['running']} running, {each['waiting']} waiting, "
            f"{each['adapters']} adapters"
        )
    for tier in ("device", "host"):  # A router reports a total of 0.
        held = stats["memory"][tier]
        if held["total"]:
            parts = ", ".join(f"{name} {format_size(held[kind])}" for kind, name in _KINDS)
            lines.append(f"{tier} {format_size(held['total'])}: {parts}")
    why = [f"{each['name']}: {each['why']}" for each in stats["adapters"] if each["why"]]
    return Group(*(Text(line) for line in lines), _adapters(stats), *(Text(line) for line in why[:_MOST_REASONS]))


def _adapters(stats: dict[str, Any]) -> Table:
    table = Table(
        "adapter", "TTFT P90", "queue", "adapter", "KV", "prefill", "requests", "/s", "tier", "hits", "failed"
    )
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for each in stats["adapters"]:
        parts = each["parts_s"] or {}
        asked = each["hits"] + each["misses"]
        table.add_row(
            escape(each["name"]),
            _time(each["slowness_s"] or None),
            *(_time(parts.get(part)) for part in ("queue", "adapter", "kv", "prefill")),
            str(each["requests"]),
            f"{each['requests_per_s']:.1f}",
            each["tier"] + (" pinned" if each["pinned"] else ""),
            f"{each['hits'] / asked:.0%}" if asked else "–",
            "[red]load[/]" if each["load_error"] else str(each["requests_failed"]),
        )
    return table


def _percentiles(found: dict[str, float] | None) -> str:
    if found is None:
        return "–"
    return f"P50 {_time(found['p50'])}, P90 {_time(found['p90'])}, P99 {_time(found['p99'])}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
