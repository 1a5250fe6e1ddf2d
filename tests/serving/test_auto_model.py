"""The model ``auto``: the server chooses the adapter by the prompt, over HTTP."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorikeet.adapters.registry import sqlite_url
from lorikeet.cli.app import app
from lorikeet.observe.request_log import RequestLog
from lorikeet.tenants.keys import OPERATOR, KeySettings
from lorikeet.tenants.tenants import Tenants
from tests.support.api_server import TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, COMPLETIONS, bearer, body
from tests.support.fakes import write_adapter

pytestmark = pytest.mark.slow

EXAMPLES = {
    "formal": ["Rewrite formally: hey there", "Make this letter formal: gimme the report", "More formal: thx a lot"],
    "pirate": ["Talk like a pirate: good morning", "Pirate speech about a ship", "Answer like a pirate: who are you?"],
}
FORMAL = "Make it more formal: see ya at the meeting"
PIRATE = "Say like a pirate: the ship is late"
NEITHER = "What is 12 times 12?"


def toml(examples: list[str]) -> str:
    return f"examples = {json.dumps(examples)}\n"


@pytest.fixture
def examples(sources: Path) -> None:
    for name, each in EXAMPLES.items():
        (sources / name / "lorikeet.toml").write_text(toml(each))


@asynccontextmanager
async def chooses(start: Start, **settings: Any) -> AsyncIterator[Running]:
    async with start(auto_model=True, max_model_len=4096, **settings) as server:
        for name in (*EXAMPLES, "json"):
            server.service.catalog.register(name, str(server.sources / name))
        yield server


@pytest.fixture
async def server(start: Start, examples: None) -> AsyncIterator[Running]:
    """A server that chooses between two adapters with examples, and has one without."""
    async with chooses(start) as running:
        yield running


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def chosen(server: Running, url: str, **fields: Any) -> str:
    reply = await server.http.post(url, json={"model": "auto", **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["model"])


async def test_every_route_of_texts_chooses_by_the_prompt(server: Running) -> None:
    for text, model in ((FORMAL, "formal"), (PIRATE, "pirate"), (NEITHER, "base")):
        for _ in range(2):
            assert await chosen(server, CHAT, messages=user(text)) == model
        assert await chosen(server, COMPLETIONS, prompt=text) == model
        assert await chosen(server, COMPLETIONS, prompt=[text, "other"]) == model
        assert await chosen(server, COMPLETIONS, prompt=TOKENIZER.encode(text).ids) == model
        assert await chosen(server, "/v1/responses", input=text) == model
        assert await chosen(server, "/v1/messages", messages=user(text), max_tokens=4) == model
        parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        assert await chosen(server, CHAT, messages=parts) == model
        last = server.engine.submitted[-1].adapter
        assert (last.name if last is not None else "base") == model
    counted = await server.http.post("/v1/messages/count_tokens", json={"model": "auto", "messages": user(PIRATE)})
    assert counted.json()["input_tokens"] > 0
    assert (await server.http.post("/tokenize", json={"model": "auto", "prompt": PIRATE})).status_code == 200


async def test_the_last_message_of_the_user_counts(server: Running) -> None:
    system = {"role": "system", "content": EXAMPLES["formal"][0]}
    turns = [system, *user(FORMAL), {"role": "assistant", "content": "See you."}, *user(PIRATE)]
    assert await chosen(server, CHAT, messages=turns) == "pirate"
    assert await chosen(server, CHAT, messages=[*turns, {"role": "assistant", "content": "Arr"}]) == "pirate"
    assert await chosen(server, CHAT, messages=[system]) == "base"


@pytest.mark.parametrize(("text", "model"), [(FORMAL, "formal"), (PIRATE, "pirate"), (NEITHER, "base")])
async def test_large_bodies_get_the_same_choice(server: Running, text: str, model: str) -> None:
    large = {"user": "x" * 70_000}
    assert await chosen(server, CHAT, messages=user(text), **large) == model
    assert await chosen(server, COMPLETIONS, prompt=text, **large) == model
    assert await chosen(server, COMPLETIONS, prompt=TOKENIZER.encode(text).ids, **large) == model
    assert await chosen(server, "/v1/responses", input=text, **large) == model
    metadata = {"user_id": "x" * 70_000}
    assert await chosen(server, "/v1/messages", messages=user(text), max_tokens=4, metadata=metadata) == model


async def test_streams_name_the_choice(server: Running) -> None:
    asked = {"model": "auto", "messages": user(PIRATE), "stream": True}
    reply = await server.http.post(CHAT, json=asked)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    assert {json.loads(event)["model"] for event in events} == {"pirate"}


async def test_auto_is_unknown_unless_the_operator_allows_it(start: Start, examples: None) -> None:
    async with start() as server:
        assert (await server.http.post(CHAT, json=body(model="auto"))).status_code == 404
        assert "auto" not in {card["id"] for card in (await server.http.get("/v1/models")).json()["data"]}
    async with chooses(start) as server:
        assert "auto" in {card["id"] for card in (await server.http.get("/v1/models")).json()["data"]}
        server.service.catalog.register("auto", str(server.sources / "json"))
        assert await chosen(server, CHAT, messages=user(PIRATE)) == "auto"


async def test_a_route_without_a_prompt_asks_for_a_name(server: Running) -> None:
    reply = await server.http.post("/v1/embeddings", json={"model": "auto", "input": PIRATE})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "model"


async def test_new_removed_and_changed_adapters_count_at_once(server: Running) -> None:
    assert await chosen(server, CHAT, messages=user(PIRATE)) == "pirate"
    await server.http.delete("/v1/adapters/pirate")
    assert await chosen(server, CHAT, messages=user(PIRATE)) == "base"
    added = {"name": "captain", "source": str(server.sources / "json"), "examples": EXAMPLES["pirate"]}
    reply = await server.http.post("/v1/adapters", json=added)
    assert (reply.status_code, reply.json()["chat"]["examples"]) == (201, 3), reply.text
    assert await chosen(server, CHAT, messages=user(PIRATE)) == "captain"
    await server.http.post("/v1/adapters", json={"name": "buccaneer", "alias_of": "captain"})
    assert await chosen(server, CHAT, messages=user(PIRATE)) in {"captain", "buccaneer"}


@pytest.mark.parametrize(
    "text",
    [
        "examples = 1",
        'examples = ["one"]',
        'examples = ["", "two"]',
        f'examples = ["{"x" * 2001}", "two"]',
        toml(["x"] * 65),
    ],
)
async def test_examples_that_are_not_valid_are_refused(server: Running, text: str) -> None:
    folder = write_adapter(server.sources / "wrong", seed=9)
    (folder / "lorikeet.toml").write_text(text)
    reply = await server.http.post("/v1/adapters", json={"name": "wrong", "source": str(folder)})
    assert reply.status_code == 400
    assert "lorikeet.toml" in reply.text
    assert "examples" in reply.text
    given = {"name": "wrong", "source": str(server.sources / "json"), "examples": ["one"]}
    reply = await server.http.post("/v1/adapters", json=given)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "examples")


async def test_examples_are_no_chat_settings_of_requests(server: Running) -> None:
    target = await server.service.resolver.resolve("formal", access=OPERATOR)
    assert target.chat.examples == ()


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Tenants]:
    (tmp_path / "store").mkdir()
    opened = Tenants(sqlite_url(tmp_path / "store" / "registry.sqlite3"), "base")
    yield opened
    opened.close()


async def test_a_key_never_gets_an_adapter_that_it_may_not_use(start: Start, examples: None, tenants: Tenants) -> None:
    _, some = tenants.create("some", KeySettings(use=("base", "formal")), "boss")
    _, none = tenants.create("none", KeySettings(use=("formal",), see=("pirate", "base")), "boss")

    async def ask(server: Running, secret: str, text: str) -> tuple[int, str]:
        reply = await server.http.post(CHAT, json=body(model="auto", messages=user(text)), headers=bearer(secret))
        return reply.status_code, reply.json().get("model", "")

    async with chooses(start, tenants=tenants, admin_keys=("boss",)) as server:
        for text in (*EXAMPLES["pirate"], PIRATE, NEITHER):
            assert await ask(server, some, text) == (200, "base")
            assert await ask(server, none, text) == (403, "")
        for secret in (some, none, "boss"):
            assert await ask(server, secret, FORMAL) == (200, "formal")
        assert await ask(server, "boss", PIRATE) == (200, "pirate")
        used = {request.adapter.name for request in server.engine.submitted if request.adapter is not None}
        assert used == {"formal", "pirate"}


async def test_metrics_log_and_why_show_the_choice(start: Start, examples: None, tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", max_bytes=2**20, keep=1)
    async with chooses(start, request_log=log) as server:
        for text in (PIRATE, PIRATE, NEITHER):
            reply = await server.http.post(CHAT, json=body(model="auto", messages=user(text)))
        await server.http.post(CHAT, json=body(model="pirate"))
        page = (await server.http.get("/metrics")).text
        found = (await server.http.get(f"/v1/requests/{reply.json()['id']}")).json()["sequences"][0]
    log.close()
    for name, number in (("pirate", 2), ("base", 1)):
        assert f'lorikeet:auto_model_requests_total{{chosen="{name}",engine="0",model_name="base"}} {number}.0' in page
    assert found["chosen"].startswith("none: the nearest is ")
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line.get("chosen", "").split(":")[0] for line in lines] == ["pirate", "pirate", "none", ""]
    shown = CliRunner().invoke(app, ["why", str(tmp_path / "requests.jsonl")], env={"COLUMNS": "250"})
    assert "auto: pirate: similarity" in shown.output, shown.output
