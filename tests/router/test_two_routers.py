"""Two routers that share nothing, as processes before the same backends."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from tests.router.conftest import write_files
from tests.router.scripted import ScriptedBackend, chat_text, words
from tests.support.served import COMMAND
from tests.support.waiting import until

NAMES = tuple(f"adapter-{number}" for number in range(8))
MAX_TOKENS = 12
MESSAGES = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def router(backends: list[ScriptedBackend], folder: Path) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """Run ``lorikeet router`` in a process."""
    flags = [flag for backend in backends for flag in ("--backend", backend.url)]
    flags += [flag for name in NAMES for flag in ("--lora-modules", f"{name}={folder / name}")]
    flags += ["--split", "half=adapter-0:0.5,adapter-1:0.5", "--preset", "auto,routing=consistent", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "router", *flags), stdout=asyncio.subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout is not None
    try:
        printed = ""
        while (found := re.search(r"Lorikeet is ready: (\S+)", printed)) is None:
            line = await process.stdout.readline()
            assert line, printed
            printed += line.decode()
        draining = asyncio.create_task(process.stdout.read())
        async with httpx.AsyncClient(base_url=found[1], timeout=60) as http:
            yield process, http
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await draining


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[list[ScriptedBackend], list[tuple[Any, httpx.AsyncClient]]]]:
    """Three backends, and two routers before them, which name the backends in different orders."""
    for name in NAMES:
        write_files(tmp_path / name)
    backends = [ScriptedBackend(f"b{number}") for number in range(3)]
    for backend in backends:
        await backend.start()
    async with AsyncExitStack() as stack:
        starting = [stack.enter_async_context(router(order, tmp_path)) for order in (backends, backends[::-1])]
        yield backends, [*await asyncio.gather(*starting)]
    for backend in backends:
        backend.go_on.set()
        await backend.kill()


@pytest.mark.slow
async def test_routers_that_share_nothing_agree_and_one_continues_the_streams_of_the_other(
    pair: tuple[list[ScriptedBackend], list[tuple[Any, httpx.AsyncClient]]],
) -> None:
    backends, ((process, killed), (_, other)) = pair
    for name in NAMES:
        for http in (killed, other):
            body = {"model": name, "prompt": "once", "max_tokens": 1}
            assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    held = [name for backend in backends for name in backend.adapters]
    assert sorted(held) == [*NAMES], "each adapter is at one backend"
    assert not [call for backend in backends for call in backend.calls if call.startswith("-")]
    for user in range(10):
        models = []
        for http in (killed, other):
            before = [len(backend.bodies) for backend in backends]
            body = {"model": "half", "prompt": "once", "max_tokens": 1, "user": f"u{user}"}
            assert (await http.post(COMPLETIONS, json=body)).status_code == 200
            models += [
                asked["model"]
                for backend, count in zip(backends, before, strict=True)
                for asked in backend.bodies[count:]
            ]
        assert models[0] == models[1]

    for backend in backends:
        backend.pauses_at = 5
    got = [Got(number) for number in range(100)]
    reading = [asyncio.create_task(each.read(killed)) for each in got]
    await until(lambda: all(each.tokens >= 5 for each in got), "all streams are under way")
    process.send_signal(signal.SIGKILL)
    assert not any(await asyncio.gather(*reading))
    for backend in backends:
        backend.pauses_at = None
        backend.go_on.set()
    assert all(await asyncio.gather(*(each.read(other) for each in got)))
    assert [each.text for each in got] == [each.expected for each in got]
    assert {each.tokens for each in got} == {MAX_TOKENS}


class Got:
    """What a client has of one answer, a completion or a chat."""

    def __init__(self, number: int) -> None:
        self.text = ""
        self.tokens = 0
        self._model = NAMES[number % len(NAMES)]
        self._is_chat = number % 2 == 1
        self._prompt = f"p{number}"

    @property
    def expected(self) -> str:
        """The text of the whole answer."""
        return words(self._model, chat_text(MESSAGES) if self._is_chat else self._prompt, MAX_TOKENS)

    async def read(self, http: httpx.AsyncClient) -> bool:
        """Read the answer, or its rest. Return whether its end mark has come."""
        body: dict[str, Any] = {"model": self._model, "max_tokens": MAX_TOKENS, "stream": True}
        body |= {"messages": MESSAGES} if self._is_chat else {"prompt": self._prompt}
        if self.text:
            body["received"] = {"text": self.text, "tokens": self.tokens}
        try:
            async with http.stream("POST", CHAT if self._is_chat else COMPLETIONS, json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        return True
                    if line:
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError:
            return False
        return False

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            text = choice["delta"].get("content") if self._is_chat else choice["text"]
            self.text += text or ""
            self.tokens += bool(text)
