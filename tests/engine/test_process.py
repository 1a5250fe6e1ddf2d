"""The engine process's side of the channel, over the scripted executor, in threads."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from lorikeet.core.events import AdapterEvent, AdapterEvicted, AdapterLoaded, Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import (
    Abort,
    DropAdapter,
    EngineStats,
    FromEngine,
    Heartbeat,
    MessageCodec,
    Parked,
    Progress,
    Reattach,
    RegisterAdapters,
    SetPaused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine import process
from lorikeet.engine.process import Channel, Compiling, serve
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.fake_engines import HELLO
from tests.support.scripted import Bench, adapter, request

BLOCKS = 10_000


class Peer:
    """The API process's end."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/engine"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self.codec = MessageCodec[ToEngine, FromEngine](FromEngine)

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self._socket.send(self.codec.encode(message))

    def send_at_once(self, message: ToEngine) -> None:
        """Send a message.

        Raises:
            zmq.Again: nobody is connected.
        """
        self._socket.send(self.codec.encode(message), zmq.NOBLOCK)

    def receive(self, *, heartbeats: bool = False) -> FromEngine:
        """Return the next message that is no heartbeat, or the next one of all."""
        while True:
            message = self.codec.decode(self._socket.recv())
            assert message is not None
            if heartbeats or not isinstance(message, Heartbeat):
                return message

    def outputs(self) -> StepOutputs:
        message = self.receive()
        assert isinstance(message, StepOutputs)
        return message

    def finished(self, name: str) -> Finished:
        """Read until the request has ended."""
        while True:
            for event in self.outputs().events:
                if isinstance(event, Finished) and event.request_id == name:
                    return event

    def idle_stats(self) -> EngineStats:
        """Read until nothing runs."""
        while True:
            stats = self.outputs().stats
            if stats is not None and not stats.running and not stats.waiting:
                return stats

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def channel(peer: Peer) -> Iterator[Channel]:
    made = Channel(peer.address)
    yield made
    made.close()


@pytest.fixture
def host_blocks() -> int:
    """Blocks of the engine's host tier."""
    return 0


