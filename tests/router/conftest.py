"""A router and its backends in the test's own event loop, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from lorikeet.router.adapters import RoutedAdapter, describe_adapter
from lorikeet.router.app import create_app
from lorikeet.router.proxy import RouterParts
from lorikeet.router.run import RouterOptions, open_router
from tests.router.scripted import ScriptedBackend
from tests.support.quick_server import serving
from tests.support.waiting import until


@dataclass
class Routing:
    """A router that answers at ``http``."""

    http: httpx.AsyncClient
    parts: RouterParts
    backends: list[ScriptedBackend]

    @property
    def calls(self) -> list[list[str]]:
        """Adapters loaded and unloaded, by backend."""
        return [backend.calls for backend in self.backends]

    @property
    def all_calls(self) -> list[str]:
        """The same of all backends."""
        return [call for calls in self.calls for call in calls]

    async def cluster(self) -> dict[str, Any]:
        return dict((await self.http.get("/v1/cluster")).json())

    async def metric(self, line: str) -> None:
        """Wait until the metrics have a line; counts follow the answers."""

        async def is_there() -> bool:
            return line in (await self.http.get("/metrics")).text.splitlines()

        await until(is_there, f"/metrics says {line}")

    async def until_cluster(self, condition: Callable[[dict[str, Any]], object], what: str) -> None:
        """Wait until what ``/v1/cluster`` says meets a condition."""

        async def is_met() -> object:
            return condition(await self.cluster())

        await until(is_met, what)

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await until(lambda: not self.parts.backend_router._requests, "no request is under way")

    async def up(self, count: int) -> None:
        """Wait until so many backends are open."""
        await self.until_cluster(
            lambda cluster: sum(each["is_open"] for each in cluster["replicas"]) == count, f"{count} backends are open"
        )


Start = Callable[..., AbstractAsyncContextManager[Routing]]


@asynccontextmanager
async def routing(
    urls: Sequence[str], backends: Sequence[ScriptedBackend] = (), **options: Any
) -> AsyncIterator[Routing]:
    """Run a router over backends that have been started, or will be."""
    chosen = {"preset": "lorikeet:round-robin", "health_s": 0.02, **options}
    asked = RouterOptions(backends=tuple(urls), **chosen)
    async with open_router(asked) as parts:
        app = create_app(
            parts,
            asked.preset,
            asked.api_keys,
            asked.admin_keys,
            asked.allowed_origins,
            passes_keys=asked.passes_keys,
            why_shared=asked.why_files_are_shared,
        )
        config = uvicorn.Config(app, lifespan="off", log_level="error", access_log=False)
        async with (
            serving(config, break_off=True) as url,
            httpx.AsyncClient(base_url=url, timeout=30, verify=False) as http,
        ):
            yield Routing(http, parts, list(backends))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start routers over ``count`` scripted backends and the adapters ``formal`` and ``pirate``."""
    started: list[ScriptedBackend] = []

    @asynccontextmanager
    async def start_one(count: int = 2, **options: Any) -> AsyncIterator[Routing]:
        backends = [ScriptedBackend(f"b{number}") for number in range(count)]
        started.extend(backends)
        for backend in backends:
            await backend.start()
        urls = [backend.url for backend in backends]
        async with routing(urls, backends, **{"adapters": adapters("formal", "pirate"), **options}) as running:
            yield running

    yield start_one
    for backend in started:
        backend.open.set()
        backend.go_on.set()
    await asyncio.gather(*(backend.kill() for backend in started))


def adapters(*names: str) -> tuple[RoutedAdapter, ...]:
    """Return adapters whose files cannot be read here."""
    return tuple(describe_adapter(name, f"/elsewhere/{name}", rank=8) for name in names)


def write_files(folder: Path, rank: int = 8, content: bytes = b"weights") -> Path:
    """Write what a router reads of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "rank_pattern": {"q_proj": rank + 4}}))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


async def events(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], lines: list[str] | None = None
) -> list[dict[str, Any]]:
    """Read a stream to its end, which must be [DONE], once; ``lines`` has what has come so far."""
    lines = [] if lines is None else lines
    async with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
    assert lines.index("[DONE]") == len(lines) - 1
    return [json.loads(line) for line in lines[:-1]]


def requests_at(replica: dict[str, Any]) -> int:
    """Return how many requests ``/v1/cluster`` shows at a replica."""
    return int(replica["running"] + replica["waiting"])


def text_of(chunks: list[dict[str, Any]]) -> str:
    """Return the text of a streamed completion or chat completion."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)
