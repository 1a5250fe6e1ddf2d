"""Loading and unloading adapters over HTTP, in four dialects."""

import asyncio
import errno
import json
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog
from anyio import to_thread

from lorikeet.adapters.catalog import RegisteredAdapter
from lorikeet.config import AdapterDirMode
from lorikeet.core.ids import AdapterDigest
from lorikeet.serving.adapter_changes import LOADS_AT_ONCE
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.fakes import write_adapter
from tests.support.waiting import until

pytestmark = pytest.mark.slow


async def load(server: Running, name: str, source: str, **fields: Any) -> tuple[int, str]:
    content = {"lora_name": name, "lora_path": str(server.sources / source), **fields}
    reply = await server.http.post("/v1/load_lora_adapter", json=content)
    return reply.status_code, reply.text


async def test_vllm_loads_and_unloads(server: Running) -> None:
    assert await load(server, "pirate", "pirate") == (200, "Success: LoRA adapter 'pirate' added successfully.")
    assert (await server.http.post(CHAT, json=body(model="pirate"))).status_code == 200
    reply = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'pirate' removed successfully.")
    assert (await server.http.post(CHAT, json=body(model="pirate"))).status_code == 404
    assert server.engine.dropped == [server.engine.submitted[0].digest]


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        ({"lora_name": "x"}, 400, "InvalidUserInput"),
        ({"lora_path": "x"}, 400, "InvalidUserInput"),
        ({"lora_name": "formal", "lora_path": "pirate"}, 400, "InvalidUserInput"),
        ({"lora_name": "base", "lora_path": "formal"}, 400, "InvalidUserInput"),
        ({"lora_name": "x", "lora_path": "missing"}, 404, "NotFoundError"),
        ({"lora_name": "x", "lora_path": "../../etc"}, 400, "BadRequestError"),
        ({"lora_name": "x", "lora_path": "s3://bucket/x"}, 400, "BadRequestError"),
        ({"lora_name": 7, "lora_path": "x"}, 400, "BadRequestError"),
    ],
)
async def test_a_bad_load_is_refused_and_changes_nothing(
    server: Running, content: dict[str, Any], status: int, kind: str
) -> None:
    reply = await server.http.post("/v1/load_lora_adapter", json=content)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    assert server.service.catalog.names() == ["formal"]


async def test_error_of_a_broken_adapter_has_name_and_cause_without_path(server: Running) -> None:
    (server.sources / "pirate" / "adapter_model.safetensors").write_bytes(b"no weights")
    with structlog.testing.capture_logs() as logged:
        for path in ("pirate", "nowhere"):
            content = {"lora_name": "broken", "lora_path": str(server.sources / path)}
            for route in ("/v1/load_lora_adapter", "/load_lora_adapter"):
                reply = await server.http.post(route, json=content)
                assert reply.status_code >= 400
                text = reply.json().get("error_message") or reply.json()["error"]["message"]
                assert "adapter 'broken'" in text
                assert (
                    "adapter_model.safetensors" in text
                    or "there is no folder 'nowhere' in the server's --adapter-dir" in text
                )
                assert str(server.sources) not in text
    assert [entry["source"] for entry in logged if entry["event"] == "adapter not loaded"][-1].endswith("nowhere")


async def test_keys_that_are_ignored_are_named_in_every_dialect_and_in_the_log(server: Running) -> None:
    config = server.sources / "pirate" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"created_by": "a tool"}))
    source = str(server.sources / "pirate")
    warning = "adapter_config.json: created_by is ignored"
    with structlog.testing.capture_logs() as logged:
        own = await server.http.post("/v1/adapters", json={"name": "a", "source": source})
        vllm = await load(server, "b", source)
        sglang = await server.http.post("/load_lora_adapter", json={"lora_name": "c", "lora_path": source})
        dynamo = await server.http.post("/v1/loras", json={"lora_name": "d", "source": {"uri": source}})
    assert own.json()["warnings"] == sglang.json()["warnings"] == dynamo.json()["warnings"] == [warning]
    assert vllm == (200, f"Success: LoRA adapter 'b' added successfully.\nWarning: {warning}")
    assert [entry["adapter"] for entry in logged if entry.get("warning") == warning] == ["a", "b", "c", "d"]
    plain = await server.http.post("/v1/adapters", json={"name": "e", "source": str(server.sources / "json")})
    assert "warnings" not in plain.json()


