"""``lorikeet status``: shows the replicas of a running server."""

from typing import Annotated, Any

import typer
from rich.table import Table

from lorikeet.cli.console import JsonFile, check_json_file, output, write_json
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url
from lorikeet.core.text import format_size


def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    adapters: Annotated[bool, typer.Option("--adapters", help="Show which replicas serve which adapters.")] = False,
    links: Annotated[bool, typer.Option("--links", help="Show transfers between each replica's tiers.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Show a running server's replicas: address, load and adapters."""
    check_json_file(json_file)
    cluster = ServerClient(url, api_key).get("/v1/cluster")
    if not write_json(json_file, cluster):
        return
    console = output()
    console.print(_replicas(cluster["replicas"]))
    if waiting := paused_words(cluster.get("paused") or {}):
        console.print(f"paused, so that requests wait: {waiting}")
    if cluster["unrouted"]:
        console.print(f"{cluster['unrouted']} requests wait for a replica")
    if cluster["wanted"] is not None:
        console.print(f"replicas that the autoscaler wants: {cluster['wanted']}")
    if cluster["moves"]:
        console.print(f"{cluster['moves']} requests were moved between replicas")
    changed = {name: value for name, value in cluster.get("adoptions", {}).items() if value}
    if changed:
        words = (f"{name.replace('_', ' ')} {value}" for name, value in changed.items())
        console.print(f"replicas of other servers: {', '.join(words)}")
    copies = {name: value for name, value in cluster["copies"].items() if value}
    if copies:
        words = (f"{name.replace('_', ' ')} {_amount(name, value)}" for name, value in copies.items())
        console.print(f"copies of adapters: {', '.join(words)}")
    if links:
        console.print(_links(cluster["replicas"]))
    if adapters:
        console.print(_shares(cluster["shares"], cluster["epoch"]))


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("replica", "state", "process", "running", "waiting", "memory", "adapters"):
        table.add_column(name, no_wrap=name in ("replica", "process"))
    for replica in replicas:
        state = "open" if replica["is_open"] else "draining" if replica["alive"] else "down"
        restarts = f", restarted {replica['restarts']} ×" if replica["restarts"] else ""
        why = f" ({replica['trouble']})" if replica.get("trouble") else ""
        adopted = f", adopted from {replica['adopted_from']}" if replica.get("adopted_from") else ""
        table.add_row(
            replica["id"],
            state + why + restarts + adopted,
            replica["address"] if replica["pid"] is None else f"{replica['address']}, pid {replica['pid']}",
            str(replica["running"]),
            str(replica["waiting"]),
            "-" if replica["memory_used"] is None else f"{replica['memory_used']:.0%}",
            f"{len(replica['resident'])} on device, {replica['held']} held ({format_size(replica['held_bytes'])})",
        )
    return table


def paused_words(pauses: dict[str, Any]) -> str:
    """Return in words which requests wait; empty if none."""
    words = ["all requests"] if pauses.get("all") else []
    if asleep := pauses.get("asleep"):
        words.append(f"all requests, since {', '.join(asleep)} sleep")
    words += [f"{kind} {', '.join(pauses[kind])}" for kind in ("adapters", "tenants") if pauses.get(kind)]
    return "; ".join(words)


def _shares(shares: dict[str, dict[str, float]], epoch: int) -> Table:
    table = Table("adapter", "share of its requests", title=f"placement {epoch}", title_justify="left")
    for name in sorted(shares):
        table.add_row(name, ", ".join(f"{replica} {share:.0%}" for replica, share in shares[name].items()))
    return table


def _links(replicas: list[dict[str, Any]]) -> Table:
    table = Table("replica", "link", "transfers", "bytes", "busy", "failed")
    for replica in replicas:
        for route, use in sorted(replica["links"].items()):
            moved = format_size(use["bytes"])
            busy_s = f"{use['busy_s']:.1f} s"
            table.add_row(replica["id"], route, str(use["transfers"]), moved, busy_s, str(use["failed"]))
    return table


def _amount(name: str, value: int) -> str:
    return format_size(value) if name.endswith("_bytes") else str(value)
