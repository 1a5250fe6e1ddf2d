"""``lorikeet roll``: replaces all replicas of a running server, one by one."""

from typing import Annotated

import typer

from lorikeet.cli.console import output
from lorikeet.cli.http_client import DEFAULT_URL, ApiKey, ServerClient, Url


def roll(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    drain: Annotated[
        float,
        typer.Option(min=0, help="Seconds that requests may go on at a replica if their KV cannot move to another."),
    ] = 60.0,
) -> None:
    """Replace all replicas of a running server, one by one; no stream ends.

    Each replica gets a successor first, so there must be room for one more. New engines run the code and read the
    model's files that are installed at that time.
    """
    server = ServerClient(url, api_key)
    before = [replica["id"] for replica in server.get("/v1/cluster")["replicas"]]
    for replica in before:
        successor = server.post("/v1/cluster/replicas", {})["id"]
        server.delete(f"/v1/cluster/replicas/{replica}?drain_s={drain:g}")
        output().print(f"{replica} → {successor}")
    output().print(f"{len(before)} replicas replaced")
