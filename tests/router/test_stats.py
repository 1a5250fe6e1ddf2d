"""Statistics of a router: ``/v1/stats``, its stream, ``lorikeet top``, and the console's page."""

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from tests.router.calls import body
from tests.router.conftest import Routing, Start, events
from tests.support.waiting import until

COMPLETIONS = "/v1/completions"


async def figures(routing: Routing, **query: Any) -> dict[str, Any]:
    reply = await routing.http.get("/v1/stats", params=query)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def test_requests_are_counted_by_adapter_with_their_ttft(start: Start) -> None:
    async with start() as routing:
        await events(routing.http, COMPLETIONS, body("pirate"))
        await routing.http.post(COMPLETIONS, json=body())
        await routing.idle()
        found = await figures(routing, sort="traffic", history="true")
        assert (found["object"], found["is_router"], found["status"]) == ("stats", True, "ready")
        assert (found["requests"]["finished"], found["requests"]["accepted"], found["ttft_s"]["count"]) == (2, 0, 1)
        assert (found["adapters_total"], found["adapters_matching"], len(found["history"])) == (2, 3, 1)
        rows = {row["name"]: row for row in found["adapters"]}
        pirate, formal, base = rows["pirate"], rows["formal"], rows["base"]
        assert (pirate["requests"], pirate["ttft_s"]["count"], pirate["generation_tokens"]) == (1, 1, 5)
        assert (pirate["tier"], pirate["backends"][0][:8]) == ("device", "backend-")
        assert (formal["requests"], formal["tier"], formal["backends"]) == (0, "files", [])
        assert (base["is_base"], base["requests"], base["ttft_s"]) == (True, 1, None)
        assert [(each["id"], each["status"], each["running"]) for each in found["backends"]] == [
            ("backend-0", "open", 0),
            ("backend-1", "open", 0),
        ]
        assert sum(each["adapters"] for each in found["backends"]) == 1
        assert [row["name"] for row in (await figures(routing, match="pir"))["adapters"]] == ["pirate"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "outcome"), [(400, "refused"), (429, "refused"), (501, "refused"), (504, "failed")])
async def test_a_request_that_a_backend_refuses_has_not_failed(
    start: Start, status: int, outcome: str, stream: bool
) -> None:
    async with start(count=1) as routing:
        routing.backends[0].fails_with = status
        assert (await routing.http.post(COMPLETIONS, json=body(stream=stream))).status_code == status
        await routing.metric(f'lorikeet:route_requests_total{{outcome="{outcome}"}} 1.0')
        (base,) = (await figures(routing, match="base"))["adapters"]
        refused = outcome == "refused"
        assert (base["requests_refused"], base["requests_failed"], base["requests"]) == (
            refused,
            not refused,
            not refused,
        )


async def test_an_adapter_whose_requests_wait_is_the_slowest(start: Start) -> None:
    async with start(count=1) as routing:
        await routing.up(1)
        routing.backends[0].open.clear()
        waiting = asyncio.create_task(routing.http.post(COMPLETIONS, json=body("formal", stream=True)))
        await until(lambda: routing.parts.backend_router._requests, "it has been sent")
        first = (await figures(routing))["adapters"][0]
        assert (first["name"], first["requests_unanswered"]) == ("formal", 1)
        assert first["slowness_s"] > 0
        waiting.cancel()
        await routing.idle()
        assert (await figures(routing))["requests"]["aborted"] == 1


async def test_stats_show_refused_loads(start: Start) -> None:
    async with start(count=1) as routing:
        routing.backends[0].bad_paths.add("/elsewhere/formal")
        assert (await routing.http.post(COMPLETIONS, json=body("formal"))).status_code == 400
        first = (await figures(routing, sort="errors"))["adapters"][0]
        assert (first["name"], first["requests_refused"]) == ("formal", 1)
        assert first["load_error"]
        assert "/elsewhere" not in first["load_error"]


async def test_the_stream_ends_when_the_router_drains(start: Start) -> None:
    async with start() as routing:
        lines = []
        async with routing.http.stream("GET", "/v1/stats/stream", params={"interval_s": 0.2}) as reply:
            async for line in reply.aiter_lines():
                lines += [line] if line else []
                routing.parts.stats.is_ending = True
        assert json.loads(lines[0].removeprefix("data: "))["object"] == "stats"
        wrong = await routing.http.get("/v1/stats", params={"adapters": "many"})
        assert (wrong.status_code, "adapters" in wrong.text) == (400, True)


async def test_the_console_and_top_work_with_a_router(start: Start) -> None:
    async with start(admin_keys=("boss",), api_keys=("one",)) as routing:
        page = await routing.http.get("/ui")
        assert (page.status_code, "script-src 'self'" in page.headers["content-security-policy"]) == (200, True)
        assert (await routing.http.get("/ui/console.js")).status_code == 200
        assert (await routing.http.get("/v1/stats")).status_code == 401
        assert (await routing.http.get("/v1/stats", headers={"Authorization": "Bearer one"})).status_code == 403
        arguments = ["top", "--url", str(routing.http.base_url), "--api-key", "boss", "--once"]
        shown = await asyncio.to_thread(CliRunner(env={"COLUMNS": "120"}).invoke, app, arguments)
        assert (shown.exit_code, "base: ready" in shown.output) == (0, True), shown.output
        assert "pirate" in shown.output
        assert "backend-1 open: 0 running, 0 waiting, 0 adapters" in shown.output


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_tokens_of_messages_and_responses_are_counted(start: Start, path: str, stream: bool) -> None:
    async with start(count=1) as routing:
        asked = {"model": "base", "messages": [], "input": "x", "stream": stream}
        assert (await routing.http.post(path, json=asked)).status_code == 200
        await routing.idle()
        (base,) = (await figures(routing, match="base"))["adapters"]
        assert (base["requests"], base["generation_tokens"]) == (1, 4)
