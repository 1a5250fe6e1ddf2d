"""Which backend got a request, and why: ``/v1/requests`` of a router, and ``lorikeet why``."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.router.adapters import describe_adapter
from lorikeet.router.proxied_request import COMPLETIONS
from tests.router.calls import body
from tests.router.conftest import Start, events, routing
from tests.support import api_server

sources = api_server.sources
lorikeets = api_server.start


async def test_a_request_shows_its_backend_its_reason_and_the_backends_own_record(
    lorikeets: api_server.Start, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(lorikeets(adapters={"store_dir": str(tmp_path / name)})) for name in "ab"
        ]
        named = (describe_adapter("pirate", str(servers[0].sources / "pirate")),)
        urls = [str(each.http.base_url) for each in servers]
        router = await stack.enter_async_context(routing(urls, adapters=named, preset="auto"))
        prompt = "word " * 100
        for number in range(3):
            asked = {"model": "pirate", "prompt": prompt, "max_tokens": 4}
            reply = await router.http.post(COMPLETIONS, json=asked, headers={"X-Request-Id": f"r{number}"})
            assert reply.status_code == 200
        assert (await router.http.get(f"/v1/requests/{reply.json()['id']}")).status_code == 200
        shown = (await router.http.get("/v1/requests/r2")).json()
        (placement,) = shown["route"]["placements"]
        assert placement["backend"] == shown["route"]["backend"]
        assert placement["why"] == (
            "it has the best score (minus the blocks of the prompt that it has), it has the adapter"
        )
        best, other = placement["candidates"]
        assert (best["backend"], best["score"] < 0, best["has_adapter"]) == (placement["backend"], True, True)
        assert (other["score"], other["has_adapter"], other["avoided"]) == (0, False, False)
        assert shown["route"]["outcome"] == "complete"
        assert shown["route"]["known_by_backend"] is True
        assert [each["adapter"] for each in shown["sequences"]] == ["pirate"]
        listed = (await router.http.get("/v1/requests?limit=2")).json()["data"]
        assert [each["id"] for each in listed] == ["r2", "r1"]
        url = ["--url", str(router.http.base_url)]
        said = await asyncio.to_thread(CliRunner().invoke, app, ["why", "r2", *url], env={"COLUMNS": "200"})
        assert said.exit_code == 0, said.output
        for part in ("backends after", placement["backend"], "it has the adapter", "time to the first token"):
            assert part in said.output
        unknown = await router.http.get("/v1/requests/nobodys")
        assert unknown.status_code == 404


async def test_a_request_shows_all_its_attempts(start: Start) -> None:
    async with start() as router:
        first, second = router.backends
        first.busy = second.busy = 1
        headers = {"X-Request-Id": "r1"}
        reply = await router.http.post(COMPLETIONS, json=body("formal"), headers=headers)
        assert reply.status_code == 429
        shown = (await router.http.get("/v1/requests/r1")).json()
        one, other = shown["route"]["placements"]
        assert one["backend"] != other["backend"]
        assert other["why"] == "the only open backend that had not refused it"
        assert [each["avoided"] for each in other["candidates"] if each["backend"] == one["backend"]] == [True]
        assert (shown["route"]["outcome"], shown["route"]["known_by_backend"]) == ("refused", False)


async def test_a_session_stays_and_a_key_finds_its_own_requests(start: Start) -> None:
    async with start(api_keys=("one", "two"), admin_keys=("boss",)) as router:
        keys: list[dict[str, Any]] = [{"Authorization": f"Bearer {key}"} for key in ("one", "two", "boss")]
        for number in range(2):
            headers = {**keys[0], "X-Request-Id": f"r{number}", "X-Session-ID": "s"}
            router.http.headers.update(headers)
            await events(router.http, COMPLETIONS, body("formal"))
        found = [(await router.http.get("/v1/requests/r1", headers=key)).status_code for key in keys]
        assert found == [200, 404, 200]
        record = (await router.http.get("/v1/requests/r1")).json()["route"]
        assert record["placements"][0]["why"] == "its session was there before"
        assert record["ttft_s"] >= 0