async def test_a_config_that_is_not_utf8_is_a_400_on_every_route(server: Running) -> None:
    config = server.sources / "pirate" / "adapter_config.json"
    config.write_bytes(b'{"peft_type": "LORA", "base_model_name_or_path": "caf\xe9"}')
    source = str(server.sources / "pirate")
    replies = [
        await server.http.post("/v1/adapters", json={"name": "a", "source": source}),
        await server.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": source}),
        await server.http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": source}),
        await server.http.post("/v1/loras", json={"lora_name": "a", "source": {"uri": source}}),
    ]
    for reply in replies:
        assert reply.status_code == 400
        assert "adapter_config.json: is not UTF-8: byte 0xe9 at position 53" in reply.text


async def test_a_full_disk_is_the_servers_fault(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lorikeet.adapters.sources.os.fsync", fail)
    content = {"name": "pirate", "source": str(server.sources / "pirate")}
    reply = await server.http.post("/v1/adapters", json=content)
    assert reply.status_code == 500
    assert "No space left" in reply.json()["error"]["message"]
    assert server.service.catalog.names() == ["formal"]


async def test_unwritable_registry_is_a_server_error(server: Running) -> None:
    with sqlite3.connect(Path(server.service.adapter_settings.store_dir) / "registry.sqlite3") as registry:
        registry.execute("DROP TABLE adapters")
    registry.close()
    source = str(server.sources / "pirate")
    replies = [
        await server.http.delete("/v1/adapters/formal"),
        await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"}),
        await server.http.post("/v1/adapters", json={"name": "pirate", "source": source}),
    ]
    for reply in replies:
        assert reply.status_code == 500
        assert "the adapter registry cannot be written: no such table" in reply.json()["error"]["message"]
    sglang = await server.http.post("/unload_lora_adapter", json={"lora_name": "formal"})
    assert (sglang.status_code, sglang.json()["success"]) == (500, False)
    assert server.service.catalog.names() == ["formal"]


async def test_unloading_an_unknown_adapter_is_a_404(server: Running) -> None:
    reply = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
    assert reply.status_code == 404
    assert (await server.http.delete("/v1/adapters/nobody")).status_code == 404


async def test_loading_in_place_serves_the_new_version_and_frees_the_old(server: Running) -> None:
    await server.http.post(CHAT, json=body(model="formal"))
    write_adapter(server.sources / "formal", seed=99)
    status, text = await load(server, "formal", "formal")
    assert (status, "'load_inplace'" in text) == (400, True)
    own = await server.http.post("/v1/adapters", json={"name": "formal", "source": str(server.sources / "formal")})
    assert (own.status_code, "set 'replace' to True" in own.text) == (400, True)
    assert (await load(server, "formal", "formal", load_inplace=True))[0] == 200
    await server.http.post(CHAT, json=body(model="formal"))
    old, new = (request.digest for request in server.engine.submitted)
    assert old != new
    await until(lambda: server.engine.dropped == [old], "the old version is dropped")


@pytest.mark.parametrize("change", ["replace", "remove"])
async def test_request_keeps_the_version_that_it_named_while_its_prompt_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    reading = asyncio.Event()
    go_on = asyncio.Event()
    encode_chat = server.service.text_processor.encode_chat

    async def encode_late(*arguments: Any, **options: Any) -> list[int]:
        reading.set()
        await go_on.wait()
        return await encode_chat(*arguments, **options)

    monkeypatch.setattr(server.service.text_processor, "encode_chat", encode_late)
    old = server.service.catalog.get("formal")
    assert old is not None
    asking = asyncio.create_task(server.http.post(CHAT, json=body(model="formal")))
    await reading.wait()
    if change == "replace":
        assert (await load(server, "formal", "pirate", load_inplace=True))[0] == 200
        removing = None
    else:
        removing = asyncio.create_task(server.http.delete("/v1/adapters/formal"))
        await until(lambda: server.service.catalog.get("formal") is None, "the name is removed")
    assert server.engine.dropped == [], "a version is dropped after the requests that use it were sent"
    go_on.set()
    assert (await asking).status_code == 200
    assert [request.digest for request in server.engine.submitted] == [old.digest]
    await until(lambda: server.engine.dropped == [old.digest], "the old version is dropped")
    if removing is not None:
        assert (await removing).status_code == 200
    await until(lambda: not Path(old.folder).exists(), "its files are deleted")
    assert server.service.gate.active == 0


async def test_engine_has_exactly_the_named_versions(server: Running) -> None:
    await load(server, "pirate", "pirate")
    await load(server, "twin", "pirate")
    assert [ref.name for ref in server.engine.known.values()] == ["twin"], "one version, by its newest name"
    old = next(iter(server.engine.known))
    write_adapter(server.sources / "pirate", seed=99)
    await load(server, "pirate", "pirate", load_inplace=True)
    assert len(server.engine.known) == 2
    await server.http.delete("/v1/adapters/twin")
    assert server.engine.dropped == [old]
    await server.http.delete("/v1/adapters/pirate")
    assert server.engine.known == {}


async def test_version_replaced_during_its_load_is_not_registered_with_the_engine(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = server.service.catalog
    register = server.service.catalog.register

    def register_and_lose(name: str, source: str, **options: Any) -> RegisteredAdapter:
        registered = register(name, source, **options)
        catalog.remove(name)
        return registered

    monkeypatch.setattr(catalog, "register", register_and_lose)
    assert (await load(server, "pirate", "pirate"))[0] == 200
    assert server.engine.known == {}, "nobody would tell the engine to drop it"


async def test_concurrent_replacements_free_both_old_versions(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = server.service.catalog
    register = server.service.catalog.register
    both_have_begun = threading.Barrier(2, timeout=30)
    turn = threading.Lock()
    versions = {record.digest for record in catalog.list()}

    def register_in_turn(name: str, source: str, **options: Any) -> RegisteredAdapter:
        both_have_begun.wait()
        with turn:
            registered = register(name, source, **options)
        versions.add(registered.record.digest)
        return registered

    monkeypatch.setattr(catalog, "register", register_in_turn)
    replies = await asyncio.gather(*(load(server, "formal", name, load_inplace=True) for name in ("pirate", "json")))
    assert [status for status, _ in replies] == [200, 200]
    last = catalog.get("formal")
    assert last is not None
    await until(lambda: len(server.engine.dropped) == 2, "two versions are dropped")
    assert set(server.engine.dropped) == versions - {last.digest}


async def test_a_version_with_two_names_is_freed_with_the_second(server: Running) -> None:
    await load(server, "twin", "formal")
    record = server.service.catalog.get("twin")
    assert record is not None
    assert (await server.http.delete("/v1/adapters/formal")).json()["freed_bytes"] == 0
    assert server.engine.dropped == []
    assert (await server.http.delete("/v1/adapters/twin")).json()["freed_bytes"] == 12345
    assert server.engine.dropped == [record.digest]


async def test_an_unload_lets_running_requests_finish(server: Running) -> None:
    server.engine.open.clear()
    running = asyncio.create_task(server.http.post(CHAT, json=body(model="formal")))
    await until(lambda: len(server.engine.submitted) == 1, "one request has been submitted")
    assert (await server.http.delete("/v1/adapters/formal")).status_code == 200
    server.engine.open.set()
    assert (await running).status_code == 200


async def test_lorikeets_routes_add_list_show_and_delete(server: Running) -> None:
    source = str(server.sources / "pirate")
    added = await server.http.post("/v1/adapters", json={"name": "org/pirate", "source": source})
    assert added.status_code == 201
    card = added.json()
    assert (card["name"], card["source"], card["base"], card["rank"]) == ("org/pirate", "pirate", "base", 4)
    shown = (await server.http.get("/v1/adapters/org/pirate")).json()
    assert shown.items() >= card.items()
    assert (shown["also_named"], shown["stats"]["requests"]) == ([], 0)
    listed = (await server.http.get("/v1/adapters")).json()
    assert [entry["name"] for entry in listed["data"]] == ["formal", "org/pirate"]
    assert (listed["has_more"], listed["next_cursor"], listed["total"]) == (False, None, 2)
    deleted = (await server.http.delete("/v1/adapters/org/pirate")).json()
    assert deleted == {"name": "org/pirate", "object": "adapter", "deleted": True, "freed_bytes": 12345}
    assert (await server.http.get("/v1/adapters/org/pirate")).status_code == 404


async def test_pages_follow_the_cursor_and_survive_changes(server: Running) -> None:
    for number in range(5):
        await load(server, f"twin-{number}", "formal")
    first = (await server.http.get("/v1/adapters", params={"limit": 3})).json()
    assert [entry["name"] for entry in first["data"]] == ["formal", "twin-0", "twin-1"]
    await server.http.delete("/v1/adapters/twin-1")
    rest = (await server.http.get("/v1/adapters", params={"limit": 3, "cursor": first["next_cursor"]})).json()
    assert [entry["name"] for entry in rest["data"]] == ["twin-2", "twin-3", "twin-4"]
    assert rest["has_more"] is False
    assert (await server.http.get("/v1/adapters", params={"limit": 0})).status_code == 400


async def test_served_folder_is_listed_before_its_adapters_are_loaded(start: Start) -> None:
    async with start(adapters={"adapter_dir_mode": AdapterDirMode.SERVE}) as server:
        listed = (await server.http.get("/v1/adapters", params={"limit": 2})).json()
        assert [(card["name"], card["loaded"]) for card in listed["data"]] == [("formal", False), ("json", False)]
        assert (listed["has_more"], listed["next_cursor"], listed["total"]) == (True, "json", 3)
        card = (await server.http.get("/v1/adapters/pirate")).json()
        assert (card["digest"], card["source"], card["loaded"]) == (None, "pirate", False)
        content = await server.http.get("/v1/adapters/pirate/content")
        assert (content.status_code, "not loaded yet" in content.text) == (404, True), content.text
        warmed = (await server.http.patch("/v1/adapters/pirate", json={"warm": True})).json()
        assert warmed["loaded"]
        assert warmed.keys() == card.keys()
        names = [(each["name"], each["loaded"]) for each in (await server.http.get("/v1/adapters")).json()["data"]]
        assert names == [("formal", False), ("json", False), ("pirate", True)]
        assert (await server.http.get("/v1/adapters/nobody")).status_code == 404


async def test_error_names_the_invalid_query_parameter(server: Running) -> None:
    error = (await server.http.get("/v1/adapters", params={"limit": 0})).json()["error"]
    assert (error["param"], error["message"]) == ("limit", "limit: Input should be greater than or equal to 1.")


async def test_stats_count_the_traffic_of_one_adapter(server: Running) -> None:
    for _ in range(2):
        await server.http.post(CHAT, json=body(model="formal"))
    await server.http.post(CHAT, json=body())
    stats = (await server.http.get("/v1/adapters/formal/stats")).json()
    per_request = len(server.engine.submitted[0].prompt_token_ids)
    assert (stats["requests"], stats["requests_running"], stats["requests_failed"]) == (2, 0, 0)
    assert stats["prompt_tokens"] == 2 * per_request
    assert stats["generation_tokens"] > 2
    assert stats["mean_ttft_s"] > 0
    assert (await server.http.get("/v1/adapters/nobody/stats")).status_code == 404


async def test_sglang_loads_and_unloads(server: Running) -> None:
    source = str(server.sources / "pirate")
    reply = await server.http.post("/load_lora_adapter", json={"lora_name": "pirate", "lora_path": source})
    assert reply.json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"formal": "formal", "pirate": "pirate"},
    }
    assert not server.service.resolver.loader.pinned
    other = {"lora_name": "pirate", "lora_path": str(server.sources / "formal")}
    refused = await server.http.post("/load_lora_adapter", json=other)
    assert refused.status_code == 400
    assert refused.json()["success"] is False
    held = {"lora_name": "held", "lora_path": source, "pinned": True}
    assert (await server.http.post("/load_lora_adapter", json=held)).status_code == 200
    assert server.service.resolver.loader.pinned == {"held"}
    gone = await server.http.post("/unload_lora_adapter", json={"lora_name": "pirate"})
    assert "pirate" not in gone.json()["loaded_adapters"]
    assert (await server.http.post("/unload_lora_adapter", json={"lora_name": "pirate"})).status_code == 400


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "{}"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "{}", "load_inplace": True}),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "{}"}),
        ("/v1/loras", {"lora_name": "x", "source": {"uri": "{}"}}),
        ("/v1/adapters", {"name": "x", "source": "{}"}),
        ("/v1/adapters", {"name": "x", "alias_of": "formal"}),
    ],
)
async def test_a_controller_may_load_the_same_content_again(
    server: Running, route: str, fields: dict[str, Any]
) -> None:
    body = json.loads(json.dumps(fields).replace("{}", str(server.sources / "pirate")))
    first = await server.http.post(route, json=body)
    version = server.service.catalog.get("x")
    assert first.status_code in (200, 201)
    for _ in range(2):
        assert (await server.http.post(route, json=body)).status_code == 200
    assert server.service.catalog.get("x") is version
    assert not server.engine.dropped


