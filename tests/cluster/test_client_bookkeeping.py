"""Bookkeeping of a cluster's client, over engines that compute nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from structlog.testing import capture_logs

from lorikeet.adapters.description import AdapterDescription
from lorikeet.adapters.store import reference
from lorikeet.client.client import RequestOutput
from lorikeet.client.supervisor import EngineError
from lorikeet.cluster.adapters.folder import PoolFolderUnwritableError
from lorikeet.cluster.adapters.transport import LocalTransport, copy_error
from lorikeet.cluster.controller import adopter
from lorikeet.cluster.controller.autoscaler import Autoscaler
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.parts import ClusterCosts, ClusterPolicies, ClusterProcesses
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import AdapterInfo, Orchestrator
from lorikeet.cluster.placement.scaling import ScalingPolicy
from lorikeet.cluster.placement.service import LocalPlacementService
from lorikeet.cluster.routing.plain import RoundRobin
from lorikeet.cluster.tables import RoutingTable
from lorikeet.config import ClusterSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import Parked, RegisterAdapters, Shutdown, Submit
from lorikeet.core.plan import Token
from tests.adapters.builders import geometry, write_adapter
from tests.support.fake_engines import FakeHost
from tests.support.links import LinkedHost, notice_quickly
from tests.support.live import greedy, prompt
from tests.support.live_clusters import KV_STAYS
from tests.support.outputs import outputs_of
from tests.support.waiting import until

R0, R1, R2 = (ReplicaId(f"replica-{number}") for number in range(3))


@pytest.fixture
def adapter(tmp_path: Path) -> AdapterRef:
    return reference("a", write_adapter(tmp_path / "source"), geometry())


class Service(LocalPlacementService):
    """An orchestrator that notes what it is asked, and can be held up.

    Attributes:
        asked: so far.
        may_answer: answers wait for this.
    """

    def __init__(self) -> None:
        super().__init__(Orchestrator(FullReplication(), (R0,), 0.0))
        self.asked: list[tuple[str, object]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        new = tuple(adapters)
        await self._note("know", {each.adapter for each in new})
        return await super().register(new)

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        await self._note("drop", adapter)
        return await super().drop(adapter)

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        await self._note("set_replicas", set(replicas))
        return await super().set_replicas(replicas)

    async def _note(self, what: str, argument: object) -> None:
        self.asked.append((what, argument))
        await self.may_answer.wait()


class Cluster:
    """A client with all that it stands on.

    Attributes:
        hosts: by replica, made when they are asked for.
        service: places.
        pool_dir: for adapters; the settings name it if it ``stays``.
        client: of all this.
    """

    def __init__(
        self,
        pool_dir: Path,
        replicas: int,
        prefetch: bool = False,
        stays: bool = False,
        adoption: adopter.Adoption | None = None,
    ) -> None:
        self.hosts: dict[ReplicaId, FakeHost] = {}
        self.service = Service()
        self.pool_dir = pool_dir
        self.transport = LocalTransport(pool_dir)
        cluster = ClusterSettings(replicas=replicas, pool_dir=str(pool_dir) if stays else "")
        self.client = ClusterClient(
            Settings(ModelSettings("none"), cluster=cluster),
            ClusterProcesses(self.host, self.transport, self.service, adoption),
            ClusterPolicies(RoundRobin(), 3600.0, prefetch),
            ClusterCosts(KV_STAYS, KvBandwidth()),
        )

    def host(self, replica: ReplicaId) -> FakeHost:
        return self.hosts.setdefault(replica, FakeHost())


@asynccontextmanager
async def started(pool_dir: Path, replicas: int = 2, *, stays: bool = False) -> AsyncIterator[Cluster]:
    """Start a cluster whose replicas join in their order, in which round robin then takes them."""
    cluster = Cluster(pool_dir, replicas, stays=stays)
    hosts = [cluster.host(replica) for replica in (R0, R1, R2)[:replicas]]
    for host in hosts:
        host.may_start.clear()
    starting = asyncio.create_task(cluster.client.start(lambda progress: None))
    try:
        for before, host in enumerate(hosts):
            await until(
                lambda before=before: len(cluster.client.fleet.open) == before, "as many replicas are open as before"
            )
            host.may_start.set()
        await starting
        yield cluster
    finally:
        starting.cancel()
        await cluster.client.close()
        cluster.transport.close()


async def test_start_places_once_on_all_replicas(tmp_path: Path) -> None:
    async with started(tmp_path / "pool", replicas=3) as cluster:
        assert cluster.service.asked == [("set_replicas", {R0, R1, R2})]
        assert await cluster.client.add_replica() == "replica-3"
        assert cluster.service.asked[1:] == [("set_replicas", {R0, R1, R2, "replica-3"})]


async def asked_for(cluster: Cluster, adapter: AdapterRef) -> None:
    """Have an adapter brought to the only replica by a request, which ends."""
    handle = cluster.client.submit(greedy("first", prompt(8), 5, adapter))
    (engine,) = cluster.hosts[R0].engines
    await until(lambda: engine.heard_of(Submit), "the engine has got a request")
    handle.abort()


async def test_adapter_registered_again_during_its_drop_stays(tmp_path: Path, adapter: AdapterRef) -> None:
    async with started(tmp_path / "pool", replicas=1) as cluster:
        cluster.client.register_adapters([adapter])
        await asked_for(cluster, adapter)
        cluster.service.may_answer.clear()
        dropping = asyncio.create_task(cluster.client.drop_adapter(adapter.digest))
        await until(
            lambda: ("drop", adapter.digest) in cluster.service.asked, "the service has been told to drop the adapter"
        )
        cluster.client.register_adapters([adapter])
        cluster.service.may_answer.set()
        assert await dropping == 0
        await until(lambda: cluster.client.describe().shares, "the adapters have homes")
        assert cluster.client.copies() == {(adapter.digest, R0)}
        assert cluster.client.describe().copies.deletes == 0
        assert await cluster.client.drop_adapter(adapter.digest) == 10
        assert cluster.client.copies() == set()


async def test_a_request_may_come_before_its_adapter_is_made_known(tmp_path: Path, adapter: AdapterRef) -> None:
    async with started(tmp_path / "pool", replicas=1) as cluster:
        await asked_for(cluster, adapter)
        cluster.client.register_adapters([adapter])
        assert cluster.client.copies() == {(adapter.digest, R0)}


@pytest.mark.parametrize("stays", [True, False])
async def test_copies_stay_after_the_end_where_the_settings_say_where(
    tmp_path: Path, adapter: AdapterRef, stays: bool
) -> None:
    async with started(tmp_path / "pool", replicas=1, stays=stays) as cluster:
        cluster.client.register_adapters([adapter])
        await asked_for(cluster, adapter)
    assert (tmp_path / "pool" / R0 / adapter.digest).exists() == stays


async def test_table_from_before_a_restart_copies_only_registered_adapters(tmp_path: Path, adapter: AdapterRef) -> None:
    cluster = Cluster(tmp_path / "pool", 1, prefetch=True)
    await cluster.service.register([AdapterInfo(adapter.digest, adapter.max_rank, adapter.weight_bytes)])
    await cluster.client.start(lambda progress: None)
    cluster.client.register_adapters([adapter])
    await until(lambda: cluster.client.copies() == {(adapter.digest, R0)}, "the client knows of the copy at R0 alone")
    assert cluster.client.describe().copies.failed == 0
    await cluster.client.close()
    cluster.transport.close()


@pytest.mark.parametrize("is_complete", [True, False])
async def test_answer_ended_by_a_stop_string_counts_and_an_aborted_one_does_not(
    tmp_path: Path, is_complete: bool
) -> None:
    async with started(tmp_path / "pool", replicas=1) as cluster:
        averages = cluster.client.fleet.averages
        before = averages.output_tokens
        cluster.client.submit(greedy("x", prompt(8), 5)).abort(is_complete=is_complete)
        assert averages.output_tokens == (1 if is_complete else before)


async def give_up(cluster: Cluster, replica: ReplicaId, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a replica's engine where none can be started again."""
    monkeypatch.setattr("lorikeet.client.supervisor.MAX_FAILED_STARTS", 1)
    host = cluster.hosts[replica]
    host.error = OSError("no room")
    host.engines[-1].kill()
    await until(lambda: replica not in cluster.client.views, "the replica is gone")


