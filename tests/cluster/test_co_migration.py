"""Co-migration over real engines: requests of a busy replica continue at an idle one."""

import asyncio
import math
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import structlog

from lorikeet.client.client import RequestHandle
from lorikeet.cluster.build import MigrationCosts, build_migration, build_move_times
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.co_migration import CoMigrationController
from lorikeet.cluster.migration.problem import CoMigrationSettings, MoveTimes, ReviewOutcome
from lorikeet.cluster.open import open_cluster
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.service import LocalPlacementService
from lorikeet.config import ClusterSettings, EngineSettings, ReplicaStart
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile, encode_profile
from lorikeet.papers.toppings.first_fit import FirstFit
from tests.support.live import answer_alone, finish, greedy, live_settings, make_adapter, make_model, prompt
from tests.support.live_clusters import local_client, replicas_of, started
from tests.support.profiles import round_profile
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

REPLICAS = (ReplicaId("replica-0"), ReplicaId("replica-1"))
ALWAYS_SHORT = CoMigrationSettings(queue_delay_s=-1.0, time_limit_s=30.0)
"""Every replica is short of time; the solver may take as much as it needs on a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterRef:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "a", model, seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterClient]:
    """Two replicas, of which that which joined first gets all that fits."""
    service = LocalPlacementService(Orchestrator(FullReplication(), REPLICAS, 0.0))
    settings = replicas_of(live_settings(model, num_scheduler_steps=1), 2)
    async with started(local_client(settings, tmp_path_factory.mktemp("pool"), service, FirstFit())) as client:
        yield client


def costs_of(move_s: Callable[[int], float]) -> MigrationCosts:
    """What co-migration knows where KV cannot travel."""
    return MigrationCosts(MoveTimes(move_s, math.inf, 1.0, None), 0.0, ALWAYS_SHORT)


def migration_of(client: ClusterClient, move_s: float = 0.0) -> CoMigrationController:
    return CoMigrationController(client, costs_of(lambda tokens: move_s))


def ordered(client: ClusterClient) -> tuple[ReplicaId, ReplicaId]:
    """Return the replica that gets all requests, and the other one."""
    busy, idle = (member.info.replica for member in client.fleet.members())
    return busy, idle


def is_admitted(client: ClusterClient, request_id: str) -> bool:
    entry = client.fleet.entry(RequestId(request_id))
    return entry is not None and entry.admitted_s is not None


@contextmanager
def paused(client: ClusterClient) -> Iterator[None]:
    """Let no request get on, or end, however long the test takes."""
    processes = [view.process_id for view in client.views.values()]
    assert all(processes)
    for process_id in processes:
        os.kill(process_id or 0, signal.SIGSTOP)
    try:
        yield
    finally:
        for process_id in processes:
            os.kill(process_id or 0, signal.SIGCONT)


async def begun(client: ClusterClient, adapter: AdapterRef, name: str) -> list[RequestHandle]:
    client.register_adapters([adapter])
    versions = (None, adapter)
    handles = [
        client.submit(greedy(f"{name} {number}", prompt(9, seed=number), 300, versions[number % 2]))
        for number in range(6)
    ]
    await until(lambda: all(len(handle.token_ids) > 2 for handle in handles), "every request has three tokens")
    assert {handle.replica for handle in handles} == {ordered(client)[0]}
    return handles


async def test_requests_move_with_their_adapter_and_keep_their_answers(
    client: ClusterClient, adapter: AdapterRef, model: Path
) -> None:
    handles = await begun(client, adapter, "moved")
    migration = migration_of(client, move_s=0.01)
    with paused(client):
        plan = await migration.review()
    assert plan.outcome is ReviewOutcome.PLANNED
    assert client.describe().moves == len(plan.moves) == 3
    await until(lambda: all(handle.replica is not None for handle in handles), "every request has a replica")
    assert Counter(handle.replica for handle in handles) == dict.fromkeys(REPLICAS, 3)
    with paused(client):
        assert (await migration.review()).outcome is ReviewOutcome.NO_BETTER, "both have as much to do"
    for handle in handles:
        finished, gaps = await finish(handle)
        assert finished.reason is FinishReason.LENGTH, finished
        assert len(gaps) == handle.request.sampling.max_tokens
        assert handle.deaths == 0
    moved = next(handle for handle in handles if handle.request.request_id == plan.moves[0].request_id)
    assert moved.token_ids == await asyncio.to_thread(answer_alone, model, moved.request)


async def test_moved_request_costs_more_to_move_again(client: ClusterClient) -> None:
    """A request takes E. Two of four move; when the others have ended, one of them could move back.

    They are long, so that none ends of itself before the test has seen all of them run.
    """
    handles = [client.submit(greedy(f"dear {number}", prompt(9, seed=number), 1900)) for number in range(4)]
    await until(lambda: all(handle.token_ids for handle in handles), "every request has its first token")
    move_s = 0.6 * client.fleet.averages.execution_s(None)
    migration = migration_of(client, move_s)
    with paused(client):
        assert len((await migration.review()).moves) == 2
    await until(
        lambda: all(is_admitted(client, f"dear {number}") for number in range(4)), "all four requests are admitted"
    )
    for handle in [handle for handle in handles if handle.replica == ordered(client)[0]]:
        handle.abort()
    with paused(client):
        assert (await migration.review()).outcome is ReviewOutcome.NO_BETTER, "E and 0.6 E twice there, 2 E here"
        plan = await migration_of(client, move_s).review()
    assert plan.outcome is ReviewOutcome.PLANNED, "who does not know of the earlier move finds 1.6 E there"
    for handle in handles:
        handle.abort()


async def test_a_move_is_left_out_if_its_request_ends_while_the_plan_is_made(
    client: ClusterClient, adapter: AdapterRef
) -> None:
    handles = await begun(client, adapter, "late")
    before = client.describe().moves
    reviewing = asyncio.create_task(migration_of(client).review())
    await asyncio.sleep(0)  # it has looked, and plans on its thread
    for handle in handles:
        handle.abort()
    plan = await reviewing
    assert plan.moves
    assert client.describe().moves == before


async def test_reviews_go_on_after_a_failed_one(client: ClusterClient, adapter: AdapterRef) -> None:
    asked: list[int] = []

    def move_s(tokens: int) -> float:
        asked.append(tokens)
        if len(asked) == 1:
            raise ValueError("nobody knows")
        return 0.0

    handles = await begun(client, adapter, "again")
    before = client.describe().moves
    with structlog.testing.capture_logs() as logged:  # rendering the traceback would take longer than the requests
        reviewing = asyncio.create_task(CoMigrationController(client, costs_of(move_s), review_s=0.0).run())
        await until(lambda: client.describe().moves > before, "a request has moved")
        reviewing.cancel()
        await asyncio.wait({reviewing})
    assert [entry["log_level"] for entry in logged if "review" in entry["event"]] == ["error"]
    for handle in handles:
        handle.abort()


async def test_nothing_moves_to_a_replica_that_drains_while_the_plan_is_made(
    client: ClusterClient, adapter: AdapterRef
) -> None:
    handles = await begun(client, adapter, "stays")
    before, (busy, idle) = client.describe().moves, ordered(client)
    reviewing = asyncio.create_task(migration_of(client).review())
    await asyncio.sleep(0)
    leaving = asyncio.create_task(client.remove_replica(idle, drain_s=60.0))
    await asyncio.sleep(0)
    assert (await reviewing).moves
    assert client.describe().moves == before
    await leaving
    assert {handle.replica for handle in handles} == {busy}
    for handle in handles:
        handle.abort()


async def test_server_with_a_comigration_preset_reviews(tmp_path: Path) -> None:
    profile = tmp_path / "round.toml"
    profile.write_text(encode_profile(round_profile()))
    watched = []
    for preset in ("lorikeet:plain", "lorikeet:plain,comigration=true"):
        settings = live_settings(tmp_path, preset=preset, profile=str(profile))
        settings = msgspec.structs.replace(settings, cluster=ClusterSettings(replicas=2, start=ReplicaStart.LOCAL))
        async with AsyncExitStack() as stack:
            client = open_cluster(settings, stack)
            stack.push_async_callback(client.close)
            # Whether a review moves anything is up to the time that the solver gets, so only this shows for sure.
            watched.append(
                [work.__self__ for work in client._background if isinstance(work.__self__, CoMigrationController)]
            )
    assert [len(each) for each in watched] == [0, 1]


async def test_move_costs_come_from_the_profile_which_comigration_needs() -> None:
    published = load_profile("a100-80-llama-2-7b")

    def costs(preset: str, profile: CostProfile | None = published, **engine: Any) -> MigrationCosts | None:
        settings = EngineSettings(preset=preset, **engine)
        return build_migration(settings, build_move_times(settings, profile, lambda: 20e9))

    dlora, toppings = costs("dlora", host_memory_bytes=0), costs("toppings:dlora")
    assert dlora is not None
    assert toppings is not None
    assert 0 < dlora.times.move_s(10) < dlora.times.move_s(1000)
    assert (dlora.reserved_share, toppings.reserved_share) == (0.05, 0.0)
    assert costs("lorikeet:plain", None) is None
    unprofiled = costs("lorikeet:plain,comigration=true", None)
    assert unprofiled is not None
    assert 0 < unprofiled.times.move_s(10) < unprofiled.times.move_s(1000)
    # Half a megabyte a token at 20 GB/s; a prefill on that GPU takes longer. Without a host tier KV cannot move.
    hosted, ranks = (costs("dlora", host_memory_bytes=2**30, tensor_parallel=ranks) for ranks in (1, 2))
    assert hosted is not None
    assert ranks is not None
    assert not dlora.times.transfers_kv(1000)
    assert ranks.times.transfers_kv(1000)
    assert hosted.times.transfers_kv(1000)
    assert hosted.times.move_s(1000) == pytest.approx(1000 * 2**19 / 20e9 + hosted.times.prefill_s(1))
