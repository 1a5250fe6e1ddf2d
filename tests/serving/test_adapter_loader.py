"""Adapters that are loaded when a request first names them, versions, aliases, pins."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorikeet.adapters import sources as adapter_sources
from lorikeet.config import AdapterDirMode, AdapterSettings
from lorikeet.core.request import Request
from lorikeet.http.errors import ApiError, model_not_found
from lorikeet.serving.adapter_life import follow_registry
from lorikeet.serving.adapter_loader import AdapterLoader
from lorikeet.tenants.keys import KeySettings
from lorikeet.tenants.tenants import Tenants
from tests.chat.templates import OWN_TEMPLATE
from tests.support.api_server import END, TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.fakes import write_adapter
from tests.support.scripted import Bench
from tests.support.waiting import until

SERVED = {"adapter_dir_mode": AdapterDirMode.SERVE}
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.slow
async def test_every_adapter_of_a_folder_is_served_and_none_is_opened_before_its_first_use(
    start: Start, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("formal", "json"):
        for at in range(149):
            link = sources / f"{name}-{at}"
            link.mkdir()
            for file in ("adapter_config.json", WEIGHTS):
                (link / file).hardlink_to(sources / name / file)
    (sources / "no adapter").mkdir()
    opened: list[str] = []
    open_local = adapter_sources._open_local

    def recorded(folder: Path, name: str, allowed: Path | None) -> Any:
        opened.append(f"{folder.name}/{name}")
        return open_local(folder, name, allowed)

    monkeypatch.setattr(adapter_sources, "_open_local", recorded)
    async with start(adapters=SERVED) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert len(cards) == 1 + 3 + 298
        assert all(card["parent"] == "base" for card in cards[1:])
        assert (await server.http.get("/v1/models/json-7")).json()["id"] == "json-7"
        assert opened == []

        replies = await asyncio.gather(*(server.http.post(CHAT, json=body(model="json-7")) for _ in range(50)))
        assert {reply.status_code for reply in replies} == {200}
        assert opened == ["json-7/adapter_config.json", f"json-7/{WEIGHTS}"], "one load for many"
        assert (await server.http.post(CHAT, json=body(model="base:json-8"))).status_code == 200
        first, *_, last = server.engine.submitted
        assert first.digest == last.digest, "the same content under two names is one version"
        assert len(server.engine.known) == 1
        assert len((await server.http.get("/v1/models")).json()["data"]) == len(cards)

        spaced = json.dumps(body(model="formal-3")).encode() + b" " * 70_000
        reply = await server.http.post(CHAT, content=spaced, headers={"Content-Type": "application/json"})
        assert reply.status_code == 200
        unknown = await server.http.post(CHAT, json=body(model="nobody"))
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    async with start(adapters=SERVED) as server:
        assert len(server.service.catalog) == 0, "what the folder has is not registered for good"


@pytest.mark.slow
async def test_adapter_loaded_by_one_server_is_served_by_another_with_its_registry(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.serving.adapter_life.FOLLOW_S", 0.01)
    async with start() as first, start() as second, AsyncExitStack() as stack:
        for each in (first, second):
            stack.callback(asyncio.create_task(follow_registry(each.service)).cancel)

        async def is_known() -> bool:
            return (await second.http.post(CHAT, json=body(model="x"))).status_code == 200

        async def versions() -> list[str]:
            models = [(await each.http.get("/v1/adapters/x")).json() for each in (first, second)]
            return [each.get("digest", "") for each in models]

        content = {"lora_name": "x", "lora_path": str(first.sources / "formal")}
        assert (await first.http.post("/v1/load_lora_adapter", json=content)).status_code == 200
        await until(is_known, "the other server has seen it")
        before = second.engine.submitted[-1].digest
        content |= {"lora_path": str(first.sources / "json"), "load_inplace": True}
        assert (await second.http.post("/v1/load_lora_adapter", json=content)).status_code == 200
        await until(lambda: first.engine.dropped == [before], "the other server has dropped the old version")
        assert len(set(await versions())) == 1
        assert (await first.http.delete("/v1/adapters/x")).status_code == 200
        await until(lambda: "x" not in second.service.catalog, "the other server has forgotten it")


@pytest.mark.slow
async def test_adapter_reported_as_loaded_is_served(start: Start) -> None:
    """Nobody follows the registry meanwhile: the server reads it before it says so."""
    async with start() as first, start() as second:
        content = {"lora_name": "x", "lora_path": str(first.sources / "formal")}
        assert (await first.http.post("/v1/load_lora_adapter", json=content)).status_code == 200
        again = await second.http.post("/v1/load_lora_adapter", json=content)
        assert again.status_code == 200, "a controller repeats its loads"
        other = await second.http.post(
            "/v1/load_lora_adapter", json=content | {"lora_path": str(first.sources / "json")}
        )
        assert other.status_code == 400
        assert "already been loaded" in other.text
        assert (await second.http.post(CHAT, json=body(model="x"))).status_code == 200
        assert (await first.http.delete("/v1/adapters/x")).status_code == 200
        assert (await second.http.post("/v1/load_lora_adapter", json=content)).status_code == 200, "it is gone"


class Sources:
    """Loads what it has, and counts."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []
        self.removed: list[str] = []
        self.now_s = 0.0
        self.open = asyncio.Event()
        self.open.set()

    def loader(self, **settings: Any) -> AdapterLoader:
        return AdapterLoader(AdapterSettings(**settings), self.load, self.unload, lambda: self.now_s)

    async def load(self, name: str, source: str) -> None:
        self.asked.append(source)
        await self.open.wait()
        if name == "broken":
            raise ApiError(400, "not valid")
        if source not in self.names:
            raise model_not_found(name)

    async def unload(self, name: str) -> None:
        self.removed.append(name)