@pytest.mark.slow
async def test_given_up_replica_releases_its_machine(
    tmp_path: Path, adapter: AdapterRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path / "pool") as cluster:
        await cluster.transport.provide(adapter, R0)
        cluster.client.register_adapters([adapter])
        await give_up(cluster, R0, monkeypatch)
        await until(lambda: cluster.hosts[R0].is_closed, "the first replica's host is closed")
        assert not cluster.hosts[R1].is_closed
        assert (cluster.pool_dir / R0 / adapter.digest).is_dir(), "a head that is started anew finds it"
        other = LocalTransport(cluster.pool_dir)
        assert list(await other.held(R0)) == [adapter.digest]
        other.close()
        await until(lambda: cluster.service.asked[-1] == ("set_replicas", {R1}), "the service knows of R1 alone")


@pytest.mark.slow
async def test_given_up_replica_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.cluster.controller.client.REPLACE_S", 0.01)
    async with started(tmp_path / "pool") as cluster:
        cluster.host(R2).error = OSError("no room")
        next_one = ReplicaId("replica-3")
        await give_up(cluster, R0, monkeypatch)
        await until(lambda: next_one in cluster.client.views, "the second attempt has succeeded")
        assert cluster.client.size == 2
        await until(lambda: cluster.service.asked[-1] == ("set_replicas", {R1, next_one}), "the service knows of it")


