"""A cluster of real engine processes, without Ray: streams survive replicas, and adapters are copied to requests."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from lorikeet.client.client import RequestHandle
from lorikeet.client.local_host import LocalHost
from lorikeet.client.supervisor import EngineError
from lorikeet.cluster.adapters.transport import LocalTransport
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.parts import ClusterCosts, ClusterPolicies, ClusterProcesses
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import DemandReport, Orchestrator
from lorikeet.cluster.placement.service import LocalPlacementService, OrchestratorUnavailable
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.cluster.routing.by_table import ByTable
from lorikeet.cluster.routing.plain import LeastLoaded, RoundRobin
from lorikeet.cluster.tables import RoutingTable
from lorikeet.config import ClusterSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.request import Request
from lorikeet.engine.build import build_replica
from lorikeet.papers.loraserve.placement import RandomPlacement
from tests.support.live import (
    TIE,
    engine_processes,
    finish,
    greedy,
    is_idle,
    live_settings,
    make_adapter,
    make_model,
    prompt,
    run,
)
from tests.support.live_clusters import KV_STAYS
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

FIRST, SECOND = ReplicaId("replica-0"), ReplicaId("replica-1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, model, seed) for seed, name in enumerate("abc")}


class Gone(LocalPlacementService):
    """An orchestrator that may be gone."""

    is_gone = False

    async def period(self, seen: DemandReport) -> RoutingTable:
        if self.is_gone:
            raise OrchestratorUnavailable("it was killed")
        return await super().period(seen)


@asynccontextmanager
async def cluster(
    model: Path, pool_dir: Path, routing: RoutingPolicy | None = None, *, replicas: int = 2, one_home: bool = False
) -> AsyncIterator[ClusterClient]:
    """Start a cluster, and close it at the end."""
    there = [ReplicaId(f"replica-{number}") for number in range(replicas)]
    placement = RandomPlacement(seed=1) if one_home else FullReplication()
    settings = msgspec.structs.replace(
        live_settings(model, num_scheduler_steps=1), cluster=ClusterSettings(replicas=replicas)
    )
    transport, service = LocalTransport(pool_dir), Gone(Orchestrator(placement, there, 0.0))
    routing = routing or RoundRobin()
    client = ClusterClient(
        settings,
        ClusterProcesses(lambda replica: LocalHost(), transport, service),
        ClusterPolicies(routing, 0.05),
        ClusterCosts(KV_STAYS, KvBandwidth()),
    )
    try:
        await client.start(lambda progress: None)
        yield client
    finally:
        await client.close()
        transport.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterClient]:
    """Two replicas, round robin, for all tests that leave them as they were, or better."""
    async with cluster(model, tmp_path_factory.mktemp("pool")) as started:
        yield started


def both_there(client: ClusterClient) -> bool:
    return [replica.is_open for replica in client.describe().replicas] == [True, True]


def all_idle(client: ClusterClient) -> bool:
    return all(is_idle(view.stats) for view in client.views.values())


async def begun(*handles: RequestHandle, tokens: int = 1) -> None:
    await until(
        lambda: all(len(handle.token_ids) >= tokens for handle in handles), "every request has its first tokens"
    )


def kill(client: ClusterClient, replica: ReplicaId) -> None:
    pid = client.views[replica].process_id
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def mixed(adapters: dict[str, AdapterRef], count: int = 12, tokens: int = 100) -> list[Request]:
    versions = [None, *adapters.values()]
    return [
        greedy(f"{index}", prompt(10 + index, seed=index), tokens + index, versions[index % 4])
        for index in range(count)
    ]


def answers_alone(model: Path, requests: list[Request]) -> list[list[int]]:
    """What one engine says to each when it has nothing else to do."""
    engine = build_replica(live_settings(model)).engine
    try:
        return [run(engine, [request])[0] for request in requests]
    finally:
        engine.close()


async def check_answers(model: Path, handles: list[RequestHandle]) -> None:
    """Every answer is what an engine with nothing else to do says, but for ties."""
    ties = 0
    ends = [await finish(handle) for handle in handles]
    alone = await asyncio.to_thread(answers_alone, model, [handle.request for handle in handles])
    for handle, expected, (finished, gaps) in zip(handles, alone, ends, strict=True):
        assert finished.reason is FinishReason.LENGTH, finished
        assert len(gaps) == len(handle.token_ids) == handle.request.sampling.max_tokens, "each token came once"
        if expected != handle.token_ids:
            pairs = zip(expected, handle.token_ids, strict=True)
            first = next(at for at, (one, other) in enumerate(pairs) if one != other)
            assert gaps[first] < TIE, f"{handle.request.request_id} differs from token {first} on"
            ties += 1
    assert ties <= 1


async def test_round_robin_answers_equal_those_of_one_engine(
    client: ClusterClient, model: Path, adapters: dict[str, AdapterRef]
) -> None:
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters)]
    await begun(*handles)
    assert {handle.replica for handle in handles} == {FIRST, SECOND}
    await check_answers(model, handles)
    await until(lambda: all_idle(client), "no replica holds anything")
    state = client.describe()
    assert state.copies.provisions == 3
    assert state.copies.fetches >= 1
    assert state.copies.failed == 0
    assert [replica.held for replica in state.replicas] == [3, 3]
    for replica in state.replicas:
        read = {target: use.bytes for target, use in replica.links.items() if target.startswith("source-")}
        assert sum(read.values()) > 0, f"{replica.id} has read adapters, and says {replica.links}"
    folders = [Path(ref.folder) for ref in adapters.values()]
    assert all(folder.is_dir() for folder in folders), "the adapters' own files are left alone"


async def test_streams_of_a_killed_replica_go_on_at_the_other(
    client: ClusterClient, model: Path, adapters: dict[str, AdapterRef]
) -> None:
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters, tokens=200)]
    await begun(*handles, tokens=3)
    assert not any(handle.timings.finished_s for handle in handles), "all are in flight when the replica dies"
    there = [handle for handle in handles if handle.replica == FIRST]
    assert there
    kill(client, FIRST)
    await check_answers(model, handles)
    assert all(handle.deaths == (handle in there) for handle in handles)
    await until(lambda: both_there(client), "both replicas are up")
    assert client.views[FIRST].restarts >= 1
    held = client.describe().replicas[0].held
    assert held == 3, "what lay in its folder was found again"


@pytest.mark.long
async def test_requests_wait_while_all_replicas_restart(
    client: ClusterClient, model: Path, adapters: dict[str, AdapterRef]
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters, count=4, tokens=150)]
    await begun(*handles)
    kill(client, FIRST)
    kill(client, SECOND)
    await until(lambda: not client.alive, "no replica is up")
    handles.append(client.submit(greedy("newcomer", prompt(5), 10, adapters["a"])))
    await check_answers(model, handles)
    await until(lambda: both_there(client), "both replicas are up")


async def test_sleeping_replicas_are_gone_and_all_requests_go_on_when_they_wake(
    client: ClusterClient, model: Path, adapters: dict[str, AdapterRef]
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters, count=4, tokens=150)]
    await begun(*handles)
    restarts = [view.restarts for view in client.views.values()]
    pids = [view.process_id for view in client.views.values()]
    await client.sleep()
    assert client.is_asleep
    assert not any(psutil.pid_exists(pid or 0) for pid in pids)
    assert not client.alive
    handles.append(client.submit(greedy("newcomer", prompt(5), 10, adapters["a"])))
    await client.wake()
    await check_answers(model, handles)
    assert all(handle.deaths == 0 for handle in handles)
    assert [view.restarts for view in client.views.values()] == restarts, "waking is no restart"
    await until(lambda: both_there(client), "both replicas are up")


async def test_requests_of_all_replicas_are_computed_again_under_another_salt(
    client: ClusterClient, model: Path, adapters: dict[str, AdapterRef]
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters, count=4, tokens=300)]
    await begun(*handles)
    client.recompute("salt")
    await check_answers(model, handles)
    await until(lambda: all_idle(client), "no replica holds anything")


async def test_a_moved_request_goes_on_without_a_gap_or_a_repeat(
    client: ClusterClient, model: Path, adapters: dict[str, AdapterRef]
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters, count=6, tokens=400)]
    handles.append(
        client.submit(greedy("sampled", prompt(9), 400, adapters["b"], temperature=1.0, seed=3, presence_penalty=0.5))
    )
    for round_ in range(4):
        await begun(*handles, tokens=5 + 10 * round_)
        running = [handle for handle in handles if len(handle.token_ids) < handle.request.sampling.max_tokens]
        assert running or round_, "on a busy machine answers may end before later rounds"
        for handle in running:
            target = SECOND if handle.replica == FIRST else FIRST
            assert client.move(handle.request.request_id, target)
            assert not client.move(handle.request.request_id, target), "it is on its way"
        await until(lambda: all(handle.replica is not None for handle in handles), "every request has a replica")
    await check_answers(model, handles)
    assert not client.move(RequestId("sampled"), FIRST), "it has ended"
    assert all(handle.deaths == 0 for handle in handles)
    await until(lambda: all_idle(client), "no replica holds anything")


async def test_an_aborted_request_gives_its_blocks_back_wherever_it_is(
    client: ClusterClient, adapters: dict[str, AdapterRef]
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    client.register_adapters(adapters.values())
    handles = [client.submit(request) for request in mixed(adapters, count=8, tokens=400)]
    await begun(*handles)
    for handle in handles:
        handle.abort()
        handle.abort()
    for handle in handles:
        assert (await finish(handle))[0].reason is FinishReason.ABORT
    await until(lambda: all_idle(client), "no replica holds anything")
    assert client.describe().unrouted == 0


async def test_a_dropped_adapter_leaves_every_replica_once_its_requests_have_ended(
    client: ClusterClient, model: Path, tmp_path: Path
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    ref = make_adapter(tmp_path / "d", model, seed=7)
    client.register_adapters([ref])
    before = [replica.held for replica in client.describe().replicas]
    handles = [client.submit(greedy(f"under d {number}", prompt(8), 60, ref)) for number in range(4)]
    await begun(*handles)
    dropping = asyncio.create_task(client.drop_adapter(ref.digest))
    await check_answers(model, handles)
    assert await dropping > 0
    assert [replica.held for replica in client.describe().replicas] == before
    assert Path(ref.folder).is_dir()
    assert await client.drop_adapter(ref.digest) == 0
    for view in client.views.values():
        await until(
            lambda view=view: view.stats and ref.digest not in view.stats.resident_adapters,
            "the replica has dropped the adapter",
        )  # type: ignore[misc]


async def test_adapter_with_missing_files_fails_only_its_own_requests(
    client: ClusterClient, model: Path, tmp_path: Path
) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    ref = msgspec.structs.replace(make_adapter(tmp_path / "e", model, seed=8), folder=str(tmp_path / "nowhere"))
    client.register_adapters([ref])
    handle, other = client.submit(greedy("e", prompt(8), 5, ref)), client.submit(greedy("base", prompt(8), 5))
    finished, _ = await finish(handle)
    assert finished.reason is FinishReason.ERROR
    assert "could not be loaded" in (finished.error or "")
    assert (await finish(other))[0].reason is FinishReason.LENGTH
    await client.drop_adapter(ref.digest)


async def test_without_the_orchestrator_requests_go_on_by_the_last_placement(
    model: Path, adapters: dict[str, AdapterRef], tmp_path: Path
) -> None:
    async with cluster(model, tmp_path, ByTable(seed=1), one_home=True) as client:
        client.register_adapters(adapters.values())
        await until(lambda: len(client.describe().shares) == 3, "three adapters have homes")
        homes = {digest: next(iter(shares)) for digest, shares in client.describe().shares.items()}
        gone = client._placement._service  # no other way to take it from a running head
        assert isinstance(gone, Gone)
        gone.is_gone = True
        handles = [client.submit(request) for request in mixed(adapters)]
        await begun(*handles)
        for handle in handles:
            assert handle.request.digest is None or handle.replica == homes[handle.request.digest]
        await check_answers(model, handles)
        assert client.describe().copies.fetches == 0


@pytest.mark.long
async def test_replicas_come_and_go_under_load(model: Path, adapters: dict[str, AdapterRef], tmp_path: Path) -> None:
    async with cluster(model, tmp_path, LeastLoaded(), replicas=1) as client:
        with pytest.raises(EngineError, match="the only one"):
            await client.remove_replica(FIRST)
        client.register_adapters(adapters.values())
        handles = [client.submit(request) for request in mixed(adapters, count=6, tokens=250)]
        await begun(*handles)
        assert await client.add_replica() == SECOND
        handles += [client.submit(greedy(f"late {n}", prompt(9, seed=n), 200, adapters["a"])) for n in range(4)]
        await begun(*handles)
        assert SECOND in {handle.replica for handle in handles[-4:]}, "the newcomer has nothing to do"
        process = psutil.Process(client.views[FIRST].process_id)
        await client.remove_replica(FIRST)
        assert not process.is_running()
        assert list(client.views) == [SECOND]
        await check_answers(model, handles)
        assert all(handle.deaths == 0 for handle in handles)


@pytest.mark.long
async def test_drained_replica_finishes_its_requests(client: ClusterClient, model: Path) -> None:
    await until(lambda: both_there(client), "both replicas are up")
    leaving = next(iter(client.views))
    handles = [client.submit(greedy(f"drained {number}", prompt(8, seed=number), 40)) for number in range(4)]
    await begun(*handles)
    there = [handle for handle in handles if handle.replica == leaving]
    await client.remove_replica(leaving, drain_s=60.0)
    assert there
    assert all(handle.replica == leaving for handle in there)
    await check_answers(model, handles)


async def test_failed_replica_start_fails_the_cluster_start(model: Path, tmp_path: Path) -> None:
    before = engine_processes()
    with pytest.raises(EngineError, match="nowhere"):
        async with cluster(Path("/nowhere/at-all"), tmp_path):
            pass
    await until(lambda: engine_processes() <= before, "the engine processes have ended")


async def test_closing_ends_every_stream_and_every_engine(client: ClusterClient) -> None:
    """The last test: it closes the cluster that the others share. One of its two replicas may have left."""
    if len(client.describe().replicas) < 2:
        await client.add_replica()
    await until(lambda: both_there(client), "both replicas are up")
    running = [psutil.Process(view.process_id) for view in client.views.values()]
    handle = client.submit(greedy("long", prompt(8), 450))
    await begun(handle)
    await client.close()
    with pytest.raises(EngineError, match="shutting down"):
        await finish(handle)
    assert not any(process.is_running() for process in running)
    with pytest.raises(EngineError, match="shutting down"):
        client.submit(greedy("late", prompt(4), 1))