async def refused(loader: AdapterLoader, name: str) -> int:
    with pytest.raises(ApiError) as error:
        await loader.load(name)
    return error.value.status


async def test_names_are_looked_for_below_each_resolver_in_order() -> None:
    found = Sources("s3://bucket/team/pirate")
    loader = found.loader(resolvers=("hf://org/", "s3://bucket/team"))
    await loader.load("pirate")
    assert found.asked == ["hf://org/pirate", "s3://bucket/team/pirate"]


@pytest.mark.parametrize("name", ["../x", "a//b", "/etc", "", "x" * 200, "pirate@main", "hf://other/pirate"])
async def test_invalid_name_is_not_looked_up(name: str) -> None:
    found = Sources()
    assert await refused(found.loader(resolvers=("hf://org/",)), name) == 404
    assert found.asked == []


async def test_a_name_that_cannot_be_loaded_is_not_looked_for_again_for_a_while() -> None:
    found = Sources()
    loader = found.loader(resolvers=("hf://org/",))
    statuses = [await refused(loader, name) for name in ("nobody", "nobody", "broken", "broken")]
    assert statuses == [404, 404, 400, 400]
    assert found.asked == ["hf://org/nobody", "hf://org/broken"]
    found.now_s = 31.0
    found.names = ("hf://org/nobody",)
    await loader.load("nobody")


async def test_a_client_that_hangs_up_does_not_end_the_load_for_others() -> None:
    found = Sources("hf://org/pirate")
    found.open.clear()
    loader = found.loader(resolvers=("hf://org/",))
    first, second = (asyncio.create_task(loader.load("pirate")) for _ in range(2))
    await until(lambda: found.asked, "it is being loaded")
    first.cancel()
    found.open.set()
    await second
    assert found.asked == ["hf://org/pirate"]


async def test_an_adapter_that_is_not_used_for_its_time_is_removed_unless_it_is_pinned() -> None:
    found = Sources("hf://org/a", "hf://org/b")
    loader = found.loader(resolvers=("hf://org/",), ttl_s=0.01)
    await loader.load("a")
    await loader.load("b")
    loader.pin("b", True)
    found.now_s = 0.005
    loader.use("a")
    found.now_s = 0.012
    loader.use("b")
    await asyncio.sleep(0)
    assert found.removed == []
    found.now_s = 1.0
    await until(lambda: found.removed, "it is removed")
    assert found.removed == ["a"]
    await loader.close()


async def add(server: Running, name: str, **fields: Any) -> Any:
    return await server.http.post("/v1/adapters", json={"name": name, **fields})


