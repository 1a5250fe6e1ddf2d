"""The number of replicas follows the load, with real engines."""

import socket
from math import isnan
from pathlib import Path

import msgspec
import pytest

from lorikeet.adapters.registry import sqlite_url
from lorikeet.client.client import RequestHandle
from lorikeet.client.local_host import LocalHost
from lorikeet.client.supervisor import EngineProcess
from lorikeet.cluster.controller.autoscaler import Autoscaler
from lorikeet.cluster.controller.registry import ClusterRegistry
from lorikeet.cluster.controller.registry_writer import RegistryWriter
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.scaling import ScalingPolicy
from lorikeet.cluster.placement.service import LocalPlacementService, OrchestratorUnavailable
from lorikeet.config import ClusterSettings, ReplicaStart, ServerSettings, Settings
from lorikeet.core.events import FinishReason
from lorikeet.core.ids import ReplicaId
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo
from lorikeet.costs.profile import OperatingLoads, encode_profile
from lorikeet.papers.toppings.first_fit import FirstFit
from tests.support.live import finish, greedy, live_settings, make_adapter, make_model, prompt
from tests.support.live_clusters import local_client, opened, replicas_of, started
from tests.support.profiles import round_profile
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FIRST, SECOND, THIRD, FOURTH = (ReplicaId(f"replica-{number}") for number in range(4))


class Loaded(LocalPlacementService):
    """An orchestrator that says what it is told to of the load; infinity: it is gone, not a number: it fails."""

    told: float | None = None

    async def load(self) -> float | None:
        if self.told == float("inf"):
            raise OrchestratorUnavailable("it was killed")
        if self.told is not None and isnan(self.told):
            raise ValueError("a mistake")
        return self.told


class Fails(LocalHost):
    """A machine on which nothing can be started."""

    async def start(self, address: str, settings: bytes) -> EngineProcess:
        raise OSError("no room")


async def check_all(handles: list[RequestHandle]) -> None:
    for handle in handles:
        finished, gaps = await finish(handle)
        assert finished.reason is FinishReason.LENGTH, finished
        assert len(gaps) == handle.request.sampling.max_tokens


async def test_replicas_come_at_once_and_leave_when_they_have_long_been_too_many(tmp_path: Path) -> None:
    service = Loaded(Orchestrator(FullReplication(), (FIRST,), 0.0))
    settings = replicas_of(live_settings(make_model(tmp_path / "model"), num_scheduler_steps=1), 1)
    hosts = {SECOND: Fails()}
    client = local_client(
        settings, tmp_path / "pool", service, FirstFit(), lambda replica: hosts.get(replica) or LocalHost()
    )
    client.add_background_task(Autoscaler(client, service, ScalingPolicy(1, 3), drain_s=60.0).run)
    url = sqlite_url(tmp_path / "later" / "registry.sqlite3")
    written, registry = ClusterRegistry(url, "head"), ClusterRegistry(url, "head")
    client.add_background_task(RegistryWriter(client, written, pause_s=0.01).run)
    async with started(client):
        await client.period()
        assert client.wanted is None, "nobody knows the load"
        service.told = 2.0
        await until(lambda: len(client.views) == 3, "the client has three replicas")
        assert list(client.views) == [FIRST, THIRD, FOURTH], "what could not be started was tried again"
        assert (client.wanted, client.size) == (3, 3)
        (tmp_path / "later").mkdir()
        await until(
            lambda: len(registry.replicas()) == 3, "the registry has three replicas"
        )  # the registry was gone until now

        handles = [client.submit(greedy(str(number), prompt(8, seed=number), 60)) for number in range(3)]
        for unknown in (float("inf"), float("nan")):
            service.told = unknown
            for _ in range(6):
                await client.period()
            assert client.size == 3, "who does not know the load changes nothing"
        service.told = 0.1
        await until(lambda: list(client.views) == [FIRST], "only the first replica is left")
        for _ in range(6):
            await client.period()
        assert (client.wanted, client.size) == (1, 1)
        assert [replica.id for replica in client.describe().replicas] == [FIRST], "the busiest has stayed"
        await check_all(handles)
        assert all(handle.deaths == 0 for handle in handles)
        await until(
            lambda: [preset.replica for preset in registry.replicas()] == [FIRST],
            "the registry has the first replica alone",
        )
    assert registry.replicas() == []
    for each in (registry, written):
        each.close()


def settings_of(model: Path, folder: Path, **engine: object) -> Settings:
    preset = "lorikeet:plain,routing=least-loaded,placement_period_s=0.1"
    return msgspec.structs.replace(
        live_settings(model, num_scheduler_steps=1, preset=preset, **engine),
        server=ServerSettings(slo_ttft_s=1.0, drain_timeout_s=60.0),
        cluster=ClusterSettings(
            start=ReplicaStart.LOCAL, max_replicas=2, registry_url=sqlite_url(folder / "registry.sqlite3")
        ),
    )


@pytest.mark.long
async def test_a_server_goes_by_its_profiles_operating_points(tmp_path: Path) -> None:
    """A replica bears a token per second here, so that the load is too high however slow this machine is just now."""
    model, slo = make_model(tmp_path / "model"), Slo(ttft_s=1.0)
    points = OperatingLoads(KernelForm.UNPADDED, slo, 8, 20, 64, 512, {4: 1.0})
    profile = tmp_path / "round.toml"
    profile.write_text(encode_profile(round_profile(operating_points=(points,))))
    adapter = make_adapter(tmp_path / "a", model, seed=1)
    handles: list[RequestHandle] = []
    settings = settings_of(model, tmp_path, profile=str(profile))
    head = f"{model} at {socket.gethostname()}:{settings.server.port}"
    registry = ClusterRegistry(settings.cluster.registry_url, head)
    async with opened(settings) as client:
        client.register_adapters([adapter])
        while len(client.views) < 2:
            number = len(handles)
            handles.append(client.submit(greedy(str(number), prompt(8, seed=number), 20, (None, adapter)[number % 2])))
            await client.period()
        handles.append(client.submit(greedy("last", prompt(8), 200)))
        assert client.describe().wanted == 2
        await until(
            lambda: (adapter.digest, FIRST) in registry.copies(), "the registry has the copy at the first replica"
        )
        first = registry.replicas()[0]
        view = client.views[FIRST]
        assert (first.replica, first.epoch, first.address, first.pid) == (FIRST, 1, "localhost", view.process_id)
        await until(lambda: len(client.describe().replicas) == 1, "one replica is left")
        assert client.describe().wanted == 1
        await check_all(handles)
    assert (registry.replicas(), registry.copies()) == ([], set())
    registry.close()
