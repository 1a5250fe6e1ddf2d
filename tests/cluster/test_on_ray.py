"""Real actors of an embedded Ray: deaths of engines and actors, copies of adapters, a restarted orchestrator."""

import asyncio
import ipaddress
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import msgspec
import psutil
import pytest
import pytest_asyncio
import ray
import ray.exceptions
import zmq.asyncio

from lorikeet.adapters.manifest import MANIFEST_FILE, check_unchanged
from lorikeet.adapters.registry import sqlite_url
from lorikeet.adapters.store import reference
from lorikeet.client.supervisor import EngineError, connect
from lorikeet.cluster.adapters.peer import PeerAddress
from lorikeet.cluster.adapters.transport import DestinationLost, Traffic, TransportError
from lorikeet.cluster.lease import FencedOff
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.placement.service import OrchestratorUnavailable
from lorikeet.cluster.ray.adoption import RayAdoption
from lorikeet.cluster.ray.host import RayHost, RayProcess, ReplicaResources
from lorikeet.cluster.ray.open import resources_of
from lorikeet.cluster.ray.orchestrator_actor import PlacementReply, RayPlacement
from lorikeet.cluster.ray.replica_actor import ReplicaOwner
from lorikeet.cluster.ray.start import RayError, RayInfo, start_ray, stop_ray
from lorikeet.cluster.ray.transport import RayTransport
from lorikeet.config import ClusterSettings, EngineSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import Progress, Shutdown, StepOutputs, Submit
from lorikeet.papers.loraserve.placement import RandomPlacement
from tests.adapters.builders import geometry, lora_tensors, write_adapter
from tests.support.live import greedy, live_settings, make_model, prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

