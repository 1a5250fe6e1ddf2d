"""Real Ray nodes under two servers: replicas of a lost server go on under the other one, with all that they hold."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support.live import write_adapter
from tests.support.served import Server, make_model, serving
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(300)]

COMPLETIONS = "/v1/completions"
MEMORY = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
TAKES_LONG = 14_000
"""Tokens that take longer than a lease."""
EVERY_S = 0.1
"""Interval of requests to servers that are under test."""
BODY = {"prompt": [5, 6, 7, 8, 9], "temperature": 0, "ignore_eos": True, "max_tokens": 480}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes, of which the first has room for one replica."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **MEMORY}, shutdown_at_exit=False)
    cluster.add_node(num_cpus=2, **MEMORY)
    yield cluster
    with suppress(Exception):
        ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, adapters and registry of all tests."""
    return tmp_path_factory.mktemp("adoption")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder / "tiny", positions=16384)


@pytest.fixture(scope="module")
def flags(nodes: Cluster, model: Path, folder: Path) -> list[str]:
    write_adapter(folder / "one", model, 1)
    write_adapter(folder / "two", model, 2)
    given = ["--replicas", "1", "--threads", "1", "--ray-address", nodes.address, "--dtype", "float32"]
    given += ["--registry-url", f"sqlite:///{folder}/registry.db", "--store-dir", str(folder / "store")]
    return [*given, "--lora-modules", f"one={folder / 'one'}", f"two={folder / 'two'}"]


async def cluster_of(server: Server) -> dict[str, Any]:
    return dict((await server.http.get("/v1/cluster")).json())


async def engines_of(server: Server) -> list[tuple[int, int]]:
    """Return the process id and the restarts of each open replica."""
    replicas = (await cluster_of(server))["replicas"]
    return [(each["pid"], each["restarts"]) for each in replicas if each["is_open"]]