@pytest.mark.slow
async def test_adapter_is_kept_while_a_request_of_a_lost_replica_needs_it(
    tmp_path: Path, adapter: AdapterRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path / "pool") as cluster:
        cluster.client.register_adapters([adapter])
        handle = cluster.client.submit(greedy("x", prompt(8), 5, adapter))
        await until(lambda: cluster.hosts[R0].engines[0].heard_of(Submit), "R0's engine has got the request")
        dropping = asyncio.create_task(cluster.client.drop_adapter(adapter.digest))
        await until(
            lambda: ("drop", adapter.digest) in cluster.service.asked, "the service has been told to drop the adapter"
        )
        await give_up(cluster, R0, monkeypatch)
        await until(lambda: cluster.hosts[R1].engines[0].heard_of(Submit), "R1's engine has got the request")
        (decided,) = handle.timings.decisions
        assert decided.why == "replica-0 died, and replica-1 got the request; it goes on after 0 tokens of the answer"
        assert not dropping.done()
        handle.abort()
        assert await dropping == 10
        assert cluster.client.copies() == set()


@pytest.mark.parametrize("is_known_again", [False, True])
async def test_copies_dropped_while_a_replica_was_away_are_deleted_on_return(
    tmp_path: Path, adapter: AdapterRef, is_known_again: bool
) -> None:
    async with started(tmp_path / "pool") as cluster:
        cluster.client.register_adapters([adapter])
        host, copy = cluster.hosts[R0], cluster.pool_dir / R0 / adapter.digest
        handle = cluster.client.submit(greedy("x", prompt(8), 5, adapter))
        await until(lambda: host.engines[0].heard_of(Submit), "the engine has got a request")
        handle.abort()
        host.may_start.clear()
        host.engines[0].kill()
        await until(lambda: len(cluster.client.fleet) == 1, "one replica is in the fleet")
        await cluster.client.drop_adapter(adapter.digest)
        assert copy.is_dir()
        if is_known_again:
            cluster.client.register_adapters([adapter])
        host.may_start.set()
        await until(lambda: len(cluster.client.fleet) == 2, "two replicas are in the fleet")
        if is_known_again:
            assert cluster.client.copies() == {(adapter.digest, R0)}
        else:
            await until(lambda: cluster.client.describe().copies.deletes == 1, "one copy has been deleted")
            assert not copy.exists()
            assert cluster.client.copies() == set()


@pytest.mark.slow
async def test_a_replica_stays_if_all_others_are_lost_while_it_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path / "pool") as cluster:
        handle = cluster.client.submit(greedy("first", prompt(8), 5))
        engine = cluster.hosts[R0].engines[0]
        await until(lambda: engine.heard_of(Submit), "the engine has got a request")
        leaving = asyncio.create_task(cluster.client.remove_replica(R0, drain_s=3600.0))
        await until(lambda: cluster.client.size == 1, "the client has one replica")
        await give_up(cluster, R1, monkeypatch)
        with pytest.raises(EngineError, match="replica-0 is kept"):
            await leaving
        later = cluster.client.submit(greedy("later", prompt(8), 5))
        await until(lambda: len(engine.heard_of(Submit)) == 2, "the engine has got two requests")
        assert cluster.client.size == 1
        for each in (handle, later):
            each.abort()


