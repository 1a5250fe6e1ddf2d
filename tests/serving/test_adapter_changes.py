"""Loads of adapters do not wait for each other across hosts, and their number is bounded."""

import asyncio
import threading
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterError
from lorikeet.http.errors import ApiError
from lorikeet.serving.adapter_changes import LOADS_AT_ONCE, MAX_WAITING, LoadLimits
from tests.support.api_server import Running
from tests.support.waiting import until


async def test_sources_that_hang_block_no_load_from_elsewhere(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = []
    release = threading.Event()
    register = server.service.catalog.register

    def registering(name: str, source: str, **options: Any) -> object:
        if source.startswith("https://hangs"):
            hung.append(name)
            release.wait(60)
            raise AdapterError("gave up")
        return register(name, source, **options)

    monkeypatch.setattr(server.service.catalog, "register", registering)

    async def load(name: str, source: str) -> int:
        return (await server.http.post("/v1/adapters", json={"name": name, "source": source})).status_code

    hanging = [asyncio.create_task(load(f"h{each}", "https://hangs/a")) for each in range(LOADS_AT_ONCE + 2)]
    await until(lambda: len(hung) == LOADS_AT_ONCE, "all places of the host are taken")
    assert await load("pirate", str(server.sources / "pirate")) == 201
    assert await load("other", "https://other/a") == 400
    assert len(hung) == LOADS_AT_ONCE
    release.set()
    assert await asyncio.gather(*hanging) == [400] * len(hanging)


async def test_waiting_loads_are_bounded_and_hosts_forgotten() -> None:
    places = LoadLimits()
    release = asyncio.Event()

    async def load(source: str) -> None:
        async with places.of(source):
            await release.wait()

    loads = [asyncio.create_task(load("s3://bucket/a")) for _ in range(LOADS_AT_ONCE + MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="are being loaded from s3://bucket") as refused:
        await load("s3://bucket/b")
    assert refused.value.status == 429
    release.set()
    await load("s3://other/b")
    await asyncio.gather(*loads)
    assert not places._hosts


@pytest.mark.parametrize("field", ["name", "source"])
async def test_names_and_sources_of_any_length_are_only_refused(server: Running, field: str) -> None:
    content = {"name": "a", "source": str(server.sources / "pirate")}
    for long in ("x" * 10_000, "a/" * 5000):
        reply = await server.http.post("/v1/adapters", json=content | {field: long})
        assert reply.status_code == 400
        assert len(reply.text) < 3000
