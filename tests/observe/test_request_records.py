"""What is said of single requests: over HTTP, in the metrics, in the log, and by `lorikeet why`."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.core.events import MOST_DECISIONS, Decided, Mechanism, RequestTimings
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.observe.request_log import RequestLog
from lorikeet.observe.request_records import RequestRecords
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, bearer, body

SAVED = ((Mechanism.PREFIX_REUSE, 0.25, "KV of 64 of 80 tokens was there"), (Mechanism.ASSIST, -0.125, "it was slow"))


async def ask(server: Running, name: str, key: str = "one") -> str:
    """Ask for an answer for which two things were decided, and return its id."""
    server.engine.decisions = SAVED
    headers = {**bearer(key), "X-Request-Id": name}
    reply = await server.http.post(CHAT, json=body(n=2), headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


@pytest.mark.slow
async def test_decisions_of_a_request_are_shown_to_its_key_and_to_admins(start: Start) -> None:
    async with start(api_keys=("one", "two"), admin_keys=("admin",)) as server:
        answer_id = await ask(server, "mine")
        for known in ("mine", answer_id):
            found = (await server.http.get(f"/v1/requests/{known}", headers=bearer("one"))).json()
            assert len(found["sequences"]) == 2
            each = found["sequences"][0]
            assert (each["status"], each["finish_reason"]) == ("finished", "stop")
            assert each["saved_s"] == {"prefix_reuse": 0.25, "assist": -0.125}
            assert [(made["mechanism"], made["saved_s"], made["why"]) for made in each["decisions"]] == list(SAVED)
            assert 0 <= each["decisions"][0]["after_s"] <= each["e2e_s"]
        alone = (await server.http.get(f"/v1/requests/{each['id']}", headers=bearer("one"))).json()
        assert alone["sequences"] == [each]
        for key, name in (("two", "mine"), ("two", each["id"]), ("one", "nobody's"), ("admin", "nobody's")):
            reply = await server.http.get(f"/v1/requests/{name}", headers=bearer(key))
            assert reply.status_code == 404, (key, name)
        assert (await server.http.get("/v1/requests/mine", headers=bearer("admin"))).status_code == 200
        assert (await server.http.get("/v1/requests/mine")).status_code == 401


@pytest.mark.slow
async def test_latest_requests_are_listed_newest_first_for_their_key(start: Start) -> None:
    async with start(api_keys=("one", "two"), admin_keys=("admin",)) as server:
        for name, key in (("a", "one"), ("b", "two"), ("c", "one")):
            await ask(server, name, key)

        async def listed(key: str, **params: int) -> list[str]:
            reply = await server.http.get("/v1/requests", headers=bearer(key), params=params)
            return [each["id"].split("-")[0] for each in reply.json()["data"]]

        assert await listed("one") == ["c", "c", "a", "a"]
        assert await listed("two") == ["b", "b"]
        assert await listed("admin", limit=3) == ["c", "c", "b"]
        (each,) = (await server.http.get("/v1/requests?limit=1", headers=bearer("one"))).json()["data"]
        assert (each["status"], each["finish_reason"], each["adapter"]) == ("finished", "stop", None)
        assert each["ttft_s"] > 0
        assert "decisions" not in each
        for limit in (0, 10**6):
            reply = await server.http.get("/v1/requests", headers=bearer("one"), params={"limit": limit})
            assert reply.status_code == 400
        assert (await server.http.get("/v1/requests")).status_code == 401


async def test_saved_and_lost_seconds_are_counted_by_mechanism(start: Start) -> None:
    async with start() as server:
        await ask(server, "mine")
        page = (await server.http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("lorikeet:seconds_"))

    def value(name: str, mechanism: str) -> float:
        return float(next(v for key, v in values.items() if f"{name}_total" in key and f'"{mechanism}"' in key))

    assert value("seconds_saved", "prefix_reuse") == 0.5
    assert value("seconds_lost", "assist") == 0.25
    assert value("seconds_saved", "assist") == value("seconds_saved", "placement") == 0.0


async def test_the_log_has_the_decisions_and_why_reads_them(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, max_bytes=10**6, keep=1)
    async with start(request_log=log) as server:
        await ask(server, "mine")
    log.close()
    said = CliRunner().invoke(app, ["why", str(path), "--top", "3"], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "prefix_reuse" in said.output
    assert "KV of 64 of 80 tokens was there" in said.output
    figures = json.loads(CliRunner().invoke(app, ["why", str(path), "--json", "-"]).output)
    assert figures["requests"] == 2
    assert figures["saved_s"]["prefix_reuse"] == {"saved": 0.5, "lost": 0.0, "requests": 2}
    assert figures["saved_s"]["assist"]["lost"] == 0.25
    assert figures["adapters"].keys() == {"(base)"}
    for options, reason in (
        (["--request", "nobody"], "has an id that begins with 'nobody'"),
        (["--adapter", "sql"], "is for the adapter 'sql'"),
        (["--request", "x", "--adapter", "sql"], "has an id that begins with 'x' and is for the adapter 'sql'"),
    ):
        none_found = CliRunner().invoke(app, ["why", str(path), *options])
        assert none_found.exit_code == 1
        assert none_found.output == f"error: no request in {path} {reason}\n"


@pytest.mark.parametrize("name", ["requests.jsonl", "logs/requests"])
def test_why_explains_that_a_log_is_missing(name: str) -> None:
    mistaken = CliRunner().invoke(app, ["why", name])
    assert mistaken.exit_code == 1
    assert f"there is no request log '{name}'" in mistaken.output
    assert "--request ID" in mistaken.output


async def test_why_shows_a_request_of_a_server(server: Running) -> None:
    body = {"model": "formal", "prompt": "hi", "max_tokens": 2}
    reply = await server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert reply.status_code == 200
    url = ["--url", str(server.http.base_url)]
    said = await asyncio.to_thread(CliRunner().invoke, app, ["why", "mine", *url], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "time to the first token" in said.output
    assert "formal" in said.output
    unknown = await asyncio.to_thread(CliRunner().invoke, app, ["why", "nobodys", *url])
    assert (unknown.exit_code, "is not among the latest" in unknown.output) == (1, True)


def test_why_refuses_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("")
    assert CliRunner().invoke(app, ["why", str(path)]).output == f"error: {path} has no requests\n"


def test_unknown_savings_are_not_shown_as_zero(tmp_path: Path) -> None:
    """Before a load from the host was seen, nobody knows what a hit saves."""
    hit = {"mechanism": "adapter_cache", "saved_s": 0.0, "why": "its adapter (10 blocks) was on the device"}
    known = {"input_tokens": 9, "output_tokens": 2, "ttft_s": 1.0, "queue_s": 0.9}
    lines = [{**known, "adapter": "json", "saved_s": {"adapter_cache": 0.0}, "decisions": [hit]}, known]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = CliRunner().invoke(app, ["why", str(path)], env={"COLUMNS": "200"}).output
    assert "2 requests of 1 adapter and the base model" in said
    assert "adapter_cache: its adapter" in said
    assert "queue: a step or requests before it" in said
    assert re.search(r"│ adapter_cache +│ +– │ +– │ +1 │", said), said


def test_why_shows_when_parts_were_switched(tmp_path: Path) -> None:
    text = "order is switched off: with it requests waited 3.120 s longer"
    switch = {"mechanism": "guard", "saved_s": 0.0, "why": text}
    line = {"input_tokens": 9, "output_tokens": 2, "ttft_s": 1.0, "request_id": "r-0", "decisions": [switch]}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line) + "\n")
    said = CliRunner().invoke(app, ["why", str(path), "--top", "0"], env={"COLUMNS": "200"}).output
    assert f"before r-0: {text}" in said
    figures = json.loads(CliRunner().invoke(app, ["why", str(path), "--json", "-"]).output)
    assert figures["switches"] == [f"before r-0: {text}"]


@pytest.mark.parametrize("content", ['{"input_tokens": "x"}\n', "not json\n"])
def test_error_names_a_line_that_is_not_a_request(tmp_path: Path, content: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"input_tokens": 1, "output_tokens": 1}\n' + content)
    said = CliRunner().invoke(app, ["why", str(path)])
    assert said.exit_code == 1
    assert "line 2" in said.output


def test_records_and_their_decisions_are_bounded() -> None:
    records = RequestRecords(most=3)
    for number in range(5):
        request = Request(RequestId(f"r{number}-abc-0"), [1, 2], SamplingParams(4), 0.0, tenant="t")
        timings = RequestTimings(0.0)
        for at in range(2 * MOST_DECISIONS):
            timings.apply(Decided(request.request_id, float(at), Mechanism.ORDER, 1.0, "x"))
        records.begin(request, timings)
    assert [bool(records.find(f"r{number}", "t".__eq__)) for number in range(5)] == [False, False, True, True, True]
    (record,) = records.find("r4", "t".__eq__)
    shown = record.as_json()
    assert len(shown["decisions"]) == MOST_DECISIONS
    assert shown["saved_s"] == {"order": 2 * MOST_DECISIONS}
    assert shown["status"] == "running"