async def test_dynamo_loads_lists_and_unloads(server: Running) -> None:
    source = str(server.sources / "pirate")
    reply = await server.http.post("/v1/loras", json={"lora_name": "pirate", "source": {"uri": source}})
    assert reply.json()["status"] == "success"
    listed = (await server.http.get("/v1/loras")).json()
    assert (listed["count"], set(listed["loras"])) == (2, {"formal", "pirate"})
    assert (await server.http.delete("/v1/loras/pirate")).json()["status"] == "success"


async def test_disabled_lora_error_names_the_option(start: Start) -> None:
    async with start(lora=False) as server:
        status, text = await load(server, "formal", "formal")
        assert status == 400
        assert "--enable-lora" in text


async def test_without_lora_only_the_base_is_served_and_adapters_stay_registered(start: Start) -> None:
    async with start() as server:
        await load(server, "formal", "formal")
    async with start(lora=False) as server:
        assert [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]] == ["base"]
        assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 404
    async with start() as server:
        assert server.service.catalog.names() == ["formal"]


async def test_concurrent_uploads_of_one_name_leave_one_adapter(server: Running) -> None:
    replies = await asyncio.gather(*(load(server, "new", source) for source in ("pirate", "json")))
    assert sorted(status for status, _ in replies) in ([200, 400], [200, 409])
    assert (await server.http.post(CHAT, json=body(model="new"))).status_code == 200


