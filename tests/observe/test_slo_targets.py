"""Tenants, priorities and targets of requests: who sets them, where they go, and what became of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lorikeet.config import ClusterSettings, ConfigError, ServerSettings
from lorikeet.core.events import RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams, Slo, SloError, parse_slo
from lorikeet.http.auth import key_name
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.request_log import RequestLog
from lorikeet.observe.slo_targets import attainment, missed, read_targets
from lorikeet.observe.traffic import RequestCounts
from lorikeet.workloads.workload import read_workload
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, COMPLETIONS, bearer, body
from tests.support.metrics_pages import page
from tests.support.waiting import until


def met(samples: dict[str, Any], target: str, adapter: str = "") -> tuple[float, float]:
    """How many requests met a target, and how many did not."""
    found = {
        sample.labels["met"]: sample.value
        for sample in samples["lorikeet:slo_requests_total"]
        if (sample.labels["target"], sample.labels["adapter"]) == (target, adapter)
    }
    return found["true"], found["false"]


def shed(samples: dict[str, Any]) -> float:
    return sum(sample.value for sample in samples["lorikeet:shed_requests_total"])


# --- settings ----------------------------------------------------------------------------------------


def test_limits_are_read_in_seconds_and_invalid_ones_refused() -> None:
    assert parse_slo("ttft=0.5, tpot=0.1") == Slo(0.5, 0.1)
    for text in ("ttft", "itl=1", "ttft=-1", "tpot=nan"):
        with pytest.raises(SloError, match=r"ttft=0\.5"):
            parse_slo(text)


def test_an_adapters_targets_go_before_the_servers_field_by_field() -> None:
    entries = ("formal=ttft=2", "pirate=ttft=3,tpot=0.3", "json=tpot=0.4", "json=ttft=0", "plain=ttft=0,tpot=0")
    targets = read_targets(ServerSettings(slo_ttft_s=1.0, slo_tpot_s=0.1, adapter_slos=entries), ClusterSettings())
    assert targets.of(None) == targets.of("other") == Slo(1.0, 0.1)
    assert targets.of("formal") == Slo(2.0, 0.1)
    assert targets.of("pirate") == Slo(3.0, 0.3)
    assert targets.of("json") == Slo(None, 0.4)
    assert targets.of("plain") is None


def test_without_targets_requests_have_none() -> None:
    targets = read_targets(ServerSettings(adapter_slos=("formal=tpot=0.1",)), ClusterSettings())
    assert targets.of(None) is None
    assert targets.of("formal") == Slo(None, 0.1)


@pytest.mark.parametrize("entry", ["formal", "=ttft=1", "formal=1", "formal=", "formal=e2e=3", "formal=ttft=1,itl=2"])
def test_a_target_without_a_meaning_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match=f"adapter_slos: '{entry}'"):
        read_targets(ServerSettings(adapter_slos=(entry,)), ClusterSettings())


def test_shedding_needs_a_target_to_shed_for() -> None:
    with pytest.raises(ConfigError, match="shed needs a target"):
        read_targets(ServerSettings(shed=True, slo_tpot_s=1.0, adapter_slos=("formal=ttft=0",)), ClusterSettings())
    assert read_targets(ServerSettings(shed=True, adapter_slos=("formal=ttft=1",)), ClusterSettings())
    with pytest.raises(ConfigError, match="one replica"):
        read_targets(ServerSettings(shed=True, slo_ttft_s=1.0), ClusterSettings(max_replicas=2))


# --- attainment --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "tokens", "reason", "counts"),
    [
        (Slo(0.5, 0.1), 11, "stop", RequestCounts(ttft_met=1, tpot_met=1)),
        (Slo(0.4, 0.1), 11, "stop", RequestCounts(ttft_missed=1, tpot_met=1)),
        (Slo(0.5, 0.1), 10, "length", RequestCounts(ttft_met=1, tpot_missed=1)),
        (Slo(0.5), 11, "stop", RequestCounts(ttft_met=1)),
        (Slo(None, 0.1), 11, "stop", RequestCounts(tpot_met=1)),
        (Slo(0.5, 0.1), 1, "stop", RequestCounts(ttft_met=1)),
        (Slo(0.5, 0.1), 11, "error", RequestCounts(ttft_missed=1, tpot_missed=1)),
        (Slo(0.5, 0.1), 11, "abort", RequestCounts()),
        (None, 11, "stop", RequestCounts()),
    ],
)
def test_targets_are_met_or_missed_one_by_one(slo: Slo | None, tokens: int, reason: str, counts: RequestCounts) -> None:
    request = Request(RequestId("r"), [1], SamplingParams(20), 1.0, slo=slo)
    timings = RequestTimings(1.0, first_token_s=1.5)
    assert attainment(EndedRequest(request, timings, tokens, reason, ended_s=2.5)) == counts


def test_refused_requests_have_missed_their_targets() -> None:
    assert missed(Slo(0.5), 3) == RequestCounts(ttft_missed=3)
    assert missed(None, 3) == RequestCounts()


@pytest.mark.slow
async def test_the_page_tells_attainment_by_target_and_adapter(start: Start) -> None:
    async with start(slo_ttft_s=60.0, slo_tpot_s=60.0, adapter_slos=("formal=ttft=1e-9",)) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        for model in ("base", "base", "formal"):
            assert (await server.http.post(CHAT, json=body(model=model))).status_code == 200
        samples = await page(server)
        assert met(samples, "ttft") == met(samples, "tpot") == (2, 0)
        assert met(samples, "ttft", "formal") == (0, 1)
        assert met(samples, "tpot", "formal") == (1, 0)
        server.engine.refusal = "no"
        await server.http.post(CHAT, json=body())
        samples = await page(server)
        assert met(samples, "ttft") == met(samples, "tpot") == (2, 1), "an error misses its targets"
        assert shed(samples) == 0


async def test_aborted_requests_count_for_no_target(start: Start) -> None:
    async with start(slo_ttft_s=60.0) as server:
        server.engine.open.clear()
        asking = asyncio.create_task(server.http.post(CHAT, json=body()))
        await until(lambda: len(server.engine.submitted) == 1, "one request has been submitted")
        asking.cancel()
        await until(lambda: server.service.gate.active == 0, "no request is active")
        assert met(await page(server), "ttft") == (0, 0)


# --- what requests carry -----------------------------------------------------------------------------


async def test_a_request_belongs_to_the_key_that_let_it_in(start: Start) -> None:
    async with start(api_keys=("one", "two"), admin_keys=("boss",)) as server:
        for key in ("one", "two", "one", "boss"):
            await server.http.post(CHAT, json=body(), headers=bearer(key) | {"X-Tenant": "not asked for"})
        tenants = [request.tenant for request in server.engine.submitted]
        assert tenants == [key_name("one"), key_name("two"), key_name("one"), key_name("boss")]
        assert len(set(tenants)) == 3
        assert not any(key in tenant for key in ("one", "two", "boss") for tenant in tenants)


async def test_unconfigured_keys_name_no_tenant(server: Running) -> None:
    await server.http.post(CHAT, json=body(), headers=bearer("EMPTY"))
    await server.http.post(CHAT, json=body())
    assert [request.tenant for request in server.engine.submitted] == ["", ""]


async def test_a_trusted_header_names_the_tenant_and_without_it_the_key_does(start: Start) -> None:
    async with start(api_keys=("one",), tenant_header="X-Tenant") as server:
        await server.http.post(CHAT, json=body(), headers=bearer("one") | {"x-tenant": "blue"})
        await server.http.post(COMPLETIONS, json={"prompt": "hello"}, headers=bearer("one") | {"x-tenant": "red"})
        await server.http.post(CHAT, json=body(), headers=bearer("one"))
        assert [request.tenant for request in server.engine.submitted] == ["blue", "red", key_name("one")]
        reply = await server.http.post(CHAT, json=body(), headers=bearer("one") | {"x-tenant": "x" * 129})
        assert reply.status_code == 400
        assert "X-Tenant is longer than 128" in reply.json()["error"]["message"]
        assert (await server.http.post(CHAT, json=body(), headers={"x-tenant": "blue"})).status_code == 401


async def test_the_log_is_a_workload_with_tenants_priorities_and_targets(start: Start, tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", max_bytes=10**6, keep=1)
    async with start(request_log=log, tenant_header="X-Tenant", adapter_slos=("formal=ttft=3",)) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        await server.http.post(CHAT, json=body(model="formal", priority=-2), headers={"x-tenant": "blue"})
        await server.http.post(CHAT, json=body())
        sent = [(request.tenant, request.priority, request.slo) for request in server.engine.submitted]
    log.close()
    assert sent == [("blue", -2, Slo(ttft_s=3.0)), ("", 0, None)]
    first, second = read_workload(tmp_path / "requests.jsonl")
    assert (first.adapter, first.tenant, first.priority, first.slo) == ("formal", "blue", -2, Slo(ttft_s=3.0))
    assert (second.adapter, second.tenant, second.priority, second.slo) == (None, None, 0, None)


# --- shedding ----------------------------------------------------------------------------------------


async def test_requests_whose_target_is_lost_are_refused_and_others_are_not(start: Start) -> None:
    async with start(shed=True, slo_ttft_s=1e-6, slo_tpot_s=1.0, adapter_slos=("formal=ttft=1000",)) as server:
        server.service.catalog.register("formal", str(server.sources / "formal"))
        server.engine.admits.clear()
        first = [asyncio.create_task(server.http.post(CHAT, json=body(n=4)))]
        await until(lambda: len(server.engine.submitted) == 4, "four requests have been submitted")
        refused = await server.http.post(CHAT, json=body(stream=True))
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("RateLimitError", 429)
        assert "the TTFT target is 1e-06 s" in error["message"]
        first.append(asyncio.create_task(server.http.post(CHAT, json=body(model="formal"))))
        await until(lambda: len(server.engine.submitted) == 5, "five requests have been submitted")
        samples = await page(server)
        assert shed(samples) == 1
        assert met(samples, "ttft") == met(samples, "tpot") == (0, 1)
        server.engine.admits.set()
        assert [(await reply).status_code for reply in first] == [200] * 2
        assert (await server.http.post(CHAT, json=body())).status_code == 200, "nobody waits any more"
        assert server.service.gate.active == 0


@pytest.mark.slow
async def test_without_the_switch_or_a_backlog_nothing_is_shed(start: Start) -> None:
    async with start(slo_ttft_s=1e-9) as server:
        server.engine.admits.clear()
        waiting = [asyncio.create_task(server.http.post(CHAT, json=body())) for _ in range(4)]
        await until(lambda: len(server.engine.submitted) == 4, "four requests have been submitted")
        server.engine.admits.set()
        assert [(await reply).status_code for reply in waiting] == [200] * 4
        assert shed(await page(server)) == 0
    async with start(shed=True, slo_ttft_s=1e-9) as server:
        for _ in range(4):
            assert (await server.http.post(CHAT, json=body())).status_code == 200
        samples = await page(server)
        assert shed(samples) == 0
        assert met(samples, "ttft") == (0, 4)


async def test_requests_beyond_the_most_that_may_queue_have_missed_their_targets(start: Start) -> None:
    async with start(max_queued=1, slo_ttft_s=60.0) as server:
        server.engine.open.clear()
        waiting = asyncio.create_task(server.http.post(CHAT, json=body()))
        await until(lambda: server.engine.submitted, "a request has been submitted")
        assert (await server.http.post(CHAT, json=body())).status_code == 429
        server.engine.open.set()
        assert (await waiting).status_code == 200
        samples = await page(server)
        assert met(samples, "ttft") == (1, 1)
        assert shed(samples) == 0
