"""Requests that move between real engines with their KV."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import pytest
import pytest_asyncio

from lorikeet.client.client import RequestHandle
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.migration.problem import MoveTimes
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.service import LocalPlacementService
from lorikeet.cluster.routing.plain import LeastLoaded
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from lorikeet.core.ids import ReplicaId
from tests.support.live import (
    answer_alone,
    finish,
    greedy,
    is_idle,
    live_settings,
    make_adapter,
    make_model,
    prompt,
)
from tests.support.live_clusters import local_client, replicas_of, started
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

REPLICAS = (ReplicaId("replica-0"), ReplicaId("replica-1"))
PROMPT_TOKENS, ANSWER_TOKENS = 200, 300
"""The answer is long enough that a request can move twice before a fast engine has finished."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterRef:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "a", model, seed=1)


@asynccontextmanager
async def two_replicas(model: Path, pool_dir: Path) -> AsyncIterator[ClusterClient]:
    service = LocalPlacementService(Orchestrator(FullReplication(), REPLICAS, 0.0))
    settings = replicas_of(live_settings(model, num_scheduler_steps=1, host_memory_bytes=8 * 2**20), 2)
    times = MoveTimes(lambda tokens: tokens / 100, inf, 1.0, lambda: 1e9)
    async with started(local_client(settings, pool_dir, service, LeastLoaded(), times=times)) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterClient]:
    async with two_replicas(model, tmp_path_factory.mktemp("pool")) as client:
        yield client


def other(handle: RequestHandle) -> ReplicaId:
    assert handle.replica is not None
    return REPLICAS[1 - REPLICAS.index(handle.replica)]


def hit_tokens(client: ClusterClient, replica: ReplicaId) -> int:
    stats = client.views[replica].stats
    return 0 if stats is None else stats.prefix_hits_tokens


async def begun(client: ClusterClient, name: str, adapter: AdapterRef, tokens: int = 3) -> RequestHandle:
    await until(
        lambda: all(view.alive and view.stats is not None for view in client.views.values()),
        "every replica is up and has sent statistics",
    )
    client.register_adapters([adapter])
    handle = client.submit(greedy(name, prompt(PROMPT_TOKENS, seed=len(name)), ANSWER_TOKENS, adapter))
    await until(lambda: len(handle.token_ids) >= tokens, "the request has its first tokens")
    return handle


async def checked(handle: RequestHandle, model: Path) -> None:
    """See that the answer is what an engine alone says."""
    finished, gaps = await finish(handle)
    assert finished.reason is FinishReason.LENGTH, finished
    assert len(gaps) == handle.request.sampling.max_tokens
    assert handle.token_ids == await asyncio.to_thread(answer_alone, model, handle.request)


async def test_kv_goes_along_and_is_found(client: ClusterClient, adapter: AdapterRef, model: Path) -> None:
    handle = await begun(client, "there and back", adapter)
    before = {replica: hit_tokens(client, replica) for replica in REPLICAS}
    for number in (1, 2):
        target = other(handle)
        assert client.move(handle.request.request_id, target, with_kv=True)
        assert not client.move(handle.request.request_id, target, with_kv=True), "it is on its way"
        assert handle.request.request_id not in client.sent_s(), "nobody plans with it meanwhile"
        await until(lambda target=target: handle.replica == target, "the request has moved")
        tokens = len(handle.token_ids)  # the replica that it left has gone on until it let go
        await until(lambda tokens=tokens: len(handle.token_ids) > tokens + 9, "the request goes on")
        state = client.describe()
        assert (state.moves, state.moves_with_kv) == (number, number)
    await checked(handle, model)
    await until(  # not in between: statistics may come when a fast engine has finished
        lambda: all(hit_tokens(client, each) - before[each] > 0.9 * PROMPT_TOKENS for each in REPLICAS),
        "both targets have found the KV that came along",
    )
    await until(lambda: all(is_idle(view.stats) for view in client.views.values()), "no replica holds anything")


async def test_request_that_ends_before_its_export_is_not_moved(client: ClusterClient, adapter: AdapterRef) -> None:
    handle = await begun(client, "left", adapter)
    before = client.describe().moves
    assert client.move(handle.request.request_id, other(handle), with_kv=True)
    handle.abort()
    finished, _ = await finish(handle)
    assert finished.reason is FinishReason.ABORT
    await until(lambda: all(is_idle(view.stats) for view in client.views.values()), "no replica holds anything")
    assert client.describe().moves == before


@pytest.mark.long
async def test_replica_death_before_an_export_loses_nothing(
    client: ClusterClient, adapter: AdapterRef, model: Path
) -> None:
    handle = await begun(client, "orphaned", adapter)
    source = handle.replica
    assert source is not None
    pid = client.views[source].process_id
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it hears nothing any more
    assert client.move(handle.request.request_id, other(handle), with_kv=True)
    os.kill(pid, signal.SIGKILL)
    await checked(handle, model)
    assert handle.deaths == 1
    await until(
        lambda: len(client.views) == 2 and all(view.alive for view in client.views.values()), "both replicas are up"
    )


async def test_target_death_during_a_move_does_not_block_the_request(
    client: ClusterClient, adapter: AdapterRef, model: Path
) -> None:
    handle = await begun(client, "homeless", adapter)
    source, target = handle.replica, other(handle)
    assert source is not None
    pids = client.views[source].process_id, client.views[target].process_id
    assert None not in pids
    os.kill(pids[0], signal.SIGSTOP)  # type: ignore[arg-type]
    assert client.move(handle.request.request_id, target, with_kv=True)
    os.kill(pids[1], signal.SIGKILL)  # type: ignore[arg-type]
    await until(lambda: not client.views[target].alive, "the target is known to be down")
    os.kill(pids[0], signal.SIGCONT)  # type: ignore[arg-type]
    await checked(handle, model)
    await until(lambda: all(view.alive for view in client.views.values()), "every replica is up")


async def test_requests_of_a_removed_replica_move_with_their_kv(
    adapter: AdapterRef, model: Path, tmp_path: Path
) -> None:
    async with two_replicas(model, tmp_path) as client:
        # They begin together, so that none has ended when the replica is removed.
        handles = await asyncio.gather(*(begun(client, name, adapter) for name in ("a", "ab", "abc", "abcd")))
        leaving = handles[0].replica
        assert leaving is not None
        stays = other(handles[0])
        running = [handle for handle in handles if len(handle.token_ids) < ANSWER_TOKENS]
        there = [handle for handle in running if handle.replica == leaving]
        before, hits = client.describe(), hit_tokens(client, stays)
        await client.remove_replica(leaving)
        assert {handle.replica for handle in running if handle.replica} == {stays}
        after = client.describe()
        assert after.moves - before.moves == after.moves_with_kv - before.moves_with_kv == len(there) > 0
        for handle in handles:
            await checked(handle, model)
            assert handle.deaths == 0
        await until(
            lambda: hit_tokens(client, stays) - hits > 0.9 * PROMPT_TOKENS * len(there), "none of it was recomputed"
        )


async def test_speed_begins_as_a_guess_and_is_learned() -> None:
    speed = KvBandwidth()
    assert speed.bytes_per_s == pytest.approx(1e9)
    for _ in range(100):
        speed.add(2**30, half_s=1.0)
    assert speed.bytes_per_s == pytest.approx(2**30 / 2, rel=0.01)
    assert speed.transferred_bytes == 100 * 2**30
