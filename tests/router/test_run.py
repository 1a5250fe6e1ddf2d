"""The command ``lorikeet router``: flags, start and end."""

import asyncio
import re
import signal
import socket
import sys

import httpx
import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.http.connections import ConnectionLimits
from lorikeet.router.proxied_request import COMPLETIONS
from lorikeet.router.run import RouterOptions
from tests.router.scripted import ScriptedBackend, words

COMMAND = "from lorikeet.cli.main import main; main()"
runner = CliRunner(env={"COLUMNS": "200"})


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RouterOptions:
    seen: list[RouterOptions] = []
    monkeypatch.setattr("lorikeet.router.run.run_router", seen.append)
    result = runner.invoke(app, ["route", *arguments])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_flags_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(
        monkeypatch,
        *"--backend http://a:1 --backend http://b:2/v1 --preset loraserve:random --slo ttft=2 --port 1".split(),
        *"--lora-modules one=hf://org/one,rank=8 --api-key k --admin-key a --backend-key b".split(),
        *"--h11-max-incomplete-event-size 4KiB --max-connections 9 --head-timeout 1 --body-timeout 2".split(),
        *("--allowed-origins", "http://one", "--allowed-origins", '["http://two", "http://three"]'),
    )
    assert options.backends == ("http://a:1", "http://b:2/v1")
    assert [(each.name, each.source, each.rank) for each in options.adapters] == [("one", "hf://org/one", 8)]
    assert (options.preset, options.slo.ttft_s, options.port) == ("loraserve:random", 2.0, 1)
    assert (options.api_keys, options.admin_keys, options.backend_key) == (("k",), ("a",), "b")
    assert options.connections == ConnectionLimits(9, 4096, 1, 2, 60)
    assert options.allowed_origins == ("http://one", "http://two", "http://three")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--backend http://a --preset nonsense",
        "--backend http://a --slo fast",
        "--backend http://a --api-key=",
        "--backend http://a --admin-key=",
        "--backend http://a --allowed-origins example.org",
        "--backend http://a --allowed-origins {}",
        "--backend http://a --tenants",
        "--backend http://a --tenants --admin-key a --backend-key b --pass-client-keys",
        "--backend http://a --tenant-header a:b",
        "--backend http://a --lora-modules one",
        "--backend http://a --lora-modules one=hf://org/one",
        "--backend http://a --lora-modules one=hf://org/one,rank=8 --lora-modules one=hf://org/two,rank=8",
    ],
)
def test_wrong_flags_end_the_command_before_anything_starts(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setattr("lorikeet.router.run.run_router", lambda options: pytest.fail("it started"))
    assert runner.invoke(app, ["route", *arguments.split()]).exit_code == 2


def test_unknown_preset_ends_the_command_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # Logs would go on to be written to what the runner takes for stderr.
    monkeypatch.setattr("lorikeet.router.run.configure_logs", lambda level, as_json: None)
    result = runner.invoke(app, ["route", "--backend", "http://127.0.0.1:9", "--preset", "nonsense"])
    assert result.exit_code == 2
    assert "unknown preset" in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
async def test_it_is_ready_once_a_backend_has_come() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        backend = ScriptedBackend()
        flags = ("--backend", f"http://127.0.0.1:{taken.getsockname()[1]}", "--port", "0")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "route", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        assert process.stdout is not None
        printed = ""
        while "no backend yet" not in printed:
            line = await process.stdout.readline()
            assert line, printed
            printed += line.decode()
        assert "Lorikeet is ready" not in printed
        assert "backend-0: it cannot be reached" in printed
        backend.port = int(flags[1].rpartition(":")[2])
        await backend.start()
        while "Lorikeet is ready" not in printed:
            line = await process.stdout.readline()
            assert line, printed
            printed += line.decode()
    finally:
        process.kill()
        await process.wait()
        await backend.kill()


@pytest.mark.slow
async def test_router_prints_its_address_and_drains() -> None:
    backend = ScriptedBackend()
    await backend.start()
    flags = ("--backend", backend.url, "--lora-modules", "formal=/elsewhere/formal,rank=8", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "route", *flags), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        printed = ""
        while "curl" not in printed:
            line = await process.stdout.readline()
            assert line, f"it ended with {await process.wait()} after: {printed}"
            printed += line.decode()
        assert "formal" in printed
        (url,) = re.findall(r"Lorikeet is ready: (\S+)", printed)
        backend.pauses_at = 2
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            body = {"model": "formal", "prompt": "once", "max_tokens": 5, "stream": True}
            async with http.stream("POST", COMPLETIONS, json=body) as reply:
                lines = reply.aiter_lines()
                said = [await anext(lines)]
                process.send_signal(signal.SIGTERM)
                while True:  # until it takes no more connections
                    try:
                        await httpx.AsyncClient(timeout=60, verify=False).get(f"{url}/health")
                    except httpx.TransportError:
                        break
                backend.go_on.set()
                said += [line async for line in lines]
        assert said[-2] == "data: [DONE]"
        assert sum(line.startswith("data: {") for line in said) == 5
        assert backend.calls == ["+formal"]
        assert words("formal", "once", 1).strip() in said[0]
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        backend.go_on.set()
        await backend.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
async def test_router_starts_again_at_once_on_its_port(number: int) -> None:
    backend = ScriptedBackend()
    await backend.start()

    async def start(port: int) -> tuple[asyncio.subprocess.Process, str]:
        """Start a router; return it with what it has printed when it is ready or has ended."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, "route", "--backend", backend.url, "--port", str(port)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        printed = ""
        while "curl" not in printed and (line := await process.stdout.readline()):
            printed += line.decode()
        return process, printed

    processes = []
    try:
        first, printed = await start(0)
        processes.append(first)
        (url,) = re.findall(r"Lorikeet is ready: (\S+)", printed)
        port = int(url.rpartition(":")[2])
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.get("/health", headers={"Connection": "close"})).status_code == 200
            assert (await http.get("/health")).status_code == 200
            first.send_signal(number)
            await first.wait()
            second, printed = await start(port)
            processes.append(second)
            assert f"Lorikeet is ready: {url}" in printed
            third, printed = await start(port)
            processes.append(third)
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in printed
            assert await third.wait() == 1
            assert (await http.get("/health")).status_code == 200
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await backend.kill()