@pytest.mark.slow
async def test_ten_names_of_one_adapter_are_one_version(start: Start) -> None:
    async with start() as server:
        await add(server, "pirate", source="pirate", system_prompt="Arr.")
        for at in range(9):
            reply = await add(server, f"alias-{at}", alias_of="pirate")
            assert reply.status_code == 201
            assert reply.json()["chat"] == {"system_prompt": "Arr."}
        assert len(server.engine.known) == 1
        assert len(list((server.sources.parent / "store" / "versions").iterdir())) == 1
        await server.http.delete("/v1/adapters/pirate")
        assert (await server.http.post(CHAT, json=body(model="alias-3"))).status_code == 200
        assert (await add(server, "alias-3", alias_of="alias-4")).status_code == 200, "it is the same version"
        assert (await add(server, "other", alias_of="pirate")).status_code == 404
        assert (await add(server, "other", alias_of="base")).status_code == 400
        assert (await add(server, "other")).status_code == 400


@pytest.mark.slow
async def test_a_version_can_be_named_and_another_is_not_found(start: Start) -> None:
    async with start(adapters=SERVED) as server:
        card = (await server.http.patch("/v1/adapters/pirate", json={"pinned": True, "warm": True})).json()
        assert card["pinned"] is True
        (warmed,) = server.engine.submitted
        assert (warmed.digest, warmed.sampling.max_tokens) == (card["digest"], 1)
        version = f"pirate@{card['digest'][:12]}"
        assert (await server.http.post(CHAT, json=body(model=version))).json()["model"] == "pirate"
        write_adapter(server.sources / "pirate", seed=99)
        await add(server, "pirate", source="pirate", replace=True)
        assert (await server.http.post(CHAT, json=body(model=version))).status_code == 404
        assert (await server.http.post(CHAT, json=body(model="pirate"))).status_code == 200


async def test_an_adapter_that_is_warmed_is_answered_with_its_place_whose_gauges_come_later(start: Start) -> None:
    async with start(adapters=SERVED) as server:
        resident: dict[str | None, int] = {}
        server.engine.stats = msgspec.structs.replace(Bench().engine.stats(), resident_adapters=resident)

        def answer(request: Request) -> list[int]:
            asyncio.get_running_loop().call_later(0.05, resident.setdefault, request.digest, 3)
            return [END]

        server.engine.script = answer
        card = (await server.http.patch("/v1/adapters/pirate", json={"warm": True})).json()
        assert (card["level"], card["device_bytes"]) == ("gpu", 3 * 4096)


@pytest.mark.slow
async def test_no_answer_mixes_versions_while_an_adapter_is_replaced(start: Start) -> None:
    def files(folder: Path, seed: int) -> None:
        write_adapter(folder, seed=seed)
        (folder / "chat_template.jinja").write_text(f"{seed}{OWN_TEMPLATE}" if seed % 2 else "")
        (folder / "lorikeet.toml").write_text(f"[generation]\ntop_k = {seed + 1}")

    async with start() as server:
        digests: dict[str, int] = {}

        async def replace(seed: int) -> None:
            files(server.sources / "own", seed)
            card = (await add(server, "own", source="own", replace=True)).json()
            digests[card["digest"]] = seed

        await replace(0)
        done = False

        async def ask() -> Sequence[int]:
            statuses = []
            while not done:
                statuses.append((await server.http.post(CHAT, json=body(model="own"))).status_code)
            return statuses

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        for seed in range(1, 6):
            await replace(seed)
            newest = len(digests)
            await until(lambda: newest == len({each.digest for each in server.engine.submitted}), "it is used")  # noqa: B023
        done = True
        statuses = [status for each in await asyncio.gather(*asking) for status in each]
        assert set(statuses) == {200}
        plain = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        for request in server.engine.submitted:
            assert request.digest is not None
            seed = digests[request.digest]
            prompt = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
            assert (prompt, request.sampling.top_k) == (f"{seed}[user]hello" if seed % 2 else plain, seed + 1)
        await until(lambda: len(server.engine.dropped) == 5, "old versions are dropped")


