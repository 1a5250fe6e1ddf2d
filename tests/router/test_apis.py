"""A router before servers of other kinds, each with its own way to load and name adapters."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorikeet.router import discovery
from lorikeet.router.adapters import RoutedAdapter, describe_adapter
from lorikeet.router.apis import BackendSpec, parse_backend
from lorikeet.router.discovery import Discovery
from tests.router.conftest import Routing, routing, write_files
from tests.router.other_servers import Listed, LlamaCpp, Lorax, Ollama, Sglang, Tgi
from tests.router.scripted import ScriptedBackend
from tests.support.waiting import until

KINDS = {
    "sglang": (Sglang, ""),
    "llamacpp": (LlamaCpp, ""),
    "ollama": (Ollama, ",api=ollama,base=base"),
    "tgi": (Tgi, ",api=tgi"),
    "lorax": (Lorax, ",api=lorax,base=base"),
    "openai": (Listed, ",api=openai,base=base"),
}


def known(folder: Path, *names: str) -> tuple[RoutedAdapter, ...]:
    return tuple(describe_adapter(name, str(write_files(folder / name, content=name.encode()))) for name in names)


async def say(http: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1, **fields})


async def text(running: Routing, model: str) -> str:
    reply = await say(running.http, model)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_adapters_are_loaded_and_named_as_each_server_wants_it(kind: str, tmp_path: Path) -> None:
    make, options = KINDS[kind]
    server = make()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(server.serving())
        running = await stack.enter_async_context(
            routing([url + options], adapters=known(tmp_path, "pirate", "formal"))
        )
        await running.up(1)
        base = (await running.http.get("/v1/models")).json()["data"][0]["id"]
        assert base == server.base
        assert [await text(running, name) for name in (base, "pirate", "formal")] == [
            "base+None",
            "base+pirate",
            "base+formal",
        ]
        reply = await say(running.http, "pirate", stream=True)
        first = json.loads(reply.text.splitlines()[0].removeprefix("data: "))
        assert first["choices"][0]["text"] == "base+pirate"
        assert (await say(running.http, "unknown")).status_code == 404
        await running.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"})
        if kind in ("sglang", "ollama"):
            await until(lambda: "formal" not in server.loaded, "it has been unloaded")


async def test_ollama_gets_only_missing_files(tmp_path: Path) -> None:
    server = Ollama()
    async with server.serving() as url, routing([f"{url},base=base"], adapters=known(tmp_path, "pirate")) as running:
        await running.up(1)
        assert await text(running, "pirate") == "base+pirate"
        assert server.loaded == {"pirate": ("base", ["adapter_config.json", "adapter_model.safetensors"])}
        assert len(server.blobs) == 2


@pytest.mark.slow
async def test_refusals_name_the_adapter_and_the_remedy(tmp_path: Path) -> None:
    sglang, llama = Sglang(), LlamaCpp()
    async with sglang.serving() as url, routing([url], adapters=known(tmp_path, "bad")) as running:
        await running.up(1)
        reply = await say(running.http, "bad")
        assert reply.status_code == 400
        assert "rank 64 exceeds" in reply.text
    async with llama.serving() as url, routing([url], adapters=known(tmp_path, "other")) as running:
        await running.up(1)
        reply = await say(running.http, "other")
        assert reply.status_code == 400
        assert "--lora other.gguf" in reply.text


@pytest.mark.slow
async def test_a_backend_has_no_more_adapters_and_no_larger_ranks_than_it_can(tmp_path: Path) -> None:
    server = Sglang()
    server.most = 2
    named = known(tmp_path, "a", "b", "c")  # of rank 12
    async with server.serving() as url, routing([f"{url},max_loras=2"], adapters=named) as running:
        await running.up(1)
        for name in ("a", "b", "a", "c", "b", "a"):
            assert await text(running, name) == f"base+{name}"
            assert len(server.loaded) <= 2
    async with (
        server.serving() as url,
        Sglang().serving() as other,
        routing([f"{url},max_rank=8", other], adapters=named) as running,
    ):
        await running.up(2)
        server.bodies.clear()
        for _ in range(4):
            assert await text(running, "a") == "base+a"
        assert not server.bodies


async def test_adapters_spread_over_idle_backends_before_one_is_unloaded(tmp_path: Path) -> None:
    servers = [Sglang(), Sglang()]
    async with servers[0].serving() as one, servers[1].serving() as two:
        urls = [f"{url},max_loras=1" for url in (one, two)]
        async with routing(urls, adapters=known(tmp_path, "a", "b"), preset="auto") as running:
            await running.up(2)
            for name in ("a", "b", "a", "b"):
                assert await text(running, name) == f"base+{name}"
            assert sorted(name for server in servers for name in server.loaded) == ["a", "b"]
            assert all(len(server.bodies) == 2 for server in servers)


@pytest.mark.slow
async def test_servers_of_several_kinds_stand_behind_one_router(tmp_path: Path) -> None:
    vllm, servers = ScriptedBackend(), [Sglang(), LlamaCpp(), Tgi()]
    await vllm.start()
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server.serving()) for server in servers]
        urls = [vllm.url, urls[0], urls[1], urls[2] + ",api=tgi"]
        running = await stack.enter_async_context(routing(urls, adapters=known(tmp_path, "pirate")))
        await running.up(4)
        for _ in range(4):
            assert (await say(running.http, "pirate")).status_code == 200
            assert (await say(running.http, "base")).status_code == 200
        assert all(server.bodies for server in (vllm, *servers)), "in turn"
        assert {body["model"] for body in servers[0].bodies} == {"base"}
        assert {body["model"] for body in servers[1].bodies} == {LlamaCpp.base}
    await vllm.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "requests"),
    [
        ('sglang:num_running_reqs{tp="0"} 2.0\nsglang:num_queue_reqs 1.0\n', 3),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n", 5),
        ("tgi_queue_size 2\ntgi_batch_current_size 1\n", 3),
    ],
)
async def test_requests_of_others_are_counted_by_the_metrics_of_each_kind(page: str, requests: int) -> None:
    server = Sglang()
    server.page = page
    async with server.serving() as url, routing([url]) as running:
        await running.until_cluster(
            lambda cluster: sum(each["running"] + each["waiting"] for each in cluster["replicas"]) == requests,
            f"{requests} requests are counted",
        )


# --- discovery -----------------------------------------------------------------------------------


def test_a_backend_is_named_with_its_kind_and_base() -> None:
    assert parse_backend("http://a:1/v1,api=ollama,base=llama3.2") == BackendSpec("http://a:1", "ollama", "llama3.2")
    assert parse_backend("http://a:1,max_rank=64,max_loras=8") == BackendSpec("http://a:1", "", "", 8, 64)
    for wrong in ("http://a:1,api=other", "http://a:1,speed=3", "http://a:1,base=", "http://a:1,max_rank=x"):
        with pytest.raises(ValueError, match="http://a:1"):
            parse_backend(wrong)
    for option, why in (
        ("kv_events=x", "kv_events is 'x', and must be a whole number"),
        ("kv_events=70000", "kv_events is 70000, and must be a port"),
        ("kv_replay=5558", "kv_replay has missed events only, and needs kv_events=PORT"),
        ("base=", "base has no value"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_backend(f"http://a:1,{option}")
    for wrong in ("dns://name", "kubernetes://ns/service", "kubernetes:///service:80"):
        with pytest.raises(ValueError, match=wrong):
            Discovery([wrong])


@pytest.mark.slow
async def test_lines_of_a_file_come_and_go_while_requests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.health.EVERY_S", 0.02)
    first, second = ScriptedBackend("b0"), ScriptedBackend("b1")
    await first.start()
    await second.start()
    listed = tmp_path / "backends"
    listed.write_text(f"# all of them\n{first.url}\n")
    async with routing([f"file:{listed}"]) as running:
        await running.up(1)
        listed.write_text(f"{first.url}\n{second.url}  # the new one\n")
        await running.up(2)
        first.pauses_at = 1
        body = {"model": "base", "prompt": "a", "max_tokens": 3, "stream": True}
        async with (
            running.http.stream("POST", "/v1/completions", json=body) as one,
            running.http.stream("POST", "/v1/completions", json=body) as two,
        ):
            await until(lambda: first.paused, "a stream is at the first")
            listed.write_text(f"{second.url}\n")
            await running.up(1)
            assert len((await running.cluster())["replicas"]) == 2, "it ends what it has"
            first.go_on.set()
            assert (await one.aread()).endswith(b"[DONE]\n\n")
            assert (await two.aread()).endswith(b"[DONE]\n\n")
        await running.until_cluster(lambda cluster: len(cluster["replicas"]) == 1, "it is removed")
        listed.unlink()
        assert (await say(running.http, "base")).status_code == 200, "what cannot be read says nothing"
    await first.kill()
    await second.kill()


async def test_a_name_without_addresses_has_no_backends_and_a_failed_lookup_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Discovery(["dns://localhost:8000,api=tgi"])
    found = await names.find()
    assert BackendSpec("http://127.0.0.1:8000", "tgi") in found
    lookup = AsyncMock(side_effect=socket.gaierror(socket.EAI_AGAIN, "the name server does not answer"))
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    assert await names.find() == found
    lookup.side_effect = socket.gaierror(socket.EAI_NONAME, "there is no such name")
    assert await names.find() == []


async def test_ready_endpoints_of_a_kubernetes_service_are_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slices(http: Request) -> Response:
        assert http.headers["authorization"] == "Bearer secret"
        assert http.query_params["labelSelector"] == "kubernetes.io/service-name=vllm"
        return JSONResponse(
            {
                "items": [
                    {"endpoints": [{"addresses": ["10.0.0.2"], "conditions": {"ready": True}}]},
                    {
                        "endpoints": [
                            {"addresses": ["10.0.0.3"], "conditions": {"ready": False}},
                            {"addresses": ["fd::1"]},
                        ]
                    },
                    {"endpoints": None},
                ]
            }
        )

    server = Listed()
    path = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
    monkeypatch.setattr(server, "routes", lambda: [Route(path, slices)])
    async with server.serving() as url:
        (tmp_path / "token").write_text("secret\n")
        host, _, port = url.removeprefix("http://").rpartition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr(discovery, "_SCHEME", "http")
        monkeypatch.setattr(discovery, "_ACCOUNT", tmp_path)
        service = Discovery(["kubernetes://serving/vllm:8000"])
        found = await service.find()
        assert [spec.url for spec in found] == ["http://10.0.0.2:8000", "http://[fd::1]:8000"]
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
        assert await service.find() == found, "a source that does not answer changes nothing"