R0, R1, R2 = REPLICAS = tuple(ReplicaId(f"r{number}") for number in range(3))
KNOWN = [AdapterInfo(AdapterDigest(f"a{number}"), 8, 1000) for number in range(6)]
PEER_KEY = b"a key of this file"
NOWHERE = "tcp://127.0.0.1:9"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def terminations() -> Iterator[list[int]]:
    """Signals that a server heard which set its handler before it started Ray."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def ray_info(terminations: list[int]) -> Iterator[RayInfo]:
    info = start_ray(cpus=8)
    yield info
    stop_ray()


@pytest.fixture
def make_host(ray_info: RayInfo, tmp_path: Path) -> Iterator[Callable[[ReplicaId], RayHost]]:
    """Hosts that share a pool folder and are closed at the end."""
    made: list[RayHost] = []

    def make(replica: ReplicaId) -> RayHost:
        resources = ReplicaResources(cpus=2.0, threads=1)
        made.append(RayHost(ray_info, replica, tmp_path / "pool", resources, PEER_KEY))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterRef:
    """One that no other test has put anywhere."""
    tensors = lora_tensors(seed=zlib.crc32(request.node.name.encode()))
    return reference("a", write_adapter(tmp_path / "source", tensors), geometry())


def transport_of(hosts: dict[ReplicaId, RayHost]) -> RayTransport:
    return RayTransport(hosts, "127.0.0.1", PEER_KEY)


async def start_idle(host: RayHost) -> RayProcess:
    """Start an engine that has nobody to talk to."""
    return await host.start(NOWHERE, b"{}")


async def killed_actor(host: RayHost) -> None:
    """Kill an actor's process as the kernel would."""
    place = await host.actor.describe.remote()
    os.kill(place.pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts(ray_info: RayInfo, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[ReplicaId, RayHost]]:
    """Three replicas with actors, whose engines have ended."""
    pool_dir = tmp_path_factory.mktemp("pool")
    resources = ReplicaResources(cpus=1.0)
    made = {replica: RayHost(ray_info, replica, pool_dir, resources, PEER_KEY) for replica in REPLICAS}
    processes = await asyncio.gather(*map(start_idle, made.values()))
    for process in processes:
        process.kill()
    await asyncio.gather(*(process.wait() for process in processes))
    yield made
    for host in made.values():
        host.close()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every replica taken for the only one on its machine."""
    monkeypatch.setattr(RayHost, "node_id", property(id))


# --- starting ------------------------------------------------------------------------------------


async def test_server_that_starts_ray_drains_on_sigterm(ray_info: RayInfo, terminations: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminations == [signal.SIGTERM]


async def test_ray_runs_once_in_a_process(ray_info: RayInfo) -> None:
    with pytest.raises(RayError, match="already"):
        start_ray()
    assert ray.is_initialized()


async def test_an_embedded_ray_listens_on_loopback_only(ray_info: RayInfo, hosts: dict[ReplicaId, RayHost]) -> None:
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [each for process in family for each in process.net_connections("tcp") if each.status == "LISTEN"]
    assert len(listening) > 3
    addresses = {ipaddress.ip_address(each.laddr.ip.removeprefix("::ffff:")) for each in listening}
    assert all(address.is_loopback for address in addresses), addresses
    assert ray_info.node_ip == "127.0.0.1"


async def test_another_process_joins_by_address(ray_info: RayInfo) -> None:
    assert ray_info.is_embedded
    code = (
        "from lorikeet.cluster.ray.start import RayInfo, start_ray, stop_ray; import sys\n"
        "info = start_ray(sys.argv[1]); print(repr(info)); stop_ray()"
    )
    joined = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, ray_info.address], capture_output=True, text=True, timeout=120
    )
    assert joined.stdout.splitlines() == [repr(ray_info._replace(is_embedded=False))], joined.stderr


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("ray://10.0.0.1:10001", "host:port"),
        ("127.0.0.1:9", "refused.*ray start"),
        ("here", "invalid literal.*host:port"),
    ],
)
async def test_error_of_an_unreachable_ray_cluster_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, address: str, reason: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RayError, match=reason):
        start_ray(address)


async def test_error_without_ray_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match=r"pip install 'lorikeet-serve\[cluster\]'"):
        start_ray()


# --- engines -------------------------------------------------------------------------------------


async def test_an_engine_beside_an_actor_answers_and_its_death_is_noticed(
    make_host: Callable[[ReplicaId], RayHost], tmp_path: Path, zmq_context: zmq.asyncio.Context
) -> None:
    host = make_host(R0)
    assert host.bind_address() == "tcp://127.0.0.1:*"
    settings = live_settings(make_model(tmp_path / "model"), threads=0)
    stages: list[Progress] = []
    connection = await connect(host, zmq_context, msgspec.json.encode(settings), stages.append)
    process = connection.process
    assert isinstance(process, RayProcess)
    assert stages
    assert connection.engine_info.max_model_len > 0

    engine = psutil.Process(process.pid)
    assert engine.nice() == psutil.Process().nice(), "as important as this process"
    assert engine.environ()["OMP_NUM_THREADS"] == "1"
    assert engine.cwd() == str(Path.cwd()), "relative paths mean what they mean here"
    place = await host.actor.describe.remote()
    assert (place.pid, place.engine_pid) == (engine.ppid(), process.pid)
    assert psutil.Process(place.pid).nice() == psutil.Process().nice()

    request = greedy("one", prompt(5), 7)
    connection.send(Submit(request))
    tokens = 0
    async for message in connection.messages():
        assert isinstance(message, StepOutputs)
        tokens += sum(len(output.tokens) for output in message.tokens)
        if any(isinstance(event, Finished) for event in message.events):
            break
    assert tokens == 7

    os.kill(process.pid, signal.SIGKILL)
    async for _ in connection.messages():
        pass
    assert process.returncode == -signal.SIGKILL
    assert await process.wait() == -signal.SIGKILL
    connection.close()

    again = await connect(host, zmq_context, msgspec.json.encode(settings), stages.append)
    assert again.process.pid != process.pid
    assert (await host.actor.describe.remote()).pid == place.pid, "the same actor"
    again.send(Shutdown())
    assert await again.process.wait() == 0
    again.close()


async def test_error_of_a_machine_without_the_model_names_it_and_the_remedy(
    make_host: Callable[[ReplicaId], RayHost], tmp_path: Path, zmq_context: zmq.asyncio.Context
) -> None:
    settings = live_settings(tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"machine .*127\.0\.0\.1.* has no model at .*nowhere: put it there"):
        await connect(make_host(R0), zmq_context, msgspec.json.encode(settings), lambda progress: None)


async def test_kill_does_not_wait_and_a_second_one_does_nothing(make_host: Callable[[ReplicaId], RayHost]) -> None:
    process = await start_idle(make_host(R0))
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    process.kill()
    assert await process.wait() == -signal.SIGKILL


async def test_a_second_start_ends_the_first_engine(make_host: Callable[[ReplicaId], RayHost]) -> None:
    host = make_host(R0)
    first, second = await start_idle(host), await start_idle(host)
    assert await first.wait() == -signal.SIGKILL
    assert psutil.pid_exists(second.pid)
    assert second.returncode is None


@pytest.mark.long
async def test_an_engine_ends_with_its_actor_and_the_next_start_makes_another(
    make_host: Callable[[ReplicaId], RayHost], adapter: AdapterRef
) -> None:
    host = make_host(R0)
    process = await start_idle(host)
    engine, actor = psutil.Process(process.pid), host.actor
    placed = await transport_of({R0: host}).provide(adapter, R0)
    await killed_actor(host)
    assert await process.wait() is None
    assert process.returncode is None
    process.kill()  # nobody is left to do it
    await asyncio.to_thread(engine.wait, 60)

    again = await start_idle(host)
    assert host.actor is not actor
    assert again.returncode is None
    assert await transport_of({R0: host}).held(R0) == {adapter.digest: placed.folder}, "its folder outlives an actor"


async def test_failed_actor_start_has_the_reason(make_host: Callable[[ReplicaId], RayHost]) -> None:
    first, twin = make_host(R0), make_host(R0)
    await start_idle(first)
    with pytest.raises(RayError, match="in use by another process"):
        await start_idle(twin)
    assert twin.actor is None


async def test_replica_without_resources_is_an_error(
    ray_info: RayInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.cluster.ray.host.START_TIMEOUT_S", 0.5)
    host = RayHost(ray_info, R0, tmp_path, ReplicaResources(cpus=64.0), PEER_KEY)
    with pytest.raises(RayError, match=r"64 CPUs .* has 8 CPUs"):
        await start_idle(host)
    assert host.actor is None


@pytest.mark.parametrize(
    ("engine", "replicas", "max_replicas", "cores", "expected"),
    [
        ({}, 2, 0, 8, ReplicaResources(4.0, 0, 4)),
        ({}, 1, 4, 8, ReplicaResources(2.0, 0, 2)),
        ({}, 4, 2, 8, ReplicaResources(2.0, 0, 2)),
        ({}, 16, 0, 8, ReplicaResources(0.5, 0, 1)),
        ({"tensor_parallel": 2}, 2, 0, 8, ReplicaResources(4.0, 0, 2)),
        ({"threads": 3}, 2, 4, 8, ReplicaResources(3, 0, 3)),
        ({}, 2, 4, None, ReplicaResources(1.0, 0, 1)),
        ({"threads": 3, "tensor_parallel": 2}, 2, 0, None, ReplicaResources(6, 0, 3)),
    ],
)
async def test_cores_are_shared_among_the_most_replicas(
    engine: dict[str, Any], replicas: int, max_replicas: int, cores: int | None, expected: ReplicaResources
) -> None:
    cluster = ClusterSettings(replicas=replicas, max_replicas=max_replicas)
    assert resources_of(Settings(engine=EngineSettings(**engine), cluster=cluster), cores) == expected


async def test_server_that_has_lost_its_replica_cannot_use_or_end_it(ray_info: RayInfo, tmp_path: Path) -> None:
    first, second = (RayAdoption("group", ReplicaOwner(name, f"server {name}", 60.0), PEER_KEY) for name in "ab")
    resources = ReplicaResources(cpus=1.0)
    lost = RayHost(ray_info, R0, tmp_path / "pool", resources, PEER_KEY, first)
    process = await start_idle(lost)
    engine = psutil.Process(process.pid)
    assert await second.claim() is None, "its owner is there"
    await lost.actor.release.remote(lost.fence)  # As if the owner had been silent for the term of the lease.
    claim = await second.claim()
    assert claim is not None
    assert claim.server == "server a"
    adopted = RayHost(ray_info, R1, tmp_path / "pool", resources, PEER_KEY, second, claim)
    assert (await start_idle(adopted)).pid == process.pid, "the same engine"

    actor = adopted.actor
    with pytest.raises(FencedOff, match="server b"):
        await lost.actor.start.remote(NOWHERE, b"{}", "", lost.fence)
    process.kill()
    lost.close()
    assert (await actor.describe.remote()).engine_pid == process.pid, "neither kills it"

    adopted.close()
    first.close()
    second.close()
    with pytest.raises(ray.exceptions.ActorDiedError):
        await actor.describe.remote()
    await asyncio.to_thread(engine.wait, 60)


# --- adapters ------------------------------------------------------------------------------------


async def test_adapters_travel_between_replicas(hosts: dict[ReplicaId, RayHost], adapter: AdapterRef) -> None:
    transport = transport_of(hosts)
    first, second = await asyncio.gather(transport.provide(adapter, R0), transport.provide(adapter, R1))
    third = await transport.copy(adapter, R0, R2)
    for replica, ref in zip(REPLICAS, (first, second, third), strict=True):
        assert Path(ref.folder).parts[-2:] == (replica, adapter.digest)
        check_unchanged(ref)
        assert reference("a", Path(ref.folder), geometry()).digest == adapter.digest
    await transport.delete(adapter, R0)
    await transport.delete(adapter, R0)
    held = [(await transport.held(replica)).get(adapter.digest) for replica in REPLICAS]
    assert held == [None, second.folder, third.folder]


async def test_adapters_are_shared_or_travel_from_memory_to_memory_or_through_the_object_store(
    hosts: dict[ReplicaId, RayHost], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = write_adapter(tmp_path / "large", r=4)
    text = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(text + " " * 1_000_000)  # beyond what goes along with a call of Ray
    large = reference("large", folder, geometry())

    async def travel(transport: RayTransport) -> None:
        await transport.provide(large, R0)
        copied = await transport.copy(large, R0, R1)
        for name in ("adapter_config.json", WEIGHTS):
            assert (Path(copied.folder) / name).read_bytes() == (folder / name).read_bytes()

    async def forget() -> None:
        for replica in (R0, R1):
            await transport.delete(large, replica)

    transport = transport_of(hosts)
    await travel(transport)
    assert transport.traffic == Traffic(peer_bytes=large.weight_bytes, disk_bytes=large.weight_bytes)
    folders = [(await transport.held(replica))[large.digest] for replica in (R0, R1)]
    first, second = (Path(folder, WEIGHTS).stat().st_ino for folder in folders)
    assert first == second, "on one machine they share the file"
    await transport.delete(large, R1)
    with Path(folders[0], WEIGHTS).open("ab") as weights:
        weights.write(b"x")
    with pytest.raises(TransportError, match=r"'large' from r0 to r1: .*was changed after it was stored"):
        await transport.copy(large, R0, R1)
    await forget()
    request.getfixturevalue("apart")
    transport = transport_of(hosts)
    await travel(transport)
    assert transport.traffic == Traffic(peer_bytes=2 * large.weight_bytes, disk_bytes=2 * large.weight_bytes)
    await forget()
    nowhere = PeerAddress("127.0.0.1", 9)
    behind_a_wall = transport_of(hosts)
    behind_a_wall._peers.address = nowhere
    with patch.object(RayHost, "peer", nowhere):
        await travel(behind_a_wall)
    assert behind_a_wall.traffic == Traffic(peer_bytes=0, disk_bytes=2 * large.weight_bytes)


@pytest.mark.usefixtures("apart")
async def test_unreadable_or_damaged_adapter_is_an_error(hosts: dict[ReplicaId, RayHost], adapter: AdapterRef) -> None:
    transport = transport_of(hosts)
    with pytest.raises(TransportError, match=r"'a' from r0 to r1: .*there is no"):
        await transport.copy(adapter, R0, R1)
    placed = await transport.provide(adapter, R0)
    weights = Path(placed.folder) / WEIGHTS
    stored = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stored.st_atime_ns, stored.st_mtime_ns))
    with pytest.raises(TransportError, match=r"'a' from r0 to r1: .*damaged"):
        await transport.copy(adapter, R0, R1)
    assert adapter.digest not in await transport.held(R1)
    (Path(adapter.folder) / WEIGHTS).unlink()
    with pytest.raises(TransportError, match=WEIGHTS):
        await transport.provide(adapter, R2)


@pytest.mark.usefixtures("apart")
async def test_source_death_during_a_copy_is_an_error(hosts: dict[ReplicaId, RayHost], adapter: AdapterRef) -> None:
    transport = transport_of(hosts)
    placed = await transport.provide(adapter, R0)
    config = Path(placed.folder) / "adapter_config.json"
    config.unlink()
    os.mkfifo(config)  # nobody writes to it, so reading it never ends
    copying = asyncio.ensure_future(transport.copy(adapter, R0, R1))
    await killed_actor(hosts[R0])
    with pytest.raises(TransportError, match="'a' from r0 to r1: r0 cannot be read"):
        await copying
    assert adapter.digest not in await transport.held(R1)
    with pytest.raises(TransportError, match="'a' to r0"):
        await transport.provide(adapter, R0)
    with pytest.raises(TransportError, match="r7 is not there"):
        await transport.copy(adapter, R1, ReplicaId("r7"))
    config.unlink()  # so that the next actor does not wait for it, either
    (await start_idle(hosts[R0])).kill()
    await transport.provide(adapter, R0)


async def test_destination_death_differs_from_a_failed_copy(
    make_host: Callable[[ReplicaId], RayHost], adapter: AdapterRef, tmp_path: Path
) -> None:
    host = make_host(R0)
    await start_idle(host)
    place = tmp_path / "pool" / R0 / adapter.digest
    place.mkdir()
    os.mkfifo(place / MANIFEST_FILE)  # nobody writes to it, so the copy does not end before the actor does
    transport = transport_of({R0: host})
    providing = asyncio.ensure_future(transport.provide(adapter, R0))
    await killed_actor(host)
    with pytest.raises(DestinationLost, match="'a' to r0"):
        await providing
    with pytest.raises(DestinationLost, match="'a' to r0"):
        await transport.provide(adapter, R0)
    host.close()
    with pytest.raises(DestinationLost, match="'a' to r0: r0 is not there"):
        await transport.provide(adapter, R0)


async def test_copies_are_deleted_on_the_replicas_machine(
    make_host: Callable[[ReplicaId], RayHost], adapter: AdapterRef, tmp_path: Path
) -> None:
    hosts = {R0: make_host(R0)}
    await start_idle(hosts[R0])
    transport = transport_of(hosts)
    await transport.provide(adapter, R0)
    await transport.discard(R0)
    assert not (tmp_path / "pool" / R0).exists()
    with pytest.raises(TransportError, match="'a' to r0"):
        await transport.provide(adapter, R0)
    transport.release(R0)
    transport.release(R0)
    assert hosts == {}
    with pytest.raises(TransportError, match="r0 is not there"):
        await transport.discard(R0)


async def test_call_is_retried_while_an_actor_does_not_answer(
    ray_info: RayInfo, adapter: AdapterRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.cluster.ray.transport._RETRY_S", 0.0)
    away = ray.exceptions.ActorUnavailableError("the network", None)
    host, actor = RayHost(ray_info, R0, Path(), ReplicaResources(cpus=1.0), PEER_KEY), Mock()
    host._actor = actor  # one that fails as it is told to
    transport = transport_of({R0: host})
    actor.fetch.remote = AsyncMock(side_effect=[away, away, "/there"])
    assert (await transport.provide(adapter, R0)).folder == "/there"
    actor.fetch.remote = AsyncMock(side_effect=[away, ray.exceptions.ActorDiedError()])
    with pytest.raises(DestinationLost):
        await transport.provide(adapter, R0)
    actor.fetch.remote = AsyncMock(side_effect=away)
    with pytest.raises(TransportError, match="the network") as failure:
        await transport.provide(adapter, R0)
    assert not isinstance(failure.value, DestinationLost), "nobody else would tell of it"


# --- the orchestrator ----------------------------------------------------------------------------


@pytest.fixture
def make_placement(ray_info: RayInfo, tmp_path: Path) -> Iterator[Callable[..., RayPlacement]]:
    made: list[RayPlacement] = []
    url = sqlite_url(tmp_path / "registry.sqlite3")

    def make(url: str = url, seed: int = 0, timeout_s: float = 60.0) -> RayPlacement:
        def orchestrator(now: float, replicas: tuple[ReplicaId, ...] = REPLICAS) -> Orchestrator:
            return Orchestrator(RandomPlacement(seed), replicas, now, OperatingPoints({8: 1000.0}))

        # What is defined here travels by value: the actors know nothing of this file.
        made.append(RayPlacement(orchestrator, url, "one", timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def incarnation(placement: RayPlacement) -> str:
    """Return who answers, "" if nobody does just now."""
    try:
        placed: PlacementReply = await placement.actor.drop.remote("", AdapterDigest("none"))
    except ray.exceptions.RayActorError:
        return ""
    return placed.incarnation


async def restarted(placement: RayPlacement) -> None:
    """Kill the actor's process, and wait until Ray has begun another."""
    before = await incarnation(placement)
    ray.kill(placement.actor, no_restart=False)

    async def is_another() -> bool:
        return await incarnation(placement) not in ("", before)

    await until(is_another, "another orchestrator answers")


@pytest.mark.long
async def test_a_killed_orchestrator_goes_on_from_the_registry(make_placement: Callable[..., RayPlacement]) -> None:
    placement = make_placement()
    await placement.set_replicas(REPLICAS)
    table = await placement.register(KNOWN)
    assert table.shares.keys() == {each.adapter for each in KNOWN}
    assert await placement.load() is None
    await placement.period(DemandReport())
    await placement.period(DemandReport(((KNOWN[0].adapter, 100),)))
    load = await placement.load()
    assert load is not None
    assert load > 0
    state = await placement.state()
    await restarted(placement)
    assert await placement.state() == state
    after = await placement.period(DemandReport(((KNOWN[0].adapter, 1_000_000),)))
    assert after is table, "what has not changed need not be followed"
    assert await placement.state() == state, "a period of a moment is not counted"
    await placement.period(DemandReport())
    assert len((await placement.state()).demand.adapters[KNOWN[0].adapter].history) == 2

    state = await placement.state()
    await restarted(placement)
    await placement.register(KNOWN)  # finds the new one before a period has ended
    await placement.period(DemandReport(((KNOWN[0].adapter, 1_000_000),)))
    assert await placement.state() == state, "nor then"
    await placement.period(DemandReport(((KNOWN[0].adapter, 100),)))
    assert len((await placement.state()).demand.adapters[KNOWN[0].adapter].history) == 3

    dropped = await placement.drop(KNOWN[0].adapter)
    assert dropped.epoch == table.epoch + 1
    later = make_placement(seed=1)
    assert (await later.register(KNOWN[2:])).shares == {
        each.adapter: table.shares[each.adapter] for each in KNOWN[2:]
    }, "another head's orchestrator goes on from there, without what is no longer"
    assert (await later.drop(KNOWN[2].adapter)).shares.keys() == {each.adapter for each in KNOWN[3:]}
    last = make_placement(seed=2)
    stored = await last.set_replicas(REPLICAS)
    assert stored.shares.keys() == {each.adapter for each in KNOWN[3:]}, "it has not said which there are"
    assert (await last.register(())).shares == {}, "it has, and there are none"
    await restarted(last)
    assert (await last.set_replicas(REPLICAS)).shares == {}


async def test_controller_restores_an_orchestrator_without_registry(
    make_placement: Callable[..., RayPlacement], tmp_path: Path
) -> None:
    placement = make_placement(sqlite_url(tmp_path / "never" / "registry.sqlite3"))
    await placement.register(KNOWN[:4])
    await placement.set_replicas(REPLICAS[:2])
    table = await placement.drop(KNOWN[3].adapter)
    await restarted(placement)
    after = await placement.register(KNOWN[3:5])
    assert {each: after.shares[each] for each in table.shares} == table.shares
    assert after.shares.keys() == {each.adapter for each in KNOWN[:5]}
    assert after.epoch > table.epoch
    assert {replica for _, replica in after.pairs()} == set(REPLICAS[:2])


async def test_lost_orchestrator_is_an_error(make_placement: Callable[..., RayPlacement]) -> None:
    placement = make_placement(timeout_s=0.0)
    await until(lambda: incarnation(placement), "the orchestrator answers")
    await placement.register(KNOWN)
    placement.close()

    async def ask_until_killed() -> None:
        while True:
            await placement.period(DemandReport())

    with pytest.raises(OrchestratorUnavailable):
        await ask_until_killed()
