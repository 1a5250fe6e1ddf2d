"""The channel between machines: it needs the key, and a broken connection is noticed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from lorikeet.client import supervisor
from lorikeet.client.client import EngineClient
from lorikeet.client.local_host import LocalHost
from lorikeet.client.supervisor import EngineError, EngineHost, EngineProcess, EngineSupervisor, connect
from lorikeet.config import (
    AdapterSettings,
    ClusterSettings,
    ServerSettings,
    Settings,
    for_engines,
)
from lorikeet.core.ids import ReplicaId
from lorikeet.core.messages import EngineInput, Fatal, FromEngine
from tests.client.listeners import FakeListener
from tests.support.fake_engines import HELLO, FakeEngine, FakeHost
from tests.support.links import LinkedHost, notice_quickly
from tests.support.live import greedy, live_settings, make_model, prompt
from tests.support.outputs import outputs_of
from tests.support.waiting import until

FORGED = msgspec.msgpack.encode(Fatal("forged"))


def stranger(context: zmq.asyncio.Context, address: str, kind: str) -> zmq.asyncio.Socket:
    """Connect as somebody who saw the address but was not told the key, and send a forged message."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    if kind == "other key":
        socket.curve_serverkey, _ = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
    socket.send(FORGED)
    return socket


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no key", "other key"])
async def test_a_stranger_neither_takes_the_engines_place_nor_speaks_for_it(
    zmq_context: zmq.asyncio.Context, kind: str
) -> None:
    class Raced(FakeHost):
        """Here somebody else connects before the engine does, and stays."""

        async def start(self, address: str, settings: bytes) -> FakeEngine:
            self.strangers = [stranger(zmq_context, address, kind) for _ in range(3)]
            await asyncio.sleep(0.2)
            return await super().start(address, settings)

    host = Raced()
    connection = await asyncio.wait_for(connect(host, zmq_context, b"{}", lambda progress: None), 30)
    assert connection.engine_info == HELLO
    for each in host.strangers:
        assert not await each.poll(0)
    connection.close()
    host.engines[0].kill()


async def test_engine_refuses_clients_without_the_secret(zmq_context: zmq.asyncio.Context) -> None:
    impostor = zmq_context.socket(zmq.PAIR)
    impostor.setsockopt(zmq.LINGER, 0)
    impostor.curve_server = True
    _, impostor.curve_secretkey = zmq.curve_keypair()
    impostor.bind("tcp://127.0.0.1:*")
    key, _ = zmq.curve_keypair()
    engine = FakeEngine(impostor.getsockopt_string(zmq.LAST_ENDPOINT), key.decode())
    assert not await impostor.poll(300)
    engine.kill()


@pytest.mark.slow
async def test_a_silent_machine_is_noticed_and_its_engine_replaced(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice_quickly(monkeypatch)
    host, listener = LinkedHost(), FakeListener()
    engine = EngineSupervisor(ReplicaId("r"), host, zmq_context, b"{}", listener)
    with capture_logs() as logs:
        await engine.start(lambda progress: None)
        await asyncio.sleep(1.0)
        assert engine.alive, "an idle engine is not a silent one"
        host.links[0].is_cut = True
        await until(lambda: engine.trouble == "the connection to its machine is lost", "the engine counts as lost")
        await until(lambda: engine.alive, "another engine has started")
    (lost,) = [entry for entry in logs if entry["event"] == "engine is cut off and replaced"]
    assert (lost["replica"], lost["address"]) == ("r", "10.0.0.2")
    await engine.close()


def test_within_ten_seconds_a_silent_machine_counts_as_lost() -> None:
    most_s = supervisor.LINK_PING_EVERY_S + supervisor.LINK_TIMEOUT_S + supervisor.CHECK_EVERY_S
    assert most_s + supervisor._EXIT_REPORT_S + supervisor.DRAIN_TIMEOUT_S < 10


async def test_error_of_a_remote_engine_names_its_machine(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking(FakeHost):
        address = "10.0.0.3"

        async def start(self, address: str, settings: bytes) -> FakeEngine:
            engine = await super().start(address, settings)
            engine._say(Fatal("/models/x: no such folder"))
            return engine

    def say_only_fatal(engine: FakeEngine, message: FromEngine) -> None:
        if isinstance(message, Fatal):
            engine._socket.send(engine._codec.encode(message))

    monkeypatch.setattr(FakeEngine, "_say", say_only_fatal)
    with pytest.raises(EngineError, match=r"^on 10\.0\.0\.3: /models/x: no such folder"):
        await connect(Lacking(), zmq_context, b"{}", lambda progress: None)


def test_engines_get_no_keys_and_no_urls() -> None:
    secret = Settings(
        adapters=AdapterSettings(
            preload=("a=https://u:secret@h/a",), allowed_sources=("https://secret@h/",), registry_url="pg://u:secret@h"
        ),
        server=ServerSettings(api_keys=("secret",), admin_keys=("secret",), log_level="debug"),
        cluster=ClusterSettings(registry_url="pg://u:secret@h"),
    )
    told = msgspec.json.encode(for_engines(secret))
    assert b"secret" not in told
    assert b"debug" in told


class TcpHost(LocalHost):
    """This machine, as if it were another one.

    Attributes:
        told: what its engines were told on their standard input.
    """

    told: list[EngineInput]
    process: EngineProcess

    def bind_address(self) -> str:
        return "tcp://127.0.0.1:*"

    async def start(self, address: str, settings: bytes) -> EngineProcess:
        self.told = [msgspec.json.decode(settings, type=EngineInput)]
        self.process = await super().start(address, settings)
        return self.process


@asynccontextmanager
async def client_over(host: EngineHost, model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    """Start a real engine process on a host."""
    monkeypatch.setattr("lorikeet.client.client.LocalHost", lambda: host)
    client = EngineClient(msgspec.structs.replace(live_settings(model), server=ServerSettings(api_keys=("hush",))))
    try:
        await client.start(lambda progress: None)
        yield client
    finally:
        await client.close()


@pytest.mark.slow
async def test_engine_over_tcp_answers_and_hides_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = TcpHost()
    async with client_over(host, make_model(tmp_path), monkeypatch) as client:
        handle = client.submit(greedy("r", prompt(20), 5))
        async for _ in outputs_of(handle):
            pass
        assert len(handle.token_ids) == 5
        (told,) = host.told
        assert len(told.channel_key) == 40
        assert b"hush" not in bytes(told.settings)
        place = Path(f"/proc/{host.process.pid}")
        for name in ("cmdline", "environ"):
            assert told.channel_key.encode() not in (place / name).read_bytes()
        assert b"tcp://127.0.0.1:" in (place / "cmdline").read_bytes()
