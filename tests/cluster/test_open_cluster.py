"""A whole cluster from settings: on Ray, with a replica's actor killed in the midst of its streams."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from lorikeet.adapters.store import MANIFEST_FILE
from lorikeet.client.streams import RequestHandle
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.open import open_cluster
from lorikeet.config import AdapterSettings, ClusterSettings, ConfigError, ReplicaStart, Settings
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
    until,
)

ROW = "lorikeet:plain,placement=random,routing=table,placement_period_s=0.2"
"""Every adapter has one home, by the orchestrator's table."""


def settings_of(model: Path, folder: Path, preset: str, start: ReplicaStart) -> Settings:
    return msgspec.structs.replace(
        live_settings(model, num_scheduler_steps=1, preset=preset),
        adapters=AdapterSettings(store_dir=str(folder / "store")),
        cluster=ClusterSettings(replicas=2, start=start),
    )


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


@pytest.mark.parametrize("start", list(ReplicaStart))
async def test_streams_outlive_a_replica_and_what_runs_it(start: ReplicaStart, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    adapters = [make_adapter(tmp_path / name, model, seed) for seed, name in enumerate("abcd")]
    before = engine_processes()
    async with opened(settings_of(model, tmp_path, ROW, start)) as client:
        client.register_adapters(adapters)
        await until(lambda: len(client.describe().shares) == len(adapters))
        homes = {digest: set(shares) for digest, shares in client.describe().shares.items()}
        assert {replica for home in homes.values() for replica in home} == set(client.views)
        versions: list[AdapterRef | None] = [None, *adapters]
        handles = [client.submit(greedy(str(n), prompt(9, seed=n), 450, versions[n % 5])) for n in range(10)]
        await until(lambda: all(handle.token_ids for handle in handles))
        for handle in handles:
            assert handle.request.digest is None or {handle.replica} == homes[handle.request.digest]
        first = next(iter(client.views))
        engine = psutil.Process(client.views[first].process_id)
        parent = engine.parent()
        assert parent is not None
        (engine if start is ReplicaStart.LOCAL else parent).kill()
        await check_all(handles)
        await until(lambda: client.views[first].restarts == 1)
        await until(lambda: [replica.is_open for replica in client.describe().replicas] == [True, True])
        assert client.describe().shares.keys() == homes.keys()
        assert has_ended(engine)
    assert engine_processes() <= before


async def test_requests_whose_adapter_was_on_its_way_to_a_replica_that_dies_go_on_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lorikeet.client.supervisor.DRAIN_TIMEOUT_S", 3.0
    )  # the copy's end is heard before the engine's
    model = make_model(tmp_path / "model")
    adapters = [make_adapter(tmp_path / name, model, seed) for seed, name in enumerate("abcd")]
    settings = settings_of(model, tmp_path, ROW, ReplicaStart.RAY)
    pool_dir = tmp_path / "pool"
    cluster = msgspec.structs.replace(settings.cluster, pool_dir=str(pool_dir))
    async with opened(msgspec.structs.replace(settings, cluster=cluster)) as client:
        client.register_adapters(adapters)
        await until(lambda: len(client.describe().shares) == len(adapters))
        homes = {digest: next(iter(shares)) for digest, shares in client.describe().shares.items()}
        adapter = adapters[0]
        home = homes[adapter.digest]
        parent = psutil.Process(client.views[home].process_id).parent()
        assert parent is not None
        fifo = pool_dir / home / adapter.digest / MANIFEST_FILE
        fifo.parent.mkdir()
        os.mkfifo(fifo)  # whoever stores the adapter looks there, and goes on when something is written
        handles = [client.submit(greedy(str(n), prompt(9, seed=n), 20, adapter)) for n in range(4)]
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
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        await asyncio.sleep(0.005)


async def test_what_a_row_lacks_is_said_before_anything_is_started(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="operating points"):
            open_cluster(settings_of(model, tmp_path, "loraserve", ReplicaStart.RAY), stack)
