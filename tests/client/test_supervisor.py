"""The supervisor's log of an engine's life: death, restart, giving up."""

import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from lorikeet.client import supervisor
from lorikeet.client.local_host import LocalHost, close_first_host, first_host, start_first_host
from lorikeet.client.supervisor import (
    REQUESTS_AT_ONCE,
    EngineError,
    EngineSupervisor,
    EngineTimeouts,
    connect,
    describe_exit,
)
from lorikeet.core.clock import boot_id
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.messages import (
    EngineReady,
    FromEngine,
    Heartbeat,
    MessageCodec,
    MessagesLost,
    StepOutputs,
    ToEngine,
    TokenOutput,
)
from tests.client.listeners import FakeListener
from tests.support.waiting import until

READY = EngineReady("0", ModelGeometry(1, 1, 1, {}, 4), 8, 4, 16, 32, 4, "native", boot_id(), 0.0)


class FakeProcess:
    """An engine that says it is ready and then does nothing until it is killed."""

    pid = 1

    def __init__(self, socket: zmq.asyncio.Socket, codec: MessageCodec[FromEngine, ToEngine]) -> None:
        self.returncode: int | None = None
        self.codec = codec
        self._socket = socket
        self._ended = asyncio.Event()

    async def send(self, message: FromEngine) -> None:
        await self.send_bytes(self.codec.encode(message))

    async def send_bytes(self, data: bytes) -> None:
        if self.returncode is None:
            await self._socket.send(data)

    def end(self, code: int) -> None:
        self.returncode = code
        self._socket.close()
        self._ended.set()

    def kill(self) -> None:
        self.end(-9)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode


class FakeHost:
    address = "localhost"

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.processes: list[FakeProcess] = []
        self.is_broken = self.is_silent = False
        self._context = context
        self._numbers = itertools.count()

    def bind_address(self) -> str:
        return f"inproc://engine-{id(self)}-{next(self._numbers)}"

    async def start(self, address: str, settings: bytes) -> FakeProcess:
        if self.is_broken:
            raise OSError("no memory left")
        socket = self._context.socket(zmq.PAIR)
        socket.connect(address)
        codec = MessageCodec[FromEngine, ToEngine](ToEngine)
        self.processes.append(FakeProcess(socket, codec))
        if not self.is_silent:
            await self.processes[-1].send(READY)
        return self.processes[-1]

    def close(self) -> None:
        pass


@pytest.mark.slow
async def test_log_tells_of_death_restart_and_giving_up(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "DRAIN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(supervisor, "MAX_FAILED_STARTS", 1)
    host, listener = FakeHost(zmq_context), FakeListener()
    engine = EngineSupervisor(ReplicaId("r"), host, zmq_context, b"{}", listener)
    with capture_logs() as logs:
        await engine.start(lambda progress: None)
        host.processes[0].end(-11)
        deadline_s = time.monotonic() + 30
        while not (engine.restarts and engine.alive and logs[-1]["event"] == "engine restarted"):
            assert time.monotonic() < deadline_s, f"no restart within 30 s: {logs}"
            await asyncio.sleep(0.01)
        host.is_broken = True
        host.processes[1].end(1)
        failure = await asyncio.wait_for(listener.failure, timeout=30)
    await engine.close()

    assert all(entry["replica"] == "r" for entry in logs)
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [
        ("warning", "engine died"),
        ("info", "restarting engine"),
        ("info", "engine restarted"),
        ("warning", "engine died"),
        ("info", "restarting engine"),
        ("warning", "engine did not start"),
        ("error", "engine gave up"),
    ]
    died, _, restarted, died_again, _, _, gave_up = logs
    assert died["exit"] == "SIGSEGV"
    assert died["uptime_s"] >= 0
    assert restarted["requests_resumed"] == 3
    assert restarted["seconds"] >= 0
    assert died_again["exit"] == "code 1"
    assert gave_up["reason"] == str(failure)
    assert "no memory left" in gave_up["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silent", "stuck"])