@pytest.fixture
def bench(peer: Peer, channel: Channel, host_blocks: int) -> Iterator[Bench]:
    """An engine that is served on a thread until the test's end."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=40_000)
    made = Bench(blocks=BLOCKS, host_blocks=host_blocks, limits=limits)
    serving = threading.Thread(target=serve, args=(channel, made.engine, Compiling(None, lambda: None)))
    serving.start()
    yield made
    peer.send(Shutdown())
    serving.join(60)
    assert not serving.is_alive()


def test_messages_arrive_in_the_order_in_which_they_were_sent(peer: Peer, channel: Channel) -> None:
    assert channel.receive(0.0) == []
    sent: list[ToEngine] = [Submit(request("r", [1, 2])), Abort(request("r", [1]).request_id), Shutdown()]
    peer.send(*sent)
    received: list[ToEngine] = []
    while len(received) < 3:
        received += channel.receive(math.inf)
    assert received == sent
    channel.send(Progress("weights", 1, 2))
    assert peer.receive() == Progress("weights", 1, 2)


def test_engine_never_waits_for_a_slow_reader(peer: Peer, channel: Channel) -> None:
    sent = [Progress("weights", done, 10_000) for done in range(10_000)]  # ZeroMQ holds 1,000 unless told otherwise
    for message in sent:
        channel.send(message)
    assert [peer.receive() for _ in sent] == sent


def test_a_wake_from_another_thread_ends_a_wait(channel: Channel) -> None:
    woken: list[list[ToEngine]] = []
    waiting = threading.Thread(target=lambda: woken.append(channel.receive(math.inf)))
    waiting.start()
    channel.wake()
    waiting.join(60)
    assert woken == [[]]


def test_a_wait_ends_when_its_time_is_over(channel: Channel) -> None:
    assert channel.receive(0.001) == []


def test_heartbeats_are_sent_while_the_engine_starts_waits_or_runs_a_long_step(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_EVERY_S", 0.01)
    channel = Channel(peer.address)
    assert peer.receive(heartbeats=True) == Heartbeat(0.0), "nothing has been received yet: it starts"
    channel.receive(0.05)
    turns: list[float] = []
    while not turns or turns[-1] < 0.05:  # the turn that began then goes on
        message = peer.receive(heartbeats=True)
        assert isinstance(message, Heartbeat)
        turns.append(message.turn_s)
    waiting = threading.Thread(target=channel.receive, args=(math.inf,))
    waiting.start()
    while message != Heartbeat(0.0):
        message = peer.receive(heartbeats=True)
    for _ in range(3):
        assert peer.receive(heartbeats=True) == Heartbeat(0.0)
    channel.wake()
    waiting.join(60)
    channel.close()


def test_an_idle_engine_tells_its_last_gauges(peer: Peer, bench: Bench) -> None:
    peer.send(Submit(request("r", [1, 2, 3, 4, 5], max_tokens=3)))
    assert peer.finished("r").reason is FinishReason.LENGTH
    stats = peer.idle_stats()
    assert (stats.kv_blocks, stats.adapter_blocks, stats.inflight_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == BLOCKS
    assert stats.cached_blocks == 1, "one whole block of KV stays"


def test_an_abort_frees_the_blocks_of_a_running_request(peer: Peer, bench: Bench) -> None:
    long = request("r", [1, 2, 3, 4, 5], max_tokens=30_000)
    peer.send(Submit(long))
    assert peer.outputs().tokens
    peer.send(Abort(long.request_id), Abort(request("unknown", [1]).request_id))
    assert peer.finished("r").reason is FinishReason.ABORT
    assert peer.idle_stats().kv_blocks == 0


@pytest.mark.slow
def test_a_paused_engine_runs_no_step_until_it_goes_on(peer: Peer, bench: Bench) -> None:
    peer.send(SetPaused(True), Submit(request("r", [1, 2, 3, 4, 5], max_tokens=3)))
    heartbeats = 0
    while heartbeats < 2:
        message = peer.receive(heartbeats=True)
        heartbeats += isinstance(message, Heartbeat)
        assert not (isinstance(message, StepOutputs) and message.tokens)
    peer.send(SetPaused(False))
    assert peer.finished("r").reason is FinishReason.LENGTH


@pytest.mark.parametrize(("host_blocks", "freed_blocks"), [(0, 3 + 1), (16, 3 + 1 + 3)])
def test_wake_delivers_transfer_and_drop_reports_bytes_of_all_tiers(
    peer: Peer, channel: Channel, bench: Bench, freed_blocks: int
) -> None:
    ref = adapter("a", 3)
    peer.send(Submit(request("r", [1, 2, 3], adapter=ref)), DropAdapter(ref.digest))
    while True:  # the engine waits for the transfer, on a clock that stands still
        stats = peer.outputs().stats
        if stats is not None and stats.inflight_blocks == 3:
            break
    bench.clock.advance(1.0)
    channel.wake()
    events: list[AdapterEvent] = []
    while not any(isinstance(event, AdapterEvicted) for event in events):
        events += peer.outputs().adapter_events
    assert [type(event) for event in events] == [AdapterLoaded, AdapterEvicted]
    assert isinstance(events[-1], AdapterEvicted)
    assert events[-1].freed_bytes == freed_blocks * 1024, "weights on the device, KV, and weights on the host"
    stats = peer.idle_stats()
    assert stats.resident_adapters == {}
    assert stats.memory.nodes == 0
    assert stats.memory.host.free == stats.memory.host.total


@pytest.mark.parametrize("host_blocks", [16])
def test_registered_adapters_are_read_into_the_host_tier(peer: Peer, channel: Channel, bench: Bench) -> None:
    peer.send(RegisterAdapters((adapter("a", 3), adapter("b", 2))))
    while True:  # the engine waits for the reads, on a clock that stands still
        stats = peer.outputs().stats
        if stats is not None and stats.memory.host.inflight == (3 + 2) * 1024:
            break
    bench.clock.advance(10.0)
    channel.wake()
    while stats is None or stats.memory.host_adapters < 2:
        stats = peer.outputs().stats
    assert stats.memory.host.adapters == (3 + 2) * 1024
    assert stats.memory.transfers["source-host"].transfers == 2
    assert stats.resident_adapters == {}, "nobody asked for them"


def test_grammar_tokenizer_is_read_while_the_engine_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, reads = [100.0], []
    monkeypatch.setattr("lorikeet.engine.process.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    compiling = Compiling(SimpleNamespace(read_tokenizer=lambda: reads.append(now_s[0])), lambda: None)  # type: ignore[arg-type]
    for now_s[0], has_requests in ((100.5, False), (100.9, True), (101.5, False), (101.9, False), (105.0, False)):
        compiling.turn(has_requests)
    assert reads == [101.9]
    assert compiling.due_s == math.inf


def test_requests_wait_outside_the_engine_until_their_grammar_is_compiled() -> None:
    compiled: dict[str, Future[None]] = {text: Future() for text in ("slow", "known")}
    compiled["known"].set_result(None)
    woken: list[bool] = []
    compiler = SimpleNamespace(compile=compiled.__getitem__)
    compiling = Compiling(compiler, lambda: woken.append(True))  # type: ignore[arg-type]

    def asked(name: str, grammar: str) -> Request:
        return Request(RequestId(name), [1], SamplingParams(max_tokens=1, grammar=grammar), 0.0)

    assert not compiling.holds(asked("plain", ""))
    assert not compiling.holds(asked("known", "known"))
    slow, aborted = asked("slow", "slow"), asked("aborted", "slow")
    assert compiling.holds(slow)
    assert compiling.holds(aborted)
    assert compiling.take() == []
    assert compiling.take(aborted.request_id) == [aborted], "it goes on, and ends like any other"
    compiled["slow"].set_result(None)
    assert woken
    assert compiling.take() == [slow]
    assert compiling.take() == []


def test_engine_moves_to_another_api_process_with_its_requests(peer: Peer, channel: Channel, tmp_path: Path) -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=40_000)
    made = Bench(blocks=BLOCKS, limits=limits)
    compiling = Compiling(None, lambda: None)
    serving = threading.Thread(target=serve, args=(channel, made.engine, compiling, None, lambda: HELLO))
    serving.start()
    (tmp_path / "next").mkdir()
    other = Peer(tmp_path / "next")
    try:
        peer.send(Submit(request("r", [1, 2], max_tokens=30_000)))
        while not peer.outputs().tokens:
            pass
        channel.offer(Reattach(other.address))
        assert other.receive() == HELLO
        parked = other.receive()
        assert isinstance(parked, Parked)
        (left,) = parked.requests
        assert left.request_id == "r"
        assert left.output_token_ids
        assert left.is_resumed
        with suppress(zmq.Again):  # The former API process drives nothing any more, whether or not it has noticed.
            peer.send_at_once(Shutdown())
        sampling = msgspec.structs.replace(left.sampling, max_tokens=len(left.output_token_ids) + 3)
        other.send(Submit(msgspec.structs.replace(left, sampling=sampling)))
        assert other.finished("r").reason is FinishReason.LENGTH
        other.send(Shutdown())
        serving.join(60)
        assert not serving.is_alive()
    finally:
        other.close()
