"""A whole cluster from settings, on Ray, with a replica's actor killed during its streams."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import pytest_asyncio

from lorikeet.adapters.manifest import MANIFEST_FILE
from lorikeet.client.client import RequestHandle
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.open import open_cluster
from lorikeet.config import AdapterSettings, ClusterSettings, ReplicaStart, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from tests.support.live import (
    engine_processes,
    finish,
    greedy,
    has_ended,
    live_settings,
    make_adapter,
    make_model,
    prompt,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ROW = "lorikeet:plain,placement=random,routing=table,placement_period_s=0.2"
"""Every adapter has one home, by the orchestrator's table."""


def settings_of(model: Path, folder: Path, preset: str, start: ReplicaStart) -> Settings:
    return msgspec.structs.replace(
        live_settings(model, num_scheduler_steps=1, preset=preset),
        adapters=AdapterSettings(store_dir=str(folder / "store")),
        cluster=ClusterSettings(replicas=2, start=start),
    )


class Running(NamedTuple):
    """A cluster of two replicas, and the adapters that it knows."""

    client: ClusterClient
    model: Path
    pool_dir: Path
    adapters: list[AdapterRef]


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[ClusterClient]:
    async with AsyncExitStack() as stack:
        client = open_cluster(settings, stack)
        stack.push_async_callback(client.close)
        await client.start(lambda progress: None)
        yield client


async def check_all(handles: list[RequestHandle]) -> None:
    for handle in handles:
        finished, gaps = await finish(handle)
        assert finished.reason is FinishReason.LENGTH, finished
        assert len(gaps) == handle.request.sampling.max_tokens


@asynccontextmanager
async def opened_for_good(folder: Path, start: ReplicaStart) -> AsyncIterator[Running]:
    """Open a cluster with four adapters, and see at the end that none of its engines is left."""
    model = make_model(folder / "model")
    settings, pool_dir = settings_of(model, folder, ROW, start), folder / "pool"
    cluster = msgspec.structs.replace(settings.cluster, pool_dir=str(pool_dir))
    before = engine_processes()
    async with opened(msgspec.structs.replace(settings, cluster=cluster)) as client:
        yield Running(client, model, pool_dir, await known(client, folder, model, "abcd"))
    assert engine_processes() <= before


async def known(client: ClusterClient, folder: Path, model: Path, names: str) -> list[AdapterRef]:
    """Make adapters known, and wait until each has a home."""
    adapters = [make_adapter(folder / name, model, seed=ord(name) - ord("a")) for name in names]
    client.register_adapters(adapters)
    await until(
        lambda: {each.digest for each in adapters} <= client.describe().shares.keys(), "every adapter has a home"
    )
    return adapters


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on_ray(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Share one cluster on Ray among tests after which its replicas are up again."""
    async with opened_for_good(tmp_path_factory.mktemp("on-ray"), ReplicaStart.RAY) as running:
        yield running


async def test_streams_outlive_a_local_replica(tmp_path: Path) -> None:
    async with opened_for_good(tmp_path, ReplicaStart.LOCAL) as running:
        await check_streams_outlive_a_replica(running, lambda engine: engine)


@pytest.mark.long
async def test_streams_outlive_the_actor_of_a_replica_on_ray(on_ray: Running) -> None:
    await check_streams_outlive_a_replica(on_ray, psutil.Process.parent)


async def check_streams_outlive_a_replica(
    running: Running, to_kill: Callable[[psutil.Process], psutil.Process | None]
) -> None:
    client, adapters = running.client, running.adapters
    homes = {digest: set(shares) for digest, shares in client.describe().shares.items()}
    assert {replica for home in homes.values() for replica in home} == set(client.views)
    versions: list[AdapterRef | None] = [None, *adapters]
    handles = [client.submit(greedy(str(n), prompt(9, seed=n), 450, versions[n % 5])) for n in range(10)]
    await until(lambda: all(handle.token_ids for handle in handles), "every request has its first token")
    for handle in handles:
        assert handle.request.digest is None or {handle.replica} == homes[handle.request.digest]
    first = next(iter(client.views))
    engine = psutil.Process(client.views[first].process_id)
    killed = to_kill(engine)
    assert killed is not None
    killed.kill()
    await check_all(handles)
    await until(lambda: client.views[first].restarts == 1, "the first replica has restarted")
    await until(
        lambda: [replica.is_open for replica in client.describe().replicas] == [True, True], "both replicas are open"
    )
    assert client.describe().shares.keys() == homes.keys()
    assert has_ended(engine)


async def test_requests_resume_elsewhere_if_a_replica_dies_during_an_adapter_copy(
    on_ray: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lorikeet.client.supervisor.DRAIN_TIMEOUT_S", 3.0
    )  # the copy's end is heard before the engine's
    client = on_ray.client
    adapters = [*await known(client, tmp_path, on_ray.model, "efgh"), *on_ray.adapters]
    homes = {digest: next(iter(shares)) for digest, shares in client.describe().shares.items()}
    adapter = adapters[0]
    home = homes[adapter.digest]
    parent = psutil.Process(client.views[home].process_id).parent()
    assert parent is not None
    fifo = on_ray.pool_dir / home / adapter.digest / MANIFEST_FILE
    fifo.parent.mkdir()
    os.mkfifo(fifo)  # storing the adapter reads it first, and goes on when something is written
    handles = [client.submit(greedy(f"early {n}", prompt(9, seed=n), 20, adapter)) for n in range(4)]
    writer = await written_to(fifo)
    fifo.unlink()  # the next actor is not to wait for it, too
    parent.kill()
    await asyncio.to_thread(parent.wait)
    other = next(each for each in adapters if each is not adapter and homes[each.digest] == home)
    handles += [client.submit(greedy(f"late {n}", prompt(9, seed=n), 20, other)) for n in range(4)]
    await check_all(handles)
    os.close(writer)
    assert not any(handle.deaths for handle in handles), "no engine had them yet"


async def written_to(fifo: Path) -> int:
    """Open a pipe as soon as somebody reads from it."""

    def try_to_open() -> tuple[int, ...]:
        try:
            return (os.open(fifo, os.O_WRONLY | os.O_NONBLOCK),)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return ()

    (opened,) = await until(try_to_open, "a reader opens the pipe")
    return opened