async def test_autoscaler_does_not_remove_a_leaving_replica_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.cluster.controller.client._DRAIN_CHECK_S", 3600.0)
    async with started(tmp_path / "pool", replicas=3) as cluster:
        handles = [cluster.client.submit(greedy(str(number), prompt(8), 5)) for number in range(4)]
        hosts = [cluster.hosts[replica] for replica in (R0, R1, R2)]
        await until(
            lambda: sum(len(host.engines[0].heard_of(Submit)) for host in hosts) == 4,
            "the engines have got four requests",
        )
        leaving = asyncio.create_task(cluster.client.remove_replica(R2, drain_s=3600.0))
        await until(lambda: cluster.client.size == 2, "the client has two replicas")
        hosts[2].may_start.clear()
        hosts[2].engines[0].kill()
        await until(lambda: len(cluster.client.fleet) == 2, "two replicas are in the fleet")
        scaler = Autoscaler(cluster.client, cluster.service, ScalingPolicy(1, 3), drain_s=0.0)
        assert scaler._least_busy() == R1
        leaving.cancel()
        for handle in handles:
            handle.abort()


@pytest.mark.slow
async def test_requests_fail_when_the_last_replica_is_lost_and_none_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path / "pool", replicas=1) as cluster:
        cluster.host(R1).may_start.clear()
        starting = asyncio.create_task(cluster.client.add_replica())
        await until(lambda: cluster.client.size == 2, "the client has two replicas")
        await give_up(cluster, R0, monkeypatch)
        handle = cluster.client.submit(greedy("x", prompt(8), 5))
        cluster.hosts[R1].error = OSError("no room")
        cluster.hosts[R1].may_start.set()
        with pytest.raises(EngineError, match="no room"):
            await starting
        with pytest.raises(EngineError, match="no other replica is left"):
            async for _ in outputs_of(handle):
                pass
        with pytest.raises(EngineError, match="no other replica is left"):
            cluster.client.submit(greedy("y", prompt(8), 5))


async def test_removed_replica_leaves_no_copies(tmp_path: Path, adapter: AdapterRef) -> None:
    async with started(tmp_path / "pool") as cluster:
        cluster.client.register_adapters([adapter])
        handles = [cluster.client.submit(greedy(str(n), prompt(8), 5, adapter)) for n in range(2)]
        engines = [cluster.hosts[replica].engines[0] for replica in (R0, R1)]
        await until(lambda: all(engine.heard_of(Submit) for engine in engines), "every engine has got a request")
        assert cluster.client.copies() == {(adapter.digest, R0), (adapter.digest, R1)}
        await cluster.client.remove_replica(R0)
        assert cluster.client.copies() == {(adapter.digest, R1)}
        assert not (cluster.pool_dir / R0).exists()
        assert cluster.hosts[R0].is_closed
        assert cluster.service.asked[-1] == ("set_replicas", {R1})
        await until(lambda: len(engines[1].heard_of(Submit)) == 2, "the second engine has got two requests")
        for handle in handles:
            handle.abort()


async def test_copies_of_an_earlier_head_are_found_for_adapters_known_later(
    tmp_path: Path, adapter: AdapterRef
) -> None:
    earlier = LocalTransport(tmp_path / "pool")
    await earlier.provide(adapter, R0)
    earlier.close()
    async with started(tmp_path / "pool") as cluster:
        cluster.client.register_adapters([adapter])
        assert cluster.client.copies() == {(adapter.digest, R0)}
        (first,), (second,) = (cluster.hosts[replica].engines for replica in (R0, R1))
        await until(lambda: first.heard_of(RegisterAdapters), "the first engine knows the adapters")
        (known,) = first.heard_of(RegisterAdapters)[0].adapters
        assert known.folder == str(cluster.pool_dir / R0 / adapter.digest)
        handles = [cluster.client.submit(greedy(str(n), prompt(8), 5, adapter)) for n in range(2)]
        await until(lambda: first.heard_of(Submit) and second.heard_of(Submit), "both engines have got a request")
        counts = cluster.client.describe().copies
        assert (counts.provisions, counts.fetches) == (0, 1), "the other fetches it from there"
        for handle in handles:
            handle.abort()


