"""Statistics of each adapter: what /v1/stats, its stream and ``lorikeet top`` tell, in bounded memory."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.config import AdapterDirMode
from lorikeet.core.events import (
    AdapterArrived,
    AdapterLoaded,
    Admitted,
    FirstToken,
    Mechanism,
    Queued,
    RequestTimings,
)
from lorikeet.core.ids import RequestId
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.live_stats import (
    ERRORS_PER_ADAPTER,
    MOST_ADAPTERS,
    REQUESTS_PER_ADAPTER,
    LiveStats,
    Rate,
    percentiles,
)
from lorikeet.observe.sort_by import SortBy
from lorikeet.observe.stats_stream import MOST_STREAMS
from lorikeet.observe.waits import parts_of
from tests.observe.tenant_requests import sequence
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.metrics_pages import STATS
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def timed(*, queue_s: float, adapter_s: float, prefill_s: float, waited_for: str = "") -> RequestTimings:
    """Timings of a request that arrived at 0."""
    name = RequestId("r")
    timings = RequestTimings(0.0)
    timings.apply(Queued(name, 0.0))
    timings.apply(Admitted(name, queue_s, 0, waits_for_adapter=adapter_s > 0, waited_for=waited_for))
    timings.apply(AdapterArrived(name, queue_s + adapter_s))
    timings.apply(FirstToken(name, queue_s + adapter_s + prefill_s))
    return timings


def test_the_parts_of_ttft_add_up_also_while_a_request_waits() -> None:
    assert parts_of(timed(queue_s=1.0, adapter_s=2.0, prefill_s=4.0), 99.0) == (1.0, 2.0, 0.0, 4.0)
    waiting = RequestTimings(10.0)
    assert parts_of(waiting, 13.0) == (3.0, 0.0, 0.0, 0.0)
    waiting.apply(Admitted(RequestId("r"), 11.0, 0, waits_for_adapter=True))
    assert parts_of(waiting, 16.0) == (1.0, 5.0, 0.0, 0.0), (
        "its adapter has not arrived, and nothing else is waited for"
    )


def test_percentiles_are_values_that_were_there() -> None:
    assert percentiles([]) is None
    assert percentiles(map(float, range(1, 101))) == {
        "count": 100,
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }


def test_a_rate_is_that_of_the_last_seconds() -> None:
    now = [0.0]
    rate = Rate(lambda: now[0])
    for now[0] in range(20):
        rate.add(5)
    assert rate.per_s() == 5.0
    now[0] = 100.0
    assert rate.per_s() == 0.0


def test_history_is_bounded_and_unfinished_requests_stay() -> None:
    live = LiveStats(dict)
    kept = live.begin(sequence("kept", "busy"), RequestTimings(0.0))
    for number in range(MOST_ADAPTERS + 10):
        request = sequence(f"r{number}", f"a{number}")
        timings = RequestTimings(0.0)
        live.begin(request, timings).on_ended(EndedRequest(request, timings, 1, "stop", 1.0))
    assert len(live.peek("a0").ended) == 0
    assert len(live.peek(f"a{MOST_ADAPTERS}").ended) == 1
    assert live.peek("busy").open == {RequestId("kept"): kept}
    for number in range(2 * REQUESTS_PER_ADAPTER):
        request = sequence(f"s{number}", "busy")
        timings = RequestTimings(0.0)
        live.begin(request, timings).on_ended(EndedRequest(request, timings, 1, "error", 1.0, "it broke"))
    assert len(live.peek("busy").ended) == REQUESTS_PER_ADAPTER
    assert len(live.peek("busy").errors) == ERRORS_PER_ADAPTER


async def figures(server: Running, **query: Any) -> dict[str, Any]:
    reply = await server.http.get("/v1/stats", params=query)
    assert reply.status_code == 200, reply.text
    assert reply.headers["cache-control"] == "no-store"
    return dict(reply.json())


async def test_slowest_adapter_comes_first_with_its_cause(server: Running) -> None:
    server.service.catalog.register("pirate", str(server.sources / "pirate"))
    digests = {record.name: record.digest for record in server.service.catalog.list()}
    server.engine.stats = msgspec.structs.replace(
        STATS, resident_adapters={digests["formal"]: 3}, hosted_adapters=(digests["pirate"],), queued={"kv_blocks": 2}
    )
    await server.http.post(CHAT, json=body(model="formal"))
    live = server.service.observer.live
    slow = sequence("slow-1", "pirate")
    timings = timed(queue_s=1.0, adapter_s=8.0, prefill_s=1.0)
    for callback in server.engine.callbacks:
        callback(AdapterLoaded(digests["pirate"], 0.0, 8.0))
    live.begin(slow, timings).on_ended(EndedRequest(slow, timings, 4, "stop", time.monotonic()))
    stats = await figures(server)
    first, second, base = stats["adapters"]
    assert (first["name"], second["name"], base["is_base"]) == ("pirate", "formal", True)
    assert first["parts_s"] == {"queue": 1.0, "adapter": 8.0, "kv": 0.0, "prefill": 1.0}
    assert first["ttft_s"]["p99"] == 10.0
    assert first["why"] == (
        "80 % of the time to the first token is the transfer of its adapter to the device; the latest load took 8 s."
    )
    assert (first["tier"], second["tier"], base["tier"]) == ("host", "device", "device")
    assert (first["hits"], first["misses"], second["hits"], second["misses"]) == (0, 1, 1, 0)
    assert second["device_bytes"] == 3 * 4096
    assert stats["requests"]["waiting_by"] == {
        "kv_blocks": 2,
        "adapter_blocks": 0,
        "slot": 0,
        "transfer": 0,
        "order": 0,
        "adapter": 2,
        "kv": 1,
    }
    assert stats["memory"]["device"]["total"] == 100
    assert "history" not in stats
    assert (await figures(server, history="true"))["history"][-1]["memory"]["host"]["adapters"] == 30


async def test_an_adapter_whose_requests_have_no_token_yet_is_slow(server: Running) -> None:
    server.engine.admits.clear()
    asking = asyncio.create_task(server.http.post(CHAT, json=body(model="formal")))
    await until(lambda: server.service.observer.live.peek("formal").open, "the request is there")
    first = (await figures(server))["adapters"][0]
    assert (first["name"], first["requests_unanswered"], first["ttft_s"]) == ("formal", 1, None)
    assert first["slowness_s"] == pytest.approx(first["oldest_unanswered_s"], abs=1e-3)
    assert "is the queue" in first["why"]
    server.engine.admits.set()
    await asking


async def test_adapters_are_sorted_matched_and_counted(server: Running) -> None:
    server.service.catalog.register("aaa", str(server.sources / "json"))
    for sort in SortBy:
        stats = await figures(server, sort=sort, adapters=2)
        assert len(stats["adapters"]) == 2
        assert (stats["adapters_total"], stats["adapters_matching"]) == (2, 3)
    names = [each["name"] for each in (await figures(server, sort="name", ascending="true"))["adapters"]]
    assert names == ["aaa", "base", "formal"]
    assert [each["name"] for each in (await figures(server, match="FOR"))["adapters"]] == ["formal"]
    assert (await server.http.get("/v1/stats", params={"sort": "luck"})).status_code == 400


async def test_adapters_that_a_request_would_load_are_listed(start: Start) -> None:
    async with start(adapters={"adapter_dir_mode": AdapterDirMode.SERVE}) as server:
        # No request can load it, since its name is that of the base model.
        shutil.copytree(server.sources / "json", server.sources / "base")
        stats = await figures(server, sort="name", ascending="true")
        assert [(each["name"], each["tier"]) for each in stats["adapters"]] == [
            ("base", "device"),
            ("formal", "files"),
            ("json", "files"),
            ("pirate", "files"),
        ]


async def test_an_adapter_tells_its_latest_requests_and_errors_without_paths(server: Running) -> None:
    server.engine.refusal = "cannot read /srv/store/formal/weights: it is cut off"
    await server.http.post(CHAT, json=body(model="formal"), headers={"X-Request-Id": "broken"})
    card = (await server.http.get("/v1/adapters/formal")).json()
    (record,) = server.service.catalog.list()
    for callback in server.engine.callbacks:
        callback(AdapterLoaded(record.digest, 0.0, 0.1, error="/srv/store/formal: too short"))
    later = (await server.http.get("/v1/adapters/formal/stats")).json()
    assert card["also_named"] == []
    (error,) = card["stats"]["errors"]
    assert error["request_id"].startswith("broken-")
    assert error["message"] == "The engine could not serve this request: cannot read weights: it is cut off"
    assert card["stats"]["recent"][0]["finish_reason"] == "error"
    assert (later["load_error"], later["requests_failed"]) == ("formal: too short", 1)
    assert later["why"] == "Its latest load failed: formal: too short"
    known = (await server.http.get("/v1/requests/broken")).json()
    assert known["sequences"][0]["error"] == error["message"]


async def test_one_tenant_does_not_see_the_requests_of_another(start: Start) -> None:
    async with start(api_keys=("one", "two"), admin_keys=("admin",)) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))

        async def ask(path: str, key: str) -> Any:
            reply = await server.http.get(path, headers={"Authorization": f"Bearer {key}"})
            return reply.json() if reply.status_code == 200 else reply.status_code

        await server.http.post(CHAT, json=body(model="formal"), headers={"Authorization": "Bearer one"})
        seen = {key: len((await ask("/v1/adapters/formal", key))["stats"]["recent"]) for key in ("one", "two", "admin")}
        assert seen == {"one": 1, "two": 0, "admin": 1}
        assert await ask("/v1/stats", "one") == 403
        assert await ask("/v1/stats/stream", "none") == 401
        assert (await ask("/v1/stats", "admin"))["requests"]["finished"] == 1


async def test_a_removed_adapter_is_forgotten(server: Running) -> None:
    await server.http.post(CHAT, json=body(model="formal"))
    await server.http.delete("/v1/adapters/formal")
    assert not server.service.observer.live.peek("formal").ended
    assert [each["name"] for each in (await figures(server))["adapters"]] == ["base"]


async def test_an_adapter_that_is_removed_while_requests_run_is_forgotten_with_the_last_one(server: Running) -> None:
    live = server.service.observer.live
    server.engine.open.clear()
    running = asyncio.create_task(server.http.post(CHAT, json=body(model="formal")))
    await until(lambda: live.peek("formal").open, "a request runs")
    live.forget("formal")
    assert "formal" in live._adapters
    server.engine.open.set()
    assert (await running).status_code == 200
    assert "formal" not in live._adapters


async def test_the_stream_repeats_the_same_and_its_places_are_limited(server: Running) -> None:
    lines: list[Any] = []
    async with server.http.stream("GET", "/v1/stats/stream", params={"interval_s": 0.2, "history": "true"}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            if line:
                lines.append(json.loads(line.removeprefix("data: ")))
            if len(lines) == 2:
                break
    assert [each["object"] for each in lines] == ["stats", "stats"]
    assert ["history" in each for each in lines] == [True, False]
    await until(lambda: server.service.stats_streams.open == 0, "the stream has noticed that its client is gone")
    server.service.stats_streams.open = MOST_STREAMS
    assert (await server.http.get("/v1/stats/stream")).status_code == 429


async def test_seconds_saved_are_summed_by_mechanism(server: Running) -> None:
    server.engine.decisions = ((Mechanism.PREFIX_REUSE, 0.25, "why"),)
    for _ in range(2):
        await server.http.post(CHAT, json=body(model="formal"))
    (formal,) = (await figures(server, match="formal"))["adapters"]
    assert formal["saved_s"] == {"prefix_reuse": 0.5}


async def test_top_shows_the_same_in_the_terminal(
    server: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await server.http.post(CHAT, json=body(model="formal"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["top", "--url", str(server.http.base_url), *options])

    said = await asyncio.to_thread(run, "--once")
    assert said.exit_code == 0, said.output
    for part in ("base: ready, 0 running, 0 waiting", "1 finished, 0 failed", "TTFT P50", "formal", "of the time to"):
        assert part in said.output
    await asyncio.to_thread(run, "--json", str(tmp_path / "stats.json"), "--match", "formal")
    written = json.loads((tmp_path / "stats.json").read_text())
    assert [each["name"] for each in written["adapters"]] == ["formal"]
    await asyncio.to_thread(run, "--json", str(tmp_path / "by_name.json"), "--sort", "name")
    written = json.loads((tmp_path / "by_name.json").read_text())
    assert [each["name"] for each in written["adapters"]] == ["base", "formal"]
    refused = await asyncio.to_thread(run, "--sort", "luck")
    assert refused.exit_code == 2
    assert [sort for sort in SortBy if repr(sort.value) not in refused.output] == []
