"""The whole server as users start it: both processes, a tiny random model, real HTTP."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import pytest_asyncio
import zmq
from aiohttp import web

from tests.support.chat_requests import CHAT, text_of
from tests.support.fakes import write_adapter
from tests.support.served import COMMAND, Server, make_model, serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hello world"}]
LONG = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 400, "ignore_eos": True}
HUB_FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """One server for tests that leave it as it was, and a last one that ends it."""
    async with serving(model, tmp_path_factory.mktemp("home")) as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_continue_after_the_engine_process_is_killed(server: Server) -> None:
    expected = (await server.http.post(CHAT, json=LONG)).json()["choices"][0]["message"]["content"]
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    (engine,) = (int(pid) for pid in children if b"lorikeet.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())
    assert os.getsid(engine) != os.getsid(server.process.pid), "a Ctrl-C at the terminal is for the server alone"
    async with server.http.stream("POST", CHAT, json={**LONG, "stream": True}) as reply:
        lines = [line async for line in _killing(reply, engine) if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert text_of(chunks) == expected
    assert (await server.http.get("/health")).json()["engine_restarts"] == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_server_finishes_accepted_requests_after_a_signal(server: Server) -> None:
    """The last test of the server that these two share."""
    assert '"model": "tiny"' in server.printed[-1]
    assert [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]] == ["tiny"]
    answer = (await server.http.post(CHAT, json=LONG)).json()
    assert answer["usage"]["completion_tokens"] == 400
    async with server.http.stream("POST", CHAT, json={**LONG, "stream": True}) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        server.signal(signal.SIGTERM)

        async def refusal() -> int:
            status = (await server.http.post(CHAT, json={**LONG, "max_tokens": 1})).status_code
            return 0 if status == 200 else status

        assert await until(refusal, "the signal has arrived, and requests are refused") == 503
        rest = [first, *[line async for line in lines if line]]
    chunks = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
    assert rest[-1] == "data: [DONE]"
    assert text_of(chunks) == answer["choices"][0]["message"]["content"]
    assert await server.process.wait() == 0


async def test_with_log_json_every_line_is_json_from_start_to_drain(model: Path, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "serve", str(model), "--port", "0", "--log-json", "--max-loras", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path), "LORIKEET_ENGINE__MEMORY_BYTES": str(2**24)},
    )
    assert process.stderr is not None
    lines: list[dict[str, str]] = []
    async with asyncio.timeout(120):
        while not lines or lines[-1]["event"] != "ready":
            line = await process.stderr.readline()
            assert line, f"the server ended with {await process.wait()} after: {lines}"
            lines.append(json.loads(line))
        process.terminate()
        printed, rest = await process.communicate()
    assert (process.returncode, printed) == (0, b"")
    events = [line["event"] for line in lines]
    preset = "preset auto = lorikeet:auto; objective: mixed"
    phases = ["note", "model found", "weights loaded", preset, "adapters registered", "ready"]
    assert [event for event in events if event in phases] == phases
    assert any(re.match(r"memory for adapters and KV: 16 MiB on the device", event) for event in events)
    assert lines[-1]["url"].startswith("http://127.0.0.1:")
    assert [json.loads(line)["event"] for line in rest.splitlines()][:2] == ["draining, 0 requests running", "drained"]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
async def test_server_restarts_immediately_on_its_port(model: Path, tmp_path: Path, number: int) -> None:
    async with serving(model, tmp_path) as server:
        port = server.http.base_url.port
        assert port is not None
        close = {"Connection": "close"}  # the server closes first, so its end stays in TIME_WAIT for a minute
        assert (await server.http.get("/health", headers=close)).status_code == 200
        await server.http.get("/health")
        idle, _ = await asyncio.open_connection("127.0.0.1", port)
        server.signal(number)
        await server.process.wait()
    assert {each.status for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port}
    async with serving(model, tmp_path, port=port) as server:
        assert (await server.http.get("/health")).status_code == 200
        with suppress(ConnectionResetError):  # A process that is killed may not have accepted it.
            assert await idle.read() == b""
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(port), "--log-json"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "second")},
        )
        _, logged = await second.communicate()
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in logged.decode()
        assert "weights loaded" not in logged.decode()
        assert (await server.http.get("/health")).status_code == 200


async def test_a_second_signal_ends_the_server_at_once(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path, "--max-num-seqs", "1") as server:
        waiting = [asyncio.create_task(server.http.post(CHAT, json={**LONG, "n": 20})) for _ in range(5)]
        await _until_reply(server, "/load", lambda reply: reply.json()["server_load"] >= 100, "100 answers wait")
        server.signal(signal.SIGTERM)
        await _until_reply(server, "/health", lambda reply: reply.status_code != 200, "the server drains")
        server.signal(signal.SIGINT)
        assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [503] * 5
        assert await server.process.wait() == 0


async def test_an_adapter_loaded_by_api_answers_after_a_restart_until_it_is_removed(
    model: Path, tmp_path: Path
) -> None:
    sources = tmp_path / "sources"
    write_adapter(sources / "one", layers=3, hidden=48)
    asking = {**LONG, "max_tokens": 20}
    flags = ("--adapter-dir", str(sources), "--adapter-dir-mode", "allow")
    async with serving(model, tmp_path, *flags) as server:
        base = (await server.http.post(CHAT, json=asking)).json()["choices"]
        content = {"lora_name": "one", "lora_path": str(sources / "one")}
        assert (await server.http.post("/v1/load_lora_adapter", json=content)).status_code == 200
        first = (await server.http.post(CHAT, json={**asking, "model": "one"})).json()["choices"]
        assert first != base
        write_adapter(sources / "one", layers=3, hidden=48, seed=1)
        replaced = await server.http.post("/v1/load_lora_adapter", json={**content, "load_inplace": True})
        assert replaced.status_code == 200
        second = (await server.http.post(CHAT, json={**asking, "model": "one"})).json()["choices"]
        assert second != first
    async with serving(model, tmp_path, *flags) as server:
        assert "one" in "".join(server.printed)
        assert (await server.http.post(CHAT, json={**asking, "model": "tiny:one"})).json()["choices"] == second
        await _until_on_device(server, "one")
        running = asyncio.create_task(server.http.post(CHAT, json={**LONG, "model": "one"}))
        await _until_reply(
            server,
            "/v1/adapters/one/stats",
            lambda reply: running.done() or reply.json()["requests_running"],
            "a request of the adapter runs",
        )
        removed = (await server.http.delete("/v1/adapters/one")).json()
        assert removed["freed_bytes"] > 0
        assert (await running).json()["usage"]["completion_tokens"] == 400
        assert (await server.http.post(CHAT, json={**asking, "model": "one"})).status_code == 404
        assert (await server.http.post(CHAT, json=asking)).json()["choices"] == base


async def test_host_tier_reads_adapters_before_any_request(model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "one", layers=3, hidden=48)
    write_adapter(tmp_path / "two", layers=3, hidden=48, seed=1)
    flags = ("--host-memory", "8MiB", "--adapter-dir", str(tmp_path), "--lora-modules", f"one={tmp_path}/one")
    flags = (*flags, "--preset", "lorikeet:plain")  # the default preset would go on to prefetch them to the device
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events", "topic": "kv@pod@tiny"}
    flags = (*flags, "--kv-events-config", json.dumps(events))
    async with serving(model, tmp_path, *flags) as server, subscribed(str(events["endpoint"])) as published:
        await server.http.post("/v1/adapters", json={"name": "two", "source": str(tmp_path / "two")})
        line = 'num_cpu_loaded_lora_adapters{engine="0",model_name="tiny"} 2.0'
        await _until_reply(server, "/metrics", lambda reply: line in reply.text, "the host tier has both adapters")
        assert (await server.http.get("/v1/adapters/one")).json()["level"] == "cpu"
        asked = (await server.http.post(CHAT, json={**LONG, "model": "one", "max_tokens": 20})).json()
        assert asked["usage"]["completion_tokens"] == 20
        page = await _metrics(server)
        assert 'lorikeet:request_adapter_wait_seconds_count{engine="0",model_name="tiny"} 1.0' in page
        card = await _until_on_device(server, "one")
        prompt = next(event for event in published() if event["type"] == "BlockStored")
        assert (prompt["lora_name"], prompt["medium"], prompt["parent_block_hash"]) == ("one", "GPU", None)
        removed = (await server.http.delete("/v1/adapters/one")).json()
        assert removed["freed_bytes"] > 2 * card["device_bytes"], "device, host, and KV"
        gone = next(event for event in published() if event["type"] == "BlockRemoved")
        assert set(prompt["block_hashes"]) <= set(gone["block_hashes"])


@asynccontextmanager
async def subscribed(endpoint: str) -> AsyncIterator[Callable[[], Iterator[dict[str, Any]]]]:
    """Subscribe to events of KV; yield a function that waits for each next event."""
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@pod@tiny")

        def published() -> Iterator[dict[str, Any]]:
            while socket.poll(20_000):
                yield from msgspec.msgpack.decode(socket.recv_multipart()[2])[1]

        yield published


async def test_late_request_is_shed_and_others_log_tenant_and_priority(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    flags = ("--max-num-seqs", "1", "--shed", "--slo-ttft", "1e-9", "--tenant-header", "X-Tenant")
    async with serving(model, tmp_path, *flags, "--request-log", str(log)) as server:
        many = {**LONG, "priority": 3, "n": 8}
        waiting = asyncio.create_task(server.http.post(CHAT, json=many, headers={"X-Tenant": "blue"}))
        waits = re.compile(r"^vllm:num_requests_waiting{.*} [1-9]", re.MULTILINE)
        await _until_reply(server, "/metrics", lambda reply: waits.search(reply.text), "a request waits")
        refused = await server.http.post(CHAT, json=LONG)
        assert refused.status_code == 429
        assert "TTFT target" in refused.json()["error"]["message"]
        assert (await waiting).status_code == 200
        assert (await server.http.post(CHAT, json={**LONG, "max_tokens": 1})).status_code == 200
        page = await _metrics(server)
        assert 'lorikeet:shed_requests_total{adapter="",engine="0",model_name="tiny"} 1.0' in page
    first = json.loads(log.read_text().splitlines()[0])
    assert (first["tenant"], first["priority"], first["slo"]) == ("blue", 3, {"ttft_s": 1e-9})


@asynccontextmanager
async def answering(
    routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], go_on: asyncio.Event
) -> AsyncIterator[str]:
    """Answer GET requests; yield the address, and set ``go_on`` before what is under way is waited for."""
    app = web.Application()
    for path, answer in routes.items():
        app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        go_on.set()
        await runner.cleanup()


@asynccontextmanager
async def hanging_source() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An HTTP server from which an adapter comes as far as the middle of its weights, and what is set then."""
    hangs = asyncio.Event()
    go_on = asyncio.Event()

    async def config(request: web.Request) -> web.Response:
        return web.json_response({"peft_type": "LORA"})

    async def weights(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": str(2**24)})
        await reply.prepare(request)
        if request.method == "GET":
            await reply.write(bytes(2**20))
            hangs.set()
            await go_on.wait()
        return reply

    routes = {"/one/adapter_config.json": config, "/one/adapter_model.safetensors": weights}
    async with answering(routes, go_on) as url:
        yield f"{url}/", hangs


@pytest.mark.long
async def test_hanging_download_does_not_delay_the_shutdown(model: Path, tmp_path: Path) -> None:
    async with hanging_source() as (url, hangs):
        flags = ("--allow-source", url, "--drain-timeout", "1")
        async with serving(model, tmp_path, *flags) as server:
            content = {"name": "one", "source": f"{url}one"}
            loading = asyncio.create_task(server.http.post("/v1/adapters", json=content))
            await hangs.wait()
            server.signal(signal.SIGTERM)
            async with asyncio.timeout(60):  # six seconds: the drain, and five for what goes on after it
                assert await server.process.wait() == 0
            await asyncio.gather(loading, return_exceptions=True)


async def test_hanging_download_does_not_keep_a_starting_server_from_stopping(model: Path, tmp_path: Path) -> None:
    async with hanging_source() as (url, hangs):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "serve", str(model), "--port", "0", "--lora-modules", f"one={url}one"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_DATA_HOME": str(tmp_path), "LORIKEET_ENGINE__MEMORY_BYTES": str(2**24)},
        )
        await hangs.wait()
        process.terminate()
        async with asyncio.timeout(60):
            _, printed = await process.communicate()
        assert process.returncode == 0
        assert "stopped before it was ready" in printed.decode()
        assert "critical" not in printed.decode()