async def test_a_replica_cannot_be_taken_out_while_it_starts(tmp_path: Path) -> None:
    async with started(tmp_path / "pool", replicas=1) as cluster:
        cluster.host(R1).may_start.clear()
        starting = asyncio.create_task(cluster.client.add_replica())
        await until(lambda: cluster.client.size == 2, "the client has two replicas")
        with pytest.raises(EngineError, match="replica-1 is still being started"):
            await cluster.client.remove_replica(R1)
        cluster.hosts[R1].may_start.set()
        assert await starting == R1
        assert list(cluster.client.views) == [R0, R1]
        await cluster.client.remove_replica(R1)
        assert cluster.hosts[R1].engines[0].returncode == 0


async def test_failed_replica_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(tmp_path / "pool", replicas=1) as cluster:
        released: list[ReplicaId] = []
        monkeypatch.setattr(cluster.transport, "release", released.append)
        cluster.host(R1).error = OSError("no room")
        with pytest.raises(EngineError, match="no room"):
            await cluster.client.add_replica()
        assert released == [R1]
        assert cluster.hosts[R1].is_closed
        assert cluster.client.size == 1


class FullDisks(LocalTransport):
    """A transport to replicas of which some have no room for adapters.

    Attributes:
        full: those replicas.
    """

    full: frozenset[ReplicaId] = frozenset()

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        if destination in self.full:
            raise copy_error("a copy", PoolFolderUnwritableError(f"adapter {adapter.digest}: [Errno 28] No space left"))
        return await super().provide(adapter, destination)


@pytest.mark.slow
async def test_a_node_with_a_full_disk_fails_no_request_while_another_has_room(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "pool", 3)
    transport = FullDisks(tmp_path / "pool")
    cluster.client._files._transport = cluster.client._files.copier._transport = transport
    source = write_adapter(tmp_path / "source")
    refs = [
        msgspec.structs.replace(reference("a", source, geometry()), digest=AdapterDigest(f"{number:064x}"))
        for number in range(40)
    ]
    transport.full = frozenset((R1, R2))
    with capture_logs() as logs:
        try:
            await cluster.client.start(lambda progress: None)
            with patch("lorikeet.cluster.adapters.folder._checked", return_value=AdapterDescription("", (), 0)):
                handles = [
                    cluster.client.submit(greedy(f"r{number}", prompt(4), 5, ref)) for number, ref in enumerate(refs)
                ]
                (engine,) = cluster.hosts[R0].engines
                await until(lambda: len(engine.heard_of(Submit)) == 40, "the replica with room has every request")
            assert {handle.replica for handle in handles} == {R0}
            transport.full = frozenset((R0, R1, R2))
            failed = cluster.client.submit(
                greedy("late", prompt(4), 5, msgspec.structs.replace(refs[0], digest=AdapterDigest("f" * 64)))
            )
            (last,) = [output async for output in outputs_of(failed)]
        finally:
            await cluster.client.close()
            transport.close()
    assert last.finished is not None
    assert last.finished.error == "its adapter could not be loaded by any replica; the server's log says why"
    resting = [entry["replica"] for entry in logs if "gets no new ones" in entry["event"]]
    assert sorted(resting) == [R0, R1, R2], "each is logged once"
    assert not [entry for entry in logs if entry["event"] == "adapter copy failed"]


@pytest.mark.slow
async def test_streams_of_a_silent_machine_move_and_cluster_page_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice_quickly(monkeypatch)
    cluster = Cluster(tmp_path / "pool", 2)
    linked = cluster.hosts[R0] = LinkedHost()
    try:
        await cluster.client.start(lambda progress: None)
        handles = [cluster.client.submit(greedy(f"r{number}", prompt(4), 5)) for number in range(4)]
        assert {handle.replica for handle in handles} == {R0, R1}
        linked.may_start.clear()
        linked.links[0].is_cut = True
        (other,) = cluster.hosts[R1].engines
        await until(lambda: len(other.heard_of(Submit)) == 4, "the other replica has every request")
        state = cluster.client.describe().replicas[0]
        assert (state.alive, state.is_open, state.trouble) == (False, False, "the connection to its machine is lost")
    finally:
        linked.may_start.set()
        await cluster.client.close()
        cluster.transport.close()