async def test_traffic_since_a_name_was_loaded_again_survives_the_end_of_its_unload(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping = asyncio.Event()
    dropped = asyncio.Event()

    async def drop(digest: AdapterDigest) -> int:
        dropping.set()
        await dropped.wait()
        return 0

    monkeypatch.setattr(server.engine, "drop_adapter", drop)
    unloading = asyncio.create_task(server.http.delete("/v1/adapters/formal"))
    await dropping.wait()
    assert (await load(server, "formal", "pirate"))[0] == 200
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 200
    dropped.set()
    assert (await unloading).status_code == 200
    assert (await server.http.get("/v1/adapters/formal/stats")).json()["requests"] == 1


async def test_adapter_with_missing_files_can_be_replaced(server: Running) -> None:
    record = server.service.catalog.get("formal")
    assert record is not None
    server.service.catalog._not_served[record.digest] = "its files are missing"
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 400
    assert (await load(server, "formal", "pirate", load_inplace=True))[0] == 200
    assert (await server.http.post(CHAT, json=body(model="formal"))).status_code == 200


async def test_adapter_changes_run_in_separate_threads(server: Running) -> None:
    everyones = to_thread.current_default_thread_limiter()
    for _ in range(int(everyones.total_tokens)):
        everyones.acquire_on_behalf_of_nowait(object())
    assert (await load(server, "pirate", "pirate"))[0] == 200
    assert (await server.http.post(CHAT, json=body(model="pirate"))).status_code == 200
    assert (await server.http.delete("/v1/adapters/pirate")).status_code == 200


async def test_slow_loads_do_not_delay_removals(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    begun = list[Any]()
    register = server.service.catalog.register

    def register_late(*arguments: Any, **options: Any) -> RegisteredAdapter:
        begun.append(arguments)
        go_on.wait()
        return register(*arguments, **options)

    monkeypatch.setattr(server.service.catalog, "register", register_late)
    most = LOADS_AT_ONCE
    loading = [asyncio.create_task(load(server, f"new-{n}", "pirate")) for n in range(most + 1)]
    try:
        await until(lambda: len(begun) == most, "all places are taken")
        assert (await server.http.delete("/v1/adapters/formal")).status_code == 200
    finally:
        go_on.set()
    assert [status for status, _ in await asyncio.gather(*loading)] == [200] * (most + 1)


async def test_error_repeats_no_adapter_name_that_its_folder_shares(server: Running) -> None:
    (server.sources / "pirate" / "lorikeet.toml").write_text("system_prompt = 3")
    reply = await server.http.post("/v1/adapters", json={"name": "pirate", "source": str(server.sources / "pirate")})
    said = reply.json()["error"]["message"]
    assert said == "adapter 'pirate': lorikeet.toml: Expected `str | null`, got `int` - at `$.system_prompt`"