@asynccontextmanager
async def hanging_hub() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield the address of a hub whose one model's weights never end, and what is set once they are being fetched."""
    hangs = asyncio.Event()
    go_on = asyncio.Event()
    files = [{"type": "file", "path": name, "rfilename": name, "size": 2**20, "oid": "0"} for name in HUB_FILES]
    told = {"id": "org/tiny", "sha": "0" * 40, "siblings": files, "tags": [], "downloads": 0, "private": False}

    async def model(request: web.Request) -> web.Response:
        return web.json_response(files if "/tree/" in request.path else told)

    async def content(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Length": str(2**20), "ETag": '"0"', "X-Repo-Commit": "0" * 40}
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        if request.method == "GET":
            await reply.write(bytes(2**10))
            hangs.set()
            await go_on.wait()
        return reply

    async with answering({"/api/models/{path:.*}": model, "/org/tiny/{path:.*}": content}, go_on) as url:
        yield url, hangs


@pytest.mark.long
async def test_slow_model_download_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    async with hanging_hub() as (url, hangs):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "serve", "org/tiny", "--port", "0"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
        )
        async with asyncio.timeout(60):
            await hangs.wait()
            process.terminate()
            _, printed = await process.communicate()
        assert process.returncode == 0
        assert "stopped before it was ready" in printed.decode()
        assert "critical" not in printed.decode()