class OtherServers:
    """Replicas of other servers; an ``Adoption``.

    Attributes:
        orphans: hosts of replicas without a server.
        asked: replicas that other servers ask for.
        released: replicas that were freed.
        looks: number of looks for replicas that other servers ask for.
    """

    def __init__(self) -> None:
        self.orphans: list[FakeHost] = []
        self.asked: list[ReplicaId] = []
        self.released: list[ReplicaId] = []
        self.looks = 0

    async def claim_orphan(self) -> adopter.Orphan | None:
        if not self.orphans:
            return None
        host = self.orphans.pop()
        return adopter.Orphan("server a", 5.0, lambda replica: host)

    def wanted(self) -> list[ReplicaId]:
        self.looks += 1
        return self.asked

    async def release(self, replica: ReplicaId) -> None:
        self.released.append(replica)
        self.asked.remove(replica)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> OtherServers:
    monkeypatch.setattr(adopter, "EVERY_S", 0.001)
    return OtherServers()


@asynccontextmanager
async def beside(others: OtherServers, pool_dir: Path) -> AsyncIterator[Cluster]:
    """Start a cluster of one replica beside other servers."""
    cluster = Cluster(pool_dir, 1, adoption=others)
    await cluster.client.start(lambda progress: None)
    try:
        yield cluster
    finally:
        await cluster.client.close()
        cluster.transport.close()


async def test_replica_without_a_server_is_adopted_and_its_request_goes_on(
    others: OtherServers, tmp_path: Path
) -> None:
    async with beside(others, tmp_path / "pool") as cluster:
        client = cluster.client
        orphan = FakeHost()
        others.orphans.append(orphan)
        await until(lambda: client.describe().adoptions.adopted == 1, "the replica is adopted")
        (engine,) = orphan.engines
        left = msgspec.structs.replace(
            greedy("id-0011-0", prompt(4), 9, logprobs=None), output_token_ids=[7, 8], exports=1
        )
        engine._say(Parked((left,)))
        await until(lambda: len(client._parked) == 1, "its requests are known")

        handle = client.submit(greedy("id-aabb-0", prompt(4), 9, logprobs=None))
        outputs: list[RequestOutput | EngineError] = []
        handle.listen(outputs.append)
        assert outputs == [RequestOutput((Token(7), Token(8)), None)]
        await until(lambda: engine.heard_of(Submit), "the request is where its KV is")
        assert engine.heard_of(Submit)[0].request.output_token_ids == [7, 8]
        assert handle.replica == R1
        assert client.describe().adoptions.resumed == 1
        (decided,) = [each for each in handle.timings.decisions if "adopted" in each.why]
        assert decided.why == "replica-1 was adopted from a lost server, with 2 tokens of the answer"
        others.asked.append(R1)
        await until(lambda: others.released == [R1], "the replica is handed back")
        assert not engine.heard_of(Shutdown), "its engine goes on"
        assert handle.replica == R0, "its request goes on elsewhere"
        assert not orphan.is_closed
    assert others.released == [R1], "a server that stops ends its replicas"
    assert cluster.hosts[R0].is_closed


async def test_replica_that_dies_while_it_is_adopted_is_lost_alone(others: OtherServers, tmp_path: Path) -> None:
    async with beside(others, tmp_path / "pool") as cluster:
        dead = FakeHost()
        dead.error = OSError("its machine is gone")
        good = FakeHost()
        others.orphans += [good, dead]
        await until(lambda: cluster.client.describe().adoptions.adopted == 1, "the other one is adopted")
        assert dead.is_closed
        assert len(cluster.client.describe().replicas) == 2


async def test_replica_that_cannot_be_handed_back_is_refused_once_for_each_wish(
    others: OtherServers, tmp_path: Path
) -> None:
    async with beside(others, tmp_path / "pool") as cluster:
        with capture_logs() as lines:
            others.asked.append(R0)
            await until(lambda: "replica is not handed back" in [each["event"] for each in lines], "it is refused")
            others.orphans.append(FakeHost())  # A later look has found the same wish.
            await until(lambda: cluster.client.describe().adoptions.adopted == 1, "another replica is adopted")
        assert [each["event"] for each in lines].count("replica is not handed back") == 1
        assert not others.released


async def test_nothing_is_adopted_while_the_engines_sleep(others: OtherServers, tmp_path: Path) -> None:
    async with beside(others, tmp_path / "pool") as cluster:
        await cluster.client.sleep()
        others.orphans.append(FakeHost())
        before = others.looks
        await until(lambda: others.looks > before + 1, "the adopter has had a whole turn")
        assert others.orphans
        await cluster.client.wake()
        await until(lambda: cluster.client.describe().adoptions.adopted == 1, "it is adopted once they are awake")
