"""Files and batches through routers: each file is at one backend, and all routers find it there."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lorikeet.core.splits import Split
from lorikeet.router.adapters import RoutedAdapter, describe_adapter
from lorikeet.router.proxied_request import COMPLETIONS
from tests.router.calls import body
from tests.router.conftest import Routing, routing
from tests.router.conftest import adapters as unread_adapters
from tests.router.scripted import ScriptedBackend
from tests.support import api_server
from tests.support.waiting import until

CHAT = "/v1/chat/completions"

sources = api_server.sources
lorikeets = api_server.start


@dataclass
class Fleet:
    """Two Lorikeets, and two routers before them."""

    servers: list[api_server.Running]
    stops: list[AsyncExitStack]
    """Ends of the servers."""
    routers: list[Routing]

    @property
    def http(self) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        first, second = self.routers
        return first.http, second.http


@asynccontextmanager
async def fleet(
    start: api_server.Start, folder: Path, server: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        stops = [await stack.enter_async_context(AsyncExitStack()) for _ in "ab"]
        servers = [
            await stop.enter_async_context(
                start(batches={"dir": str(folder / name)}, adapters={"store_dir": str(folder / name)}, **server or {})
            )
            for name, stop in zip("ab", stops, strict=True)
        ]
        urls = [str(each.http.base_url) for each in servers]
        named = adapters(servers[0].sources)
        routers = [
            await stack.enter_async_context(routing(order, adapters=named, **options)) for order in (urls, urls[::-1])
        ]
        yield Fleet(servers, stops, routers)


def adapters(folder: Path) -> tuple[RoutedAdapter, ...]:
    return tuple(describe_adapter(name, str(folder / name)) for name in ("formal", "pirate"))


def lines(*models: str) -> bytes:
    said = [{"role": "user", "content": "hi"}]
    requests = (
        {"custom_id": f"c{at}", "method": "POST", "url": CHAT, "body": {"model": model, "messages": said}}
        for at, model in enumerate(models)
    )
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


async def upload(http: httpx.AsyncClient, content: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
    reply = await http.post(
        "/v1/files", files={"file": ("r.jsonl", content)}, data={"purpose": "batch"}, headers=headers
    )
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def begin(http: httpx.AsyncClient, file_id: str) -> httpx.Response:
    return await http.post("/v1/batches", json={"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"})


async def ended(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    """Wait for the end of a batch, and return it."""
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        found.update((await http.get(f"/v1/batches/{batch_id}")).json())
        return found["status"] == "completed"

    await until(has_ended, "the batch has ended")
    return found


async def test_a_batch_runs_where_its_file_is_and_every_router_finds_it(
    lorikeets: api_server.Start, tmp_path: Path
) -> None:
    async with fleet(lorikeets, tmp_path) as running:
        one, other = running.http
        version = (await one.get("/v1/adapters/pirate")).json()["digest"]
        models = ("pirate", "base", f"pirate@{version[:12]}", "base:formal", "formal*0.5+pirate*0.5", "nobody")
        file = await upload(one, lines(*models))
        (holder,) = [each for each in running.servers if (await each.http.get("/v1/files")).json()["data"]]
        assert (await other.get(f"/v1/files/{file['id']}")).json() == file
        assert (await other.get(f"/v1/files/{file['id']}/content")).content == lines(*models)
        batch = (await begin(other, file["id"])).json()
        assert {"pirate", "formal"} <= {*holder.service.catalog.names()}
        done = await ended(one, batch["id"])
        assert done["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        answers = (await one.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
        named = {each["custom_id"]: each["response"]["body"]["model"] for each in map(json.loads, answers)}
        assert named == {"c0": "pirate", "c1": "base", "c2": "pirate", "c3": "formal", "c4": "formal*0.5+pirate*0.5"}
        errors = (await other.get(f"/v1/files/{done['error_file_id']}/content")).text
        assert "The model `nobody` does not exist." in errors
        assert (await other.delete(f"/v1/files/{file['id']}")).json()["deleted"] is True
        gone = await other.get(f"/v1/files/{file['id']}")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "file_id")
        assert (await one.get(f"/v1/files/{file['id']}")).status_code == 404
        cancelled = await one.post(f"/v1/batches/{batch['id']}/cancel")
        assert cancelled.status_code == 409


async def test_lists_of_all_backends_are_one(lorikeets: api_server.Start, tmp_path: Path) -> None:
    async with fleet(lorikeets, tmp_path) as running:
        one, other = running.http
        ids = []
        for at in range(5):  # to both servers, past the routers
            ids.append((await upload(running.servers[at % 2].http, lines("base")))["id"])
        whole = (await one.get("/v1/files")).json()
        assert [each["id"] for each in whole["data"]] == ids[::-1]
        assert whole["has_more"] is False
        assert "left_out" not in whole
        ascending = (await other.get("/v1/files?order=asc&limit=2")).json()
        assert [each["id"] for each in ascending["data"]] == ids[:2]
        assert ascending["has_more"] is True
        rest = (await one.get(f"/v1/files?order=asc&limit=10&after={ids[1]}")).json()
        assert [each["id"] for each in rest["data"]] == ids[2:]
        assert (await one.get("/v1/files?after=file-x")).status_code == 400
        assert (await one.get("/v1/files?limit=0")).status_code == 400
        batches = [(await begin(one, file_id)).json()["id"] for file_id in ids]
        pages, after = [], ""
        while True:
            page = (await other.get(f"/v1/batches?limit=2&after={after}")).json()
            pages += [each["id"] for each in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert pages == batches[::-1]


async def test_what_a_lost_backend_keeps_is_a_503(lorikeets: api_server.Start, tmp_path: Path) -> None:
    async with fleet(lorikeets, tmp_path) as running:
        one, other = running.http
        file = await upload(one, lines("base"))
        kept = [(await each.http.get("/v1/files")).json()["data"] for each in running.servers]
        await running.stops[0 if kept[0] else 1].aclose()
        for router in running.routers:
            await router.up(1)
        for http, why in ((one, "keeps it, and is down"), (other, "may have it")):
            reply = await http.get(f"/v1/files/{file['id']}")
            assert reply.status_code == 503
            assert why in reply.json()["error"]["message"]
            left = (await http.get("/v1/files")).json()
            assert (left["data"], len(left["left_out"])) == ([], 1)
        assert (await upload(other, lines("base")))["id"] != file["id"]


async def test_adapters_of_a_running_batch_stay_loaded() -> None:
    backend = ScriptedBackend()
    await backend.start()
    named = unread_adapters("formal", "pirate", "json")
    async with routing([f"{backend.url},max_loras=1"], [backend], adapters=named) as router:
        await router.up(1)
        backend_router = router.parts.backend_router
        (known,) = backend_router.backends.values()
        backend_router.keep_loaded(known, named[:1])
        await backend_router.load(known, named[0])
        assert (await router.http.post(COMPLETIONS, json=body("pirate"))).status_code == 200
        assert backend.calls == ["+formal", "+pirate"]
        backend_router.keep_no_longer(known, named[:1])
        assert (await router.http.post(COMPLETIONS, json=body("json"))).status_code == 200
        assert backend.calls[2:] == ["-formal", "-pirate", "+json"]
    await backend.kill()


async def test_a_line_cannot_name_a_split_of_the_router(lorikeets: api_server.Start, tmp_path: Path) -> None:
    split = {"both": Split({"formal": 0.5, "pirate": 0.5}, {})}
    async with fleet(lorikeets, tmp_path, splits=split) as running:
        one, _ = running.http
        reply = await begin(one, (await upload(one, lines("both")))["id"])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_file_id")
        assert "`both` is a split of this router" in reply.json()["error"]["message"]


async def test_clients_see_their_own_files_by_the_tenant_header(lorikeets: api_server.Start, tmp_path: Path) -> None:
    keys = {"api_keys": ("one", "two"), "backend_key": "its"}
    server = {"api_keys": ("its",), "tenant_header": "X-Tenant"}
    mine, others = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two", "X-Tenant": "key-7692c3ad3540"}
    async with fleet(lorikeets, tmp_path, server, tenant_header="X-Tenant", **keys) as running:
        one, other = running.http
        file = await upload(one, lines("base"), mine)
        assert (await other.get(f"/v1/files/{file['id']}", headers=mine)).status_code == 200
        assert (await other.get(f"/v1/files/{file['id']}", headers=others)).status_code == 404
        assert (await other.get("/v1/files", headers=others)).json()["data"] == []
    async with fleet(lorikeets, tmp_path, server, **keys) as running:
        reply = await running.http[0].get("/v1/files", headers=mine)
        assert reply.status_code == 501
        assert "--tenant-header" in reply.json()["error"]["message"]
