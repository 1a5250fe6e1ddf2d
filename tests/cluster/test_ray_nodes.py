"""Three Ray nodes, only with --all: a node is lost and another comes, adapters move, and no stream notices."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import ray
from ray.cluster_utils import Cluster

from lorikeet.client.client import RequestHandle
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.open import open_cluster
from lorikeet.config import AdapterSettings, ClusterSettings
from lorikeet.core.events import FinishReason
from lorikeet.core.machine import free_memory_bytes, memory_limit_bytes
from lorikeet.core.request import Request
from lorikeet.engine.build import build_replica
from tests.support.live import TIE, finish, greedy, live_settings, make_adapter, make_model, prompt, run
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(600)]

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
ADAPTERS, REQUESTS = 60, 200
TURNS = "lorikeet:plain,placement=everywhere,routing=round-robin,placement_period_s=0.2"
"""Every replica is to have every adapter that it is asked for, wherever it was before."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Three nodes, each with room for one replica."""
    # Hooks for the exit could be set in the main thread only, and a node is added in another.
    cluster = Cluster(initialize_head=True, head_node_args=NODE, shutdown_at_exit=False)
    for _ in range(2):
        cluster.add_node(**NODE)
    yield cluster
    with suppress(Exception):
        ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("nodes") / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(nodes: Cluster, model: Path) -> AsyncIterator[ClusterClient]:
    """Three replicas on them."""
    settings = msgspec.structs.replace(
        live_settings(model, num_scheduler_steps=1, preset=TURNS),
        adapters=AdapterSettings(store_dir=str(model.parent / "store")),
        cluster=ClusterSettings(replicas=3, ray_address=nodes.address),
    )
    async with AsyncExitStack() as stack:
        made = open_cluster(settings, stack)
        stack.push_async_callback(made.close)
        await made.start(lambda progress: None)
        yield made


async def test_no_stream_notices_that_a_node_is_lost_and_another_comes(
    nodes: Cluster, client: ClusterClient, model: Path
) -> None:
    refs = [make_adapter(model.parent / f"a{number}", model, seed=number) for number in range(ADAPTERS)]
    client.register_adapters(refs)
    asked = [
        greedy(f"r{number}", prompt(6, seed=number), 12 + number % 20, refs[number % ADAPTERS])
        for number in range(REQUESTS)
    ]
    first, second = asked[:ADAPTERS], asked[ADAPTERS:]
    await check(client, [client.submit(request) for request in first], model)
    copies = client.describe().copies
    assert copies.provisions >= ADAPTERS
    provided = copies.provisions

    assert sum(node["Alive"] for node in ray.nodes()) == 3
    handles = [client.submit(request) for request in second]
    await until(lambda: sum(bool(each.token_ids) for each in handles) > len(handles) // 3, "a third has begun")
    await asyncio.to_thread(nodes.remove_node, nodes.list_all_nodes()[-1], allow_graceful=False)
    ray.kill(client._placement._service.actor, no_restart=False)
    await asyncio.to_thread(nodes.add_node, **NODE)
    await check(client, handles, model)

    await until(lambda: all(each.is_open for each in client.describe().replicas), "the replica is on the new node")
    state = client.describe()
    assert sum(each.restarts for each in state.replicas) == 1
    assert len({each.pid for each in state.replicas}) == 3
    assert copies.fetches > 0
    assert copies.peer_bytes == copies.fetched_bytes + copies.provided_bytes, "all of it from memory to memory"
    # On a machine with little memory left, copies go to its disk.
    assert copies.disk_bytes == 0 or free_memory_bytes() < memory_limit_bytes() / 3
    assert copies.provisions - provided < copies.fetches, "the second access is to a peer's memory"


async def check(client: ClusterClient, handles: list[RequestHandle], model: Path) -> None:
    """Wait for whole answers, and compare them with those of an engine that has nothing else to do."""
    ended = await asyncio.gather(*map(finish, handles))
    assert {finished.reason for finished, _ in ended} == {FinishReason.LENGTH}
    alone = await asyncio.to_thread(answers, model, [handle.request for handle in handles])
    for handle, (_, gaps), expected in zip(handles, ended, alone, strict=True):
        assert len(gaps) == handle.request.sampling.max_tokens, "nothing is lost or repeated"
        tie = next((at for at, gap in enumerate(gaps) if gap < TIE), len(gaps))
        assert handle.token_ids[:tie] == expected[:tie]


def answers(model: Path, requests: list[Request]) -> list[list[int]]:
    engine = build_replica(live_settings(model)).engine
    try:
        return run(engine, [msgspec.structs.replace(each, output_token_ids=[]) for each in requests])
    finally:
        engine.close()