async def test_an_engine_that_hangs_is_noted_then_replaced(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(supervisor, "DRAIN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(supervisor, "CHECK_EVERY_S", 0.02)
    host, listener = FakeHost(zmq_context), FakeListener()
    timeouts = EngineTimeouts(heartbeat_s=0.6, step_s=30.0)
    engine = EngineSupervisor(ReplicaId("r"), host, zmq_context, b"{}", listener, timeouts)

    async def beat(turn_s: float, times: int = 1) -> None:
        for _ in range(times):
            await host.processes[-1].send(Heartbeat(turn_s))
            await asyncio.sleep(0.02)

    with capture_logs() as logs:
        await engine.start(lambda progress: None)
        await beat(9.0, times=50)  # a slow step is no hang
        assert engine.alive
        assert not logs
        if how == "silent":
            await until(lambda: not engine.alive, "the engine is late")
        else:
            while engine.alive:
                await beat(11.0)
        assert engine.is_connected, "it still gets messages"
        while not engine.alive:
            await beat(0.0)
        while how == "stuck" and not engine.restarts:
            await beat(31.0)
        await until(lambda: engine.restarts and engine.alive, "another engine has started")
        await beat(0.0)
    await engine.close()
    assert host.processes[0].returncode == -9
    assert [entry["event"] for entry in logs if entry["event"] != "engine does not answer"] == [
        "engine answers again",
        "engine hangs and is killed",
        "engine died",
        "restarting engine",
        "engine restarted",
    ]
    reasons = [entry["reason"] for entry in logs if "reason" in entry]
    assert reasons[0].startswith("no message for 0.2" if how == "silent" else "one step for 11 s")
    assert reasons[-1].startswith("no message for 0.6" if how == "silent" else "one step for 31 s")


async def test_an_engine_that_hangs_while_it_starts_is_killed(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("CHECK_EVERY_S", 0.01), ("DRAIN_TIMEOUT_S", 0.01), ("_FIRST_MESSAGE_TIMEOUT_S", 0.1)):
        monkeypatch.setattr(supervisor, name, seconds)
    host = FakeHost(zmq_context)
    host.is_silent = True
    with pytest.raises(EngineError, match=r"ended before it was ready \(no message for 0\.1"):
        await connect(host, zmq_context, b"{}", lambda progress: None, EngineTimeouts(0.05, 0.0))
    assert host.processes[0].returncode == -9


@pytest.mark.parametrize(
    ("code", "text"), [(None, "unknown"), (0, "code 0"), (1, "code 1"), (-9, "SIGKILL"), (-200, "signal 200")]
)
def test_exit_code_is_described(code: int | None, text: str) -> None:
    assert describe_exit(code) == text


def outputs(number: int) -> StepOutputs:
    return StepOutputs((TokenOutput(RequestId("r"), 0, number, ()),), (), ())


@pytest.mark.slow
async def test_repeated_messages_are_ignored_and_an_engine_whose_messages_are_lost_is_replaced(
    zmq_context: zmq.asyncio.Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "DRAIN_TIMEOUT_S", 0.01)
    host, listener = FakeHost(zmq_context), FakeListener()
    engine = EngineSupervisor(ReplicaId("r"), host, zmq_context, b"{}", listener)
    with capture_logs() as logs:
        await engine.start(lambda progress: None)
        first = host.processes[0]
        for data in [first.codec.encode(outputs(number)) for number in range(2)] * 2:
            await first.send_bytes(data)
        first.codec.encode(outputs(2))  # is lost
        await first.send(outputs(3))
        await until(lambda: engine.restarts == 1 and engine.alive, "another engine is there")
    await engine.close()
    assert listener.received == [outputs(0), outputs(1)]
    assert first.returncode == -9
    assert [entry["reason"] for entry in logs if "lost" in entry["event"]] == ["1 messages are missing before number 4"]


async def test_outputs_of_many_requests_are_passed_on_in_parts(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_SHUTDOWN_TIMEOUT_S", 0.01)
    host, listener = FakeHost(zmq_context), FakeListener()
    engine = EngineSupervisor(ReplicaId("r"), host, zmq_context, b"{}", listener)
    await engine.start(lambda progress: None)
    ids = [RequestId(f"{number}") for number in range(3 * REQUESTS_AT_ONCE + 1)]
    await host.processes[0].send(StepOutputs(tuple(TokenOutput(each, 0, 0, ()) for each in ids), (), ()))
    await until(lambda: len(listener.received) == 4, "all parts have come")
    await engine.close()
    assert [each.request_id for part in listener.received for each in part.tokens] == ids
    assert max(len(part.tokens) for part in listener.received) == REQUESTS_AT_ONCE


@pytest.mark.parametrize("fails_at", [1, 2])
async def test_a_listener_that_fails_at_any_part_ends_supervision_once(
    zmq_context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    class Failing(FakeListener):
        def on_outputs(self, supervisor: EngineSupervisor, outputs: StepOutputs) -> None:
            super().on_outputs(supervisor, outputs)
            if len(self.received) == fails_at:
                raise ValueError("broken")

    monkeypatch.setattr(supervisor, "_SHUTDOWN_TIMEOUT_S", 0.01)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    host, listener = FakeHost(zmq_context), Failing()
    engine = EngineSupervisor(ReplicaId("r"), host, zmq_context, b"{}", listener)
    await engine.start(lambda progress: None)
    ids = [RequestId(f"{number}") for number in range(3 * REQUESTS_AT_ONCE)]
    await host.processes[0].send(StepOutputs(tuple(TokenOutput(each, 0, 0, ()) for each in ids), (), ()))
    assert "broken" in str(await asyncio.wait_for(listener.failure, 60))
    host.processes[0].end(-9)
    await engine.close()
    assert len(listener.received) == fails_at
    assert len(host.processes) == 1, "no engine is started for a listener that has been told of the failure"


def test_the_engine_notices_as_well() -> None:
    here, there = MessageCodec[ToEngine, FromEngine](FromEngine), MessageCodec[FromEngine, ToEngine](ToEngine)
    sent = [there.encode(outputs(number)) for number in range(3)]
    assert [here.decode(data) for data in (sent[0], sent[0])] == [outputs(0), None]
    with pytest.raises(MessagesLost):
        here.decode(sent[2])


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let engine processes be a script that notes its arguments and a line of its input, then ends with code 7."""
    script, noted = tmp_path / "interpreter", tmp_path / "noted"
    script.write_text(f'#!/bin/sh\nread line && echo "$* $line" >> {noted} && exit 7\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    return noted


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_an_engine_that_was_started_early_is_the_first_one(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:  # as on macOS
        monkeypatch.delattr(os, "pidfd_open")
    host = LocalHost()
    host.start_early()
    early, again = host.bind_address(), host.bind_address()
    first = await host.start(early, b"settings")
    later = host.bind_address()
    second = await host.start(later, b"settings")
    assert (await first.wait(), await second.wait(), first.returncode) == (7, 7, 7)
    assert early == again != later
    told = interpreter.read_text().splitlines()
    assert sorted(told) == sorted(f"-m lorikeet.engine {each} settings" for each in (early, later))
    host.close()


async def test_an_engine_that_was_started_early_and_is_not_needed_is_killed(interpreter: Path) -> None:
    host = LocalHost()
    host.start_early()
    early = host._early
    assert early is not None
    host.close()
    host.close()
    assert await early.wait() == -signal.SIGKILL
    assert not interpreter.exists()


async def test_the_first_host_is_handed_out_once_and_its_engine_has_no_secrets(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    script = Path(sys.executable)
    script.write_text(f'#!/bin/sh\nread line && echo "$line$VLLM_API_KEY" > {interpreter}\n')
    start_first_host()
    host = first_host()
    close_first_host()  # it is not that one's any more
    process = await host.start(host.bind_address(), b"settings")
    assert await process.wait() == 0
    assert interpreter.read_text() == "settings\n"
    host.close()
    start_first_host()
    unused = first_host()._early
    start_first_host()
    close_first_host()
    assert unused is not None
    unused.kill()
    assert await unused.wait() == -signal.SIGKILL
    first_host().close()