def processes_of(machine: Any) -> list[psutil.Process]:
    """Return the processes of a machine that run replicas, that of Ray first."""
    (raylet,) = machine.all_processes["raylet"]
    running = psutil.Process(raylet.process.pid)
    return [running, *running.children(recursive=True)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def has_engines(server: Server, *expected: tuple[int, int]) -> bool:
    return set(expected) <= set(await engines_of(server))


async def answer(server: Server, model: str) -> list[int]:
    reply = await server.http.post(COMPLETIONS, json={**BODY, "model": model, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


class Stream:
    """One stream, whose client reads it as far as it comes."""

    def __init__(self, server: Server, model: str, name: str, max_tokens: int = 480) -> None:
        self.token_ids: list[int] = []
        self.is_whole = False
        self._body = {**BODY, "model": model, "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
        self._server = server
        self._headers = {"X-Request-Id": name}

    async def read(self) -> "Stream":
        with suppress(httpx.TransportError):
            async with self._server.http.stream("POST", COMPLETIONS, json=self._body, headers=self._headers) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        self.token_ids += json.loads(line[6:])["choices"][0]["token_ids"]
                    self.is_whole = self.is_whole or line == "data: [DONE]"
        return self


async def test_replica_of_a_killed_server_goes_on_under_the_other(
    flags: list[str], model: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        starting = (stack.enter_async_context(serving(model, tmp_path / name, *flags)) for name in "ab")
        killed, keeps = await asyncio.gather(*starting)
        expected = {name: await answer(keeps, name) for name in ("one", "two")}
        (lost,) = await engines_of(killed)
        (own,) = await engines_of(keeps)

        streams = [Stream(killed, name, f"stream-{name}") for name in ("one", "two")]
        reading = [asyncio.create_task(stream.read()) for stream in streams]
        await until(lambda: all(len(each.token_ids) > 20 for each in streams), "both streams have begun")
        killed.process.kill()
        await asyncio.gather(*reading)
        assert not any(stream.is_whole for stream in streams)

        await until(
            lambda: has_engines(keeps, lost, own), "the same engine is open at the other server", every_s=EVERY_S
        )
        there = (await cluster_of(keeps))["replicas"]
        (adopted,) = [each for each in there if each["pid"] == lost[0]]
        assert set(adopted["resident"]) == {"one", "two"}, "its adapters were not loaded again"
        again = [await Stream(keeps, name, f"stream-{name}").read() for name in ("one", "two")]
        for stream, name in zip(again, ("one", "two"), strict=True):
            assert stream.is_whole
            assert stream.token_ids == expected[name]
        state = await cluster_of(keeps)
        assert state["adoptions"] == {"adopted": 1, "handed_back": 0, "resumed": 2}
        assert (await keeps.http.get("/v1/requests/stream-one")).text.count("was adopted from a lost server") == 1

        # The server that comes back gets the replica, whose engine is still the same.
        back = await stack.enter_async_context(serving(model, tmp_path / "c", *flags))
        assert await engines_of(back) == [lost]
        assert await engines_of(keeps) == [own]
        assert await answer(back, "one") == expected["one"]
    assert not any(is_running(pid) for pid, _ in (lost, own)), "engines end with servers that are stopped"


@pytest.mark.long
async def test_server_that_was_paused_is_fenced_off(flags: list[str], model: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        starting = (stack.enter_async_context(serving(model, tmp_path / name, *flags)) for name in "ab")
        paused, keeps = await asyncio.gather(*starting)
        expected = await answer(keeps, "one")
        (lost,) = await engines_of(paused)
        (own,) = await engines_of(keeps)
        stream = Stream(paused, "one", "paused", max_tokens=TAKES_LONG)
        reading = asyncio.create_task(stream.read())
        await until(lambda: len(stream.token_ids) > 20, "the stream has begun")
        paused.signal(signal.SIGSTOP)
        await until(lambda: has_engines(keeps, lost, own), "the other server has adopted the engine", every_s=EVERY_S)
        paused.signal(signal.SIGCONT)

        await reading
        assert stream.is_whole
        assert len(stream.token_ids) == TAKES_LONG, "nothing is lost or repeated"
        assert stream.token_ids[:480] == expected

        async def has_asked_for_it() -> bool:
            return (await cluster_of(keeps))["adoptions"]["handed_back"] == 1

        await until(has_asked_for_it, "the other server has handed the engine back", every_s=EVERY_S)
        await until(
            lambda: has_engines(paused, (lost[0], 1)), "the same engine is open at its first server", every_s=EVERY_S
        )
        assert await engines_of(keeps) == [own]
        assert await answer(paused, "one") == expected


@pytest.mark.long
async def test_replica_that_dies_without_a_server_is_started_where_it_was(
    flags: list[str], model: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        starting = (stack.enter_async_context(serving(model, tmp_path / name, *flags)) for name in "ab")
        killed, keeps = await asyncio.gather(*starting)
        expected = await answer(keeps, "one")
        assert await answer(killed, "one") == expected, "its replica has the adapter's files"
        (lost,) = await engines_of(killed)
        killed.process.kill()
        os.kill(lost[0], signal.SIGKILL)

        async def has_two() -> bool:
            return len(await engines_of(keeps)) == 2

        await until(has_two, "its successor is open at the other server", every_s=EVERY_S)
        assert lost not in await engines_of(keeps)
        assert await answer(keeps, "one") == expected
        both = (await cluster_of(keeps))["replicas"]
        assert all(each["held"] for each in both), "the adapters of the lost engine are still there"


@pytest.mark.long
async def test_server_that_comes_back_finds_its_replica_and_one_that_does_not_leaves_nothing(
    flags: list[str], model: Path, tmp_path: Path
) -> None:
    flags = ["--orphan-timeout", "8", *flags]
    async with serving(model, tmp_path / "a", *flags) as server:
        expected = await answer(server, "one")
        (before,) = await engines_of(server)
        server.process.kill()
    async with serving(model, tmp_path / "a", *flags) as server:
        assert await engines_of(server) == [before], "the same engine"
        assert await answer(server, "one") == expected
        server.process.kill()
    await until(lambda: not is_running(before[0]), "the replica has ended itself", every_s=EVERY_S)


@pytest.mark.long
async def test_replica_on_another_machine_is_adopted_when_a_server_is_lost_with_its_own(
    nodes: Cluster, flags: list[str], model: Path, tmp_path: Path
) -> None:
    machines = [nodes.add_node(num_cpus=1, **MEMORY), *nodes.worker_nodes]
    flags = ["--replicas", "2", *flags[2:]]
    async with serving(model, tmp_path / "a", *flags) as killed, AsyncExitStack() as stack:
        engines = {pid for pid, _ in await engines_of(killed)}
        there = {each: engines & {process.pid for process in processes_of(each)} for each in machines}
        machine = next(each for each in machines if there[each])
        (stays,) = engines - there[machine]
        keeps = await stack.enter_async_context(serving(model, tmp_path / "b", "--replicas", "1", *flags[2:]))
        expected = await answer(keeps, "one")
        streams = [Stream(killed, "one", f"machine-{number}") for number in range(4)]
        reading = [asyncio.create_task(stream.read()) for stream in streams]
        await until(lambda: all(len(each.token_ids) > 20 for each in streams), "all streams have begun")
        killed.process.kill()
        for process in processes_of(machine):
            process.kill()
        await asyncio.gather(*reading)

        async def has_adopted() -> bool:
            return stays in {pid for pid, _ in await engines_of(keeps)}

        await until(has_adopted, "the replica that is left is open at the other server", every_s=EVERY_S)
        again = [await Stream(keeps, "one", f"machine-{number}").read() for number in range(4)]
        assert [(each.is_whole, each.token_ids) for each in again] == [(True, expected)] * 4
        assert (await cluster_of(keeps))["adoptions"]["adopted"] == 1