@pytest.mark.slow
async def test_pins_reach_the_engine_follow_the_name_and_are_bounded(start: Start) -> None:
    async with start() as server:
        engine = server.engine
        first = (await add(server, "held", source="pirate")).json()
        assert first["pinned"] is False
        await add(server, "other", source="json")
        assert (await server.http.patch("/v1/adapters/held", json={"pinned": True})).json()["pinned"] is True
        assert engine.pinned == (first["digest"],)
        write_adapter(server.sources / "pirate", seed=98)
        second = (await add(server, "held", source="pirate", replace=True)).json()
        assert engine.pinned == (second["digest"],)
        assert second["pinned"] is True
        engine.engine_info = msgspec.structs.replace(engine.engine_info, block_bytes=2048, total_blocks=3)
        refused = await server.http.patch("/v1/adapters/other", json={"pinned": True})
        assert refused.status_code == 409
        assert "pinned adapters would take" in refused.json()["error"]["message"]
        assert engine.pinned == (second["digest"],)
        held = {"lora_name": "third", "lora_path": str(server.sources / "json"), "pinned": True}
        assert (await server.http.post("/load_lora_adapter", json=held)).status_code == 400
        assert (await server.http.get("/v1/adapters/third")).status_code == 404
        await server.http.delete("/v1/adapters/held")
        assert engine.pinned == ()


async def test_folders_that_are_left_out_are_listed_with_their_reason(start: Start, sources: Path) -> None:
    write_adapter(sources / "my adapter", seed=5)
    write_adapter(sources / "formal@0123abcd", seed=6)
    (sources / "old format").mkdir()
    (sources / "old format" / "adapter_model.bin").write_bytes(b"")
    (sources / "notes").mkdir()
    (sources / "README.md").write_text("adapters")
    async with start(adapters=SERVED) as server:
        listed = (await server.http.get("/v1/adapters")).json()
        assert [card["name"] for card in listed["data"]] == ["formal", "json", "pirate"]
        reasons = {each["name"]: each["reason"] for each in listed["left_out"]}
        assert reasons.keys() == {"my adapter", "formal@0123abcd", "old format"}
        assert "letters, digits" in reasons["my adapter"]
        assert "a version of 'formal'" in reasons["formal@0123abcd"]
        assert "adapter_config.json" in reasons["old format"]
        names = {card["id"] for card in (await server.http.get("/v1/models")).json()["data"]}
        assert names == {"base", "formal", "json", "pirate"}
        refused = await server.http.post(CHAT, json=body(model="my adapter"))
        assert refused.status_code == 400
        assert "letters, digits" in refused.json()["error"]["message"]
        second = (await server.http.get("/v1/adapters", params={"cursor": "formal"})).json()
        assert "left_out" not in second


@pytest.mark.parametrize("broken", ["no weights", "no json"])
async def test_error_of_a_listed_folder_is_the_readers_reason(start: Start, sources: Path, broken: str) -> None:
    if broken == "no weights":
        (sources / "pirate" / WEIGHTS).unlink()
    else:
        (sources / "pirate" / "adapter_config.json").write_text("{")
    async with start(adapters=SERVED) as server:
        assert "pirate" in {card["id"] for card in (await server.http.get("/v1/models")).json()["data"]}
        refused = await server.http.post(CHAT, json=body(model="pirate"))
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert (WEIGHTS if broken == "no weights" else "adapter_config.json") in message
        cards = {card["name"]: card for card in (await server.http.get("/v1/adapters")).json()["data"]}
        assert cards["pirate"]["error"] == message
        assert "error" not in cards["formal"]


async def test_delete_of_a_folders_adapter_names_the_folder_that_serves_it(start: Start) -> None:
    async with start(adapters=SERVED) as server:
        refused = await server.http.delete("/v1/adapters/pirate")
        assert refused.status_code == 404
        assert "--adapter-dir" in refused.json()["error"]["message"]
        assert (await server.http.post(CHAT, json=body(model="pirate"))).status_code == 200
        removed = await server.http.delete("/v1/adapters/pirate")
        assert removed.status_code == 200
        assert "loads it again" in removed.json()["warnings"][0]
        assert (await server.http.delete("/v1/adapters/nobody")).status_code == 404


async def test_tenant_sees_no_folder_that_is_left_out(start: Start, sources: Path, tmp_path: Path) -> None:
    write_adapter(sources / "my adapter", seed=5)
    tenants = Tenants(f"sqlite:///{tmp_path / 'keys.sqlite'}", "base")
    _, secret = tenants.create("one", KeySettings(), "test")
    async with start(adapters=SERVED, tenants=tenants, admin_keys=("admin",)) as server:
        listed = await server.http.get("/v1/adapters", headers={"Authorization": f"Bearer {secret}"})
        assert listed.status_code == 200, listed.text
        assert "left_out" not in listed.json()
        assert "left_out" in (await server.http.get("/v1/adapters", headers={"Authorization": "Bearer admin"})).json()
    tenants.close()
