"""Adapters replaced, unloaded and loaded again under traffic, over HTTP and a real engine process.

Every version says something else to the same prompt, so an answer tells which version gave it, and KV
of another version in its blocks would show.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.api.app import create_app, create_service
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.client.client import EngineClient, RequestHandle
from lorikeet.config import AdapterSettings
from lorikeet.core.chat_template import ChatTemplate
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.provenance import Provenance
from lorikeet.core.request import Request
from lorikeet.serving.served_models import ServedModels
from tests.support.fakes import byte_level_tokenizer
from tests.support.live import (
    CONTEXT_TOKENS,
    VOCAB,
    answer_alone,
    engine_process,
    greedy,
    is_idle,
    live_settings,
    make_adapter,
    make_model,
    prompt,
)
from tests.support.quick_server import serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow

PROMPT = prompt(48)
TOKENS = 24
BASE_DIGEST = "ba5e" * 16
CONTENTS = ("red", "green", "blue")

Answers = dict[AdapterDigest | None, tuple[int, ...]]


@dataclass
class World:
    """A server, and what every version would say alone.

    Attributes:
        http: asks it.
        client: its engine.
        catalog: its adapters.
        folder: sources of adapters below ``sources``, the store below ``store``.
        alone: answers by version.
        digests: versions by content.
        handles: every request that reached the engine, by its ``X-Request-Id``.
        told: the weights of each token that an answer named, by the same id.
    """

    http: httpx.AsyncClient
    client: EngineClient
    catalog: AdapterCatalog
    folder: Path
    alone: Answers
    digests: dict[str, AdapterDigest]
    handles: dict[str, RequestHandle] = field(default_factory=dict)
    told: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    async def ask(self, name: str, request_id: str, tokens: int = TOKENS) -> int:
        """Ask and return the status."""
        body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body["return_weight_versions"] = True
        reply = await self.http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
        if reply.status_code == 200:
            self.told[request_id] = reply.json()["choices"][0]["weight_versions"]
        return reply.status_code

    async def load(self, name: str, content: str, *, replace: bool) -> int:
        source = str(self.folder / "sources" / content)
        reply = await self.http.post("/v1/adapters", json={"name": name, "source": source, "replace": replace})
        return reply.status_code

    async def unload(self, name: str) -> int:
        return (await self.http.delete(f"/v1/adapters/{name}")).status_code

    def resident(self) -> set[AdapterDigest]:
        """Versions on the device."""
        return set() if self.client.stats is None else set(self.client.stats.resident_adapters)

    def begun(self, request_ids: list[str]) -> bool:
        """Whether all of them have a token."""
        return all(name in self.handles and self.handles[name].token_ids for name in request_ids)

    def check(self, request_id: str, content: str | None = None) -> None:
        """Compare a whole answer with what its version says alone."""
        handle = self.handles[request_id]
        if content is not None:
            assert handle.request.digest == self.digests[content], f"{request_id} ran under another version"
        assert tuple(handle.token_ids[:TOKENS]) == self.alone[handle.request.digest], request_id
        version = Provenance(BASE_DIGEST, handle.request.digest or "").fingerprint
        assert self.told[request_id] == [{"version": version, "start": 0, "end": len(handle.token_ids)}]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers, dict[str, AdapterDigest]]:
    """A model, adapters for it, and the answers of each alone."""
    folder = tmp_path_factory.mktemp("contents")
    model = make_model(folder / "base")
    refs = {name: make_adapter(folder / "sources" / name, model, seed) for seed, name in enumerate(CONTENTS)}
    alone = {
        None if ref is None else ref.digest: tuple(answer_alone(model, greedy("alone", PROMPT, TOKENS, ref)))
        for ref in (None, *refs.values())
    }
    assert len(set(alone.values())) == 1 + len(CONTENTS), "every version says something else"
    return folder, alone, {name: ref.digest for name, ref in refs.items()}


@pytest.fixture
async def world(
    contents: tuple[Path, Answers, dict[str, AdapterDigest]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    folder, alone, digests = contents
    shutil.copytree(folder / "sources", tmp_path / "sources")
    adapters = AdapterSettings(adapter_dir=str(tmp_path / "sources"), store_dir=str(tmp_path / "store"))
    settings = msgspec.structs.replace(live_settings(folder / "base"), adapters=adapters)
    async with engine_process(settings) as client:
        catalog = AdapterCatalog(adapters, "base", client.engine_info.geometry, reserved_names=("base",))
        models = ServedModels(("base",), (), "base", catalog, CONTEXT_TOKENS, BASE_DIGEST)
        texts = TextProcessor(byte_level_tokenizer(), ChatTemplate("", {}))
        chats = AdapterChats(ChatSettings(texts, ModelLimits(CONTEXT_TOKENS, VOCAB)))
        service = create_service(settings, client, catalog, chats, models)
        config = uvicorn.Config(create_app(service), lifespan="off", log_level="error")
        async with serving(config) as url, httpx.AsyncClient(base_url=url, timeout=120) as http:
            made = World(http, client, catalog, tmp_path, alone, digests)
            submit = client.submit

            def recorded(request: Request) -> RequestHandle:
                handle = submit(request)
                made.handles[request.request_id.rsplit("-", 2)[0]] = handle
                return handle

            monkeypatch.setattr(client, "submit", recorded)
            yield made
        catalog.close()


async def test_replaced_name_serves_old_requests_by_the_old_version_and_new_by_new(
    world: World,
) -> None:
    source = world.folder / "sources" / "changing"
    shutil.copytree(world.folder / "sources" / CONTENTS[0], source)
    assert await world.load("name", "changing", replace=False) == 201
    turns = count()
    replaced_in_mid_traffic = 0
    while replaced_in_mid_traffic < 4:  # a test that stalls may find the engine done: such a turn does not count
        turn = next(turns)
        content = CONTENTS[turn % 3]
        successor = CONTENTS[(turn + 1) % 3]
        running = [asyncio.create_task(world.ask("name", f"old-{turn}-{i}", 200)) for i in range(3)]
        running.append(asyncio.create_task(world.ask("base", f"base-{turn}", 200)))
        old = [*(f"old-{turn}-{i}" for i in range(3)), f"base-{turn}"]
        await until(partial(world.begun, old), "every old request has begun")
        shutil.rmtree(source)
        shutil.copytree(world.folder / "sources" / successor, source)
        assert await world.load("name", "changing", replace=True) == 201
        replaced_in_mid_traffic += not any(task.done() for task in running)
        assert await asyncio.gather(*(world.ask("name", f"new-{turn}-{i}") for i in range(3))) == [200] * 3
        for i in range(3):
            world.check(f"new-{turn}-{i}", successor)
        assert await asyncio.gather(*running) == [200] * 4
        for i in range(3):
            world.check(f"old-{turn}-{i}", content)
        world.check(f"base-{turn}")
        await until(lambda: is_idle(world.client.stats), "the engine holds nothing")
        await until(
            lambda successor=successor: world.resident() == {world.digests[successor]},
            "only the new version is resident",
        )
    assert world.client.stats is not None
    assert world.client.stats.prefix_hits_tokens > 0


async def test_racing_unloads_and_reloads_give_an_answer_or_a_clean_refusal(world: World) -> None:
    chance = random.Random(4)
    names = ("one", "two")
    asking = True
    statuses: dict[str, set[int]] = {"ask": set(), "load": set(), "unload": set()}
    answered = set[str]()
    hung_up = set[str]()

    async def ask(worker: int) -> None:
        for turn in range(25):
            request_id = f"{worker}-{turn}"
            name = chance.choice((*names, "base"))
            try:
                async with asyncio.timeout(chance.choice((0.002, 0.02, None, None))):
                    status = await world.ask(name, request_id)
            except TimeoutError:
                hung_up.add(request_id)
                continue
            statuses["ask"].add(status)
            assert status == 200 or name != "base"
            if status == 200:
                world.check(request_id)
                answered.add(request_id)

    async def load() -> None:
        while asking:
            replace = chance.random() < 0.5
            statuses["load"].add(await world.load(chance.choice(names), chance.choice(CONTENTS), replace=replace))

    async def unload() -> None:
        while asking:
            statuses["unload"].add(await world.unload(chance.choice(names)))

    changing = [asyncio.create_task(work) for work in (load(), load(), unload(), unload())]
    await asyncio.gather(*map(ask, range(6)))
    asking = False
    await asyncio.gather(*changing)

    assert statuses["ask"] <= {200, 404}
    assert statuses["load"] <= {200, 201, 400, 409}, "200: the name has this content; 400: other content, no replace"
    assert statuses["unload"] <= {200, 404, 409}
    assert 201 in statuses["load"], "nothing was loaded, so nothing raced"
    assert 200 in statuses["unload"], "nothing was unloaded, so nothing raced"
    assert hung_up, "nobody hung up, so nothing raced"
    seen = {world.handles[request_id].request.digest for request_id in answered}
    assert len(seen) > 2, "adapters were answered, too"
    await until(lambda: is_idle(world.client.stats), "the engine holds nothing")
    for name in names:
        await world.load(name, "red", replace=True)
        assert await world.ask(name, f"last-{name}") == 200
        world.check(f"last-{name}", "red")
    await until(lambda: world.resident() == {world.digests["red"]}, "only the red version is resident")
    for name in names:
        assert await world.unload(name) == 200
    await until(
        lambda: is_idle(world.client.stats) and not world.resident(), "the engine holds nothing, adapters included"
    )
    versions = world.folder / "store" / "versions"
    await until(lambda: not list(versions.iterdir()), "no version's folder is left")
