"""What the server tells of its replicas, and how they come and go by its routes."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.client.state import ClusterState, CopyCounts, ReplicaState
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import RouteStats
from tests.support.api_server import Running, Start

FIRST = ReplicaId("replica-0")
SECOND = ReplicaId("replica-1")


def replica(replica_id: ReplicaId, resident: tuple[AdapterDigest, ...], *, alive: bool = True) -> ReplicaState:
    links = {"host-device": RouteStats(12, 3 * 2**20, 1, 0.25)} if alive else {}
    return ReplicaState(replica_id, 4711, "10.0.0.5", alive, alive, 1, 3, 2, resident, 2, 5 * 2**20, 0.25, links)


def state_of(server: Running) -> ClusterState:
    (record,) = server.service.catalog.list()
    unknown = AdapterDigest("f" * 64)
    return ClusterState(
        (replica(FIRST, (record.digest, unknown)), replica(SECOND, (), alive=False)),
        unrouted=4,
        epoch=7,
        shares={record.digest: {FIRST: 0.75, SECOND: 0.25}},
        copies=CopyCounts(fetches=1, fetched_bytes=3 * 2**20),
    )


async def test_adapters_are_shown_by_their_names(server: Running) -> None:
    server.engine.state = state_of(server)
    shown = (await server.http.get("/v1/cluster")).json()
    assert shown["object"] == "cluster"
    assert shown["shares"] == {"formal": {"replica-0": 0.75, "replica-1": 0.25}}
    assert (shown["epoch"], shown["unrouted"]) == (7, 4)
    first, second = shown["replicas"]
    assert first["resident"] == ["formal", "f" * 64], "one without a name keeps its digest"
    assert (first["id"], first["pid"], first["address"]) == ("replica-0", 4711, "10.0.0.5")
    assert first["links"] == {"host-device": {"transfers": 12, "bytes": 3 * 2**20, "failed": 1, "busy_s": 0.25}}
    assert (second["is_open"], second["links"]) == (False, {})


async def test_replicas_come_and_go(server: Running) -> None:
    reply = await server.http.post("/v1/cluster/replicas")
    assert (reply.status_code, reply.json()["id"]) == (201, "replica-1")
    reply = await server.http.delete("/v1/cluster/replicas/replica-1", params={"drain_s": 2.5})
    assert reply.json() == {"object": "replica", "id": "replica-1", "deleted": True}
    assert server.engine.removed == [("replica-1", 2.5)]
    assert (await server.http.delete("/v1/cluster/replicas/nobody")).status_code == 404
    assert (await server.http.delete("/v1/cluster/replicas/replica-1", params={"drain_s": -1})).status_code == 400
    server.engine.size_error = "it has one engine"
    assert (await server.http.post("/v1/cluster/replicas")).status_code == 409
    reply = await server.http.delete("/v1/cluster/replicas/replica-1")
    assert reply.status_code == 409
    assert "it has one engine" in reply.json()["error"]["message"]


async def test_changing_replicas_takes_an_admin_key(start: Start) -> None:
    async with start(api_keys=("user",), admin_keys=("admin",)) as server:
        for key, status in (("user", 403), ("admin", 201)):
            reply = await server.http.post("/v1/cluster/replicas", headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == status
        assert (await server.http.get("/v1/cluster", headers={"Authorization": "Bearer user"})).status_code == 403


@pytest.mark.slow
async def test_status_shows_the_servers_replicas(server: Running) -> None:
    server.engine.state = state_of(server)

    async def status(*options: str) -> str:
        arguments = ["status", "--url", str(server.http.base_url), *options]
        return (await asyncio.to_thread(CliRunner().invoke, app, arguments)).output

    printed = await status("--adapters")
    for words in (
        "replica-0",
        "10.0.0.5, pid 4711",
        "open",
        "down",
        "25%",
        "formal",
        "replica-0 75%",
        "4 requests wait",
    ):
        assert words in printed, printed
    assert "fetches 1" in printed
    assert "host-device" not in printed
    (row,) = [line for line in (await status("--links")).splitlines() if "host-" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("replica-0", "host-device", "12", "3.0 MiB", "0.2 s", "1"),
    ]


async def test_one_command_replaces_all_replicas_one_by_one(server: Running) -> None:
    async def roll() -> tuple[int, str]:
        arguments = ["roll", "--url", str(server.http.base_url), "--drain", "2.5"]
        ended = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        return ended.exit_code, ended.output

    server.engine.state = state_of(server)
    code, printed = await roll()
    assert code == 0, printed
    assert server.engine.removed == [("replica-0", 2.5), ("replica-1", 2.5)]
    assert "2 replicas replaced" in printed
    server.engine.size_error = "it has one engine"
    code, printed = await roll()
    assert code == 1
    assert "it has one engine" in printed


def test_status_without_a_server_is_an_error(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["status", "--url", "http://127.0.0.1:9"])
    assert ended.exit_code == 1
    assert "is a server running there?" in ended.output


async def test_metrics_tell_of_the_cluster(server: Running) -> None:
    server.engine.state = msgspec.structs.replace(state_of(server), moves=5, wanted=3)
    page = (await server.http.get("/metrics")).text
    labels = 'model_name="base"'
    for line in (
        f'lorikeet:cluster_replicas{{{labels},state="open"}} 1.0',
        f'lorikeet:cluster_replicas{{{labels},state="down"}} 1.0',
        f"lorikeet:cluster_replicas_wanted{{{labels}}} 3.0",
        f"lorikeet:cluster_requests_unrouted{{{labels}}} 4.0",
        f"lorikeet:cluster_requests_moved_total{{{labels}}} 5.0",
        f"lorikeet:cluster_placement_epoch{{{labels}}} 7.0",
        f'lorikeet:cluster_copies_total{{{labels},source="replica"}} 1.0',
        f'lorikeet:cluster_copied_bytes_total{{{labels},source="replica"}} 3.145728e+06',
    ):
        assert line in page.splitlines(), page
    server.engine.state = state_of(server)
    assert "cluster_replicas_wanted" not in (await server.http.get("/metrics")).text