async def _until_reply(
    server: Server, path: str, condition: Callable[[httpx.Response], object], what: str
) -> httpx.Response:
    """Wait until the reply of a path meets a condition, and return it."""

    async def reply_that_meets_it() -> tuple[httpx.Response, ...]:
        reply = await server.http.get(path)
        return (reply,) if condition(reply) else ()

    (reply,) = await until(reply_that_meets_it, what)
    return reply


async def _until_on_device(server: Server, adapter: str) -> dict[str, Any]:
    """Wait until the gauges, which follow an answer, show an adapter on the device; return its card."""
    reply = await _until_reply(
        server, f"/v1/adapters/{adapter}", lambda reply: reply.json()["level"] == "gpu", "the adapter is on the device"
    )
    return dict(reply.json())


async def _metrics(server: Server) -> str:
    return (await server.http.get("/metrics")).text


async def _killing(reply: httpx.Response, process_id: int) -> AsyncIterator[str]:
    """Pass the lines of a stream on; kill a process after the first one."""
    killed = False
    async for line in reply.aiter_lines():
        if not killed:
            os.kill(process_id, signal.SIGKILL)
            killed = True
        yield line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1:0"),
        (("--lora-modules", "x=/nowhere/at/all"), "adapter 'x': there is no folder '/nowhere/at/all'"),
        (("--memory", "100KiB"), "--memory 100.0 KiB is too small for a sequence of 512 tokens"),
        pytest.param(
            ("--max-model-len", "100000"),
            "--max-model-len: 100000 is more than the model's",
            marks=pytest.mark.long,
        ),
        (("--block-size", "0"), "--block-size: Expected `int` >= 1"),
        pytest.param(("--log-level", "loud"), "log level 'loud' is not one of", marks=pytest.mark.long),
        pytest.param(("--preset", "elroa"), "did you mean elora", marks=pytest.mark.long),
    ],
)
async def test_failed_start_reports_the_reason(
    model: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "serve", str(model), "--port", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path), "LORIKEET_ENGINE__MEMORY_BYTES": str(2**24)},
    )
    _, printed = await process.communicate()
    assert process.returncode in (1, 2)
    assert message in printed.decode()
