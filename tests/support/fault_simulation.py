"""Schedules of faults on a virtual clock: ``python -m tests.support.fault_simulation --schedules 5000``.

The real clients (``EngineClient``, or ``ClusterClient`` with several replicas), supervisors and message codecs talk to
real engines: loop, scheduler and memory. Only the executor is scripted; it refuses a plan that would read or move
anything but what belongs there. All run in one event loop whose time is virtual.

A seed determines everything: sizes, preset, traffic, and what goes wrong. Engines are killed, stopped, or do not start;
transfers are torn; disks of adapters and of replicas are full; messages are late, come twice or are lost; the client
stalls; clients leave; adapters are dropped and come back; requests move between replicas, with their KV or without.

Afterwards every request must have ended with exactly the tokens of its script (or with an error that its faults
explain), and every engine that lives must have all its blocks back. ``--seed N`` runs one schedule and prints what
happened.
"""

import argparse
import asyncio
import hashlib
import itertools
import math
import random
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import zmq
from structlog.testing import capture_logs

from lorikeet.client.client import DEATHS_PER_REQUEST, EngineClient, RequestHandle
from lorikeet.client.supervisor import MAX_FAILED_STARTS, EngineError
from lorikeet.cluster.adapters.transport import DestinationLost, Traffic, TransportError
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.parts import ClusterCosts, ClusterPolicies, ClusterProcesses
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.migration.problem import MoveTimes
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.cluster.routing.plain import LeastLoaded, RoundRobin
from lorikeet.cluster.tables import RoutingTable
from lorikeet.config import ClusterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import boot_id
from lorikeet.core.events import FinishReason
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import (
    HEARTBEAT_EVERY_S,
    EngineReady,
    FromEngine,
    Heartbeat,
    MessageCodec,
    MessagesLost,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from lorikeet.core.plan import SequenceStart, Tier, Transfer
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.process import STATS_EVERY_S, Compiling, handle
from lorikeet.papers.loraserve.routing import FewestTokens
from lorikeet.papers.toppings.first_fit import FirstFit
from lorikeet.presets import PRESETS
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.outputs import Arrived, outputs_of
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter
from tests.support.scripted_executor import token_by_seed

NAMES = ("a", "b", "cccc")
LONGEST = 48
FAULTS_UNTIL_S = 5.0
"""Nothing goes wrong any more from then on."""
ALL_END_BY_S = 600.0
_GEOMETRY = ModelGeometry(1, 1, 1, {}, 4)
_ROUTING_POLICIES: tuple[Callable[[], RoutingPolicy], ...] = (RoundRobin, LeastLoaded, FewestTokens, FirstFit)


# --- a loop whose time is virtual --------------------------------------------------------------------


class StuckError(RuntimeError):
    """Everything waits for something that will not happen."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready; if nothing is, it is the time of the next timer at once. It has no files."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0
        self._selector = self

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass.

        Raises:
            StuckError: everything waits for something that will not happen.
        """
        if timeout is None:
            raise StuckError("nothing is left to happen")
        self._now_s += timeout
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


# --- what carries messages ---------------------------------------------------------------------------


class Wire:
    """One direction of a channel: messages arrive in order, after a while.

    Attributes:
        lose, repeat: how many of the next messages are lost, or come twice.
        late_until_s: nothing arrives before.
    """

    def __init__(self, latency_s: Callable[[], float]) -> None:
        self.lose = self.repeat = 0
        self.late_until_s = 0.0
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._sent: deque[bytes] = deque()
        self._arrived: deque[bytes] = deque()
        self._has_arrived = asyncio.Event()
        self._last_s = 0.0

    def send(self, data: bytes) -> None:
        if self.lose:
            self.lose -= 1
            return
        times = 1
        if self.repeat:
            self.repeat -= 1
            times = 2
        self._last_s = max(self._last_s, self._loop.time() + self._latency_s(), self.late_until_s)
        for _ in range(times):
            self._sent.append(data)
            self._loop.call_at(self._last_s, self._arrive)

    def cut(self, kept: int) -> None:
        """Lose what is under way, but for the first ``kept`` messages."""
        while len(self._sent) > kept:
            self._sent.pop()

    def take(self) -> list[bytes]:
        """Return what has arrived."""
        taken = list(self._arrived)
        self._arrived.clear()
        self._has_arrived.clear()
        return taken

    async def receive(self) -> bytes:
        while not self._arrived:
            await self.wait()
        data = self._arrived.popleft()
        if not self._arrived:
            self._has_arrived.clear()
        return data

    async def wait(self) -> None:
        await self._has_arrived.wait()

    def _arrive(self) -> None:
        if self._sent:
            if self._loop.time() < self.late_until_s:
                self._loop.call_at(self.late_until_s, self._arrive)
                return
            self._arrived.append(self._sent.popleft())
            self._has_arrived.set()


class Socket:
    """The client's end of a channel, as far as ``lorikeet.client.supervisor`` uses one of ZeroMQ's."""

    def __init__(self, world: "World") -> None:
        self.to_engine, self.to_client = Wire(world.latency_s), Wire(world.latency_s)
        self._world = world
        self._address = ""

    def set_hwm(self, messages: int) -> None: ...

    def setsockopt(self, option: int, value: object) -> None: ...

    def bind(self, address: str) -> None:
        self._address = address
        self._world.sockets[address] = self

    def get(self, option: int) -> int:
        """Tell that it has a peer: links lose messages here, but are not cut."""
        assert option == zmq.EVENTS
        return zmq.POLLOUT

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self._address

    def send(self, data: bytes) -> None:
        self.to_engine.send(data)

    async def recv(self) -> bytes:
        return await self.to_client.receive()

    def close(self) -> None: ...


class Context:
    """Makes such sockets."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def socket(self, kind: int) -> Socket:
        assert kind == zmq.PAIR
        return Socket(self._world)

    def destroy(self, linger: int) -> None: ...


# --- engines -----------------------------------------------------------------------------------------


class SimulatedEngine:
    """An engine process; an ``EngineProcess`` of the client's supervisor."""

    def __init__(self, world: "World", host: "SimulatedHost", socket: Socket, start_fails: bool) -> None:
        self.pid = next(world.numbers)
        self.name = f"{host.name}#{self.pid}"
        self.returncode: int | None = None
        self.socket = socket
        self.bench = world.new_bench()
        self._world = world
        self._offset_s = world.random.choice((0.0, 500.0))  # it may run on another machine, with another clock
        self._codec = MessageCodec[FromEngine, ToEngine](ToEngine)
        self._ended = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._tasks = [asyncio.ensure_future(self._run(start_fails)), asyncio.ensure_future(self._beat())]

    def kill(self) -> None:
        self._end(-9)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def stop(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT later."""
        self._goes_on.clear()
        asyncio.get_running_loop().call_later(seconds, self._goes_on.set)

    @property
    def is_idle(self) -> bool:
        engine = self.bench.engine
        return not (engine.has_requests or engine.is_busy or engine.has_transfers)

    def leaks(self) -> list[str]:
        """Return what an engine without requests should not hold."""
        memory, executor = self.bench.memory, self.bench.executor
        memory.check_integrity()
        counts, host = memory.counts(), memory.host_counts()
        found = [f"{name} {value}" for name, value in counts._asdict().items() if name in ("kv", "inflight") and value]
        found += [f"host {name} {value}" for name, value in host._asdict().items() if name == "inflight" and value]
        if sum(counts) != self.bench.blocks or sum(host) != self.bench.host_blocks:
            found.append(f"blocks {counts} {host}")
        found += [f"lease {lease}" for lease in memory._leases]
        found += [f"transfer {number} is awaited" for number in memory._waiting]
        found += [f"sequence {request_id}" for request_id in executor._sequences]
        found += [f"export {request_id}" for request_id in self.bench.engine._exports._leases]
        return [f"{self.name}: {each}" for each in found]

    def _end(self, code: int) -> None:
        if self.returncode is not None:
            return
        self._world.note(f"{self.name} ends with {code}")
        self.returncode = code
        self.socket.to_engine.cut(0)
        self.socket.to_client.cut(
            self._world.random.randrange(4)
        )  # it had not sent them, though it may have thought so
        self._ended.set()
        for task in self._tasks:
            task.cancel()

    async def _run(self, start_fails: bool) -> None:
        try:
            await asyncio.sleep(self._world.random.uniform(0.05, 0.6))
            if start_fails:
                self._end(1)
                return
            await self._serve()
            self._end(0)
        except MessagesLost as error:
            self._world.note(f"{self.name}: {error}")
            self._end(1)
        except Exception:
            self._world.wrong.append(f"{self.name} failed: {traceback.format_exc()}")
            self._end(1)

    async def _beat(self) -> None:
        """Send heartbeats, as ``lorikeet.engine.process.Channel``."""
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            await self._goes_on.wait()
            self._say(Heartbeat(0.0))

    async def _serve(self) -> None:
        """Do as ``lorikeet.engine.process.serve``; a step takes its time after it was computed."""
        engine, clock, wire = self.bench.engine, self.bench.clock, self.socket.to_engine
        self._say(self._ready())
        self._say(StepOutputs((), (), (), stats=engine.stats()))
        stats_due_s = 0.0
        while True:
            await self._goes_on.wait()
            clock.wait_until(self._world.now() + self._offset_s)
            for data in wire.take():
                message = self._codec.decode(data)
                if isinstance(message, Shutdown):
                    return
                if message is not None and not isinstance(message, Heartbeat):
                    handle(message, engine, Compiling(None, lambda: None))
            outputs = engine.step()
            self.bench.memory.check_integrity()
            await asyncio.sleep(max(0.0, clock.now() - self._offset_s - self._world.now()))
            await self._goes_on.wait()
            if clock.now() >= stats_due_s or not engine.is_busy:
                outputs = msgspec.structs.replace(outputs, stats=engine.stats())
                stats_due_s = clock.now() + STATS_EVERY_S
            if outputs != StepOutputs((), (), ()):
                self._say(outputs)
            if not engine.is_busy:
                await self._rest(wire)

    async def _rest(self, wire: Wire) -> None:
        """Wait for a message, a transfer or a tick."""
        next_s = self.bench.executor._link.next_s()
        due_s = min(math.inf if next_s is None else next_s, self.bench.engine.due_s) - self._offset_s
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due_s == math.inf else max(0.0, due_s - self._world.now())):
                await wire.wait()

    def _say(self, message: FromEngine) -> None:
        self.socket.to_client.send(self._codec.encode(message))

    def _ready(self) -> EngineReady:
        boot, now = (boot_id(), "another machine")[self._offset_s > 0], self._world.now() + self._offset_s
        sizes = (self.bench.blocks, BLOCK_TOKENS, 1024, LONGEST, self.bench.blocks)
        return EngineReady("simulated", _GEOMETRY, *sizes, "scripted", boot, now)


class SimulatedHost:
    """A machine with such engines; an ``EngineHost``.

    Attributes:
        failing_starts: how many of the next starts fail.
        engine: the last one.
    """

    address = "simulated"

    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.failing_starts = 0
        self.engine: SimulatedEngine | None = None
        self._world = world
        world.hosts.append(self)

    def bind_address(self) -> str:
        return f"simulated://{next(self._world.numbers)}"

    async def start(self, address: str, settings: bytes) -> SimulatedEngine:
        fails = self.failing_starts > 0
        self.failing_starts -= fails
        if fails and self._world.random.random() < 0.5:
            raise OSError("no memory left")
        self.engine = SimulatedEngine(self._world, self, self._world.sockets[address], fails)
        return self.engine

    def close(self) -> None: ...


class SimulatedTransport:
    """Folders of adapters at replicas, whose disks may be full."""

    def __init__(self, world: "World") -> None:
        self.traffic = Traffic()
        self._world = world
        self._held: dict[ReplicaId, dict[AdapterDigest, str]] = {}
        self._gone: set[ReplicaId] = set()

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        await self._take_time(destination)
        if adapter.digest not in self._held.get(source, {}):
            raise TransportError(f"{source} has no {adapter.name}")
        return await self._store(adapter, destination)

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        await self._take_time(destination)
        return await self._store(adapter, destination)

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        await self._take_time(replica)
        self._held.get(replica, {}).pop(adapter.digest, None)

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        await self._take_time(replica)
        return dict(self._held.get(replica, {}))

    async def discard(self, replica: ReplicaId) -> None:
        self._gone.add(replica)
        self._held.pop(replica, None)

    def release(self, replica: ReplicaId) -> None: ...

    def close(self) -> None: ...

    async def _take_time(self, replica: ReplicaId) -> None:
        await asyncio.sleep(self._world.random.uniform(0.001, 0.1))
        if replica in self._gone:
            raise DestinationLost(f"{replica} is gone")

    async def _store(self, adapter: AdapterRef, replica: ReplicaId) -> AdapterRef:
        if self._world.now() < self._world.full_until_s.get(replica, 0.0):
            self._world.full_disks += 1
            raise TransportError(f"no space left at {replica}")
        self._held.setdefault(replica, {})[adapter.digest] = "folder"
        return msgspec.structs.replace(adapter, folder="folder")


class SimulatedPlacement:
    """An orchestrator without threads; a ``PlacementService``."""

    def __init__(self, orchestrator: Orchestrator, now: Callable[[], float]) -> None:
        self._orchestrator = orchestrator
        self._now = now

    async def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        return self._orchestrator.register(adapters, self._now())

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        return self._orchestrator.drop(adapter, self._now())

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        return self._orchestrator.set_replicas(replicas, self._now())

    async def period(self, report: DemandReport) -> RoutingTable:
        return self._orchestrator.period(report, self._now())

    async def load(self) -> float | None:
        return self._orchestrator.load(self._now())


# --- a schedule --------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request, what its client received, and how it ended."""

    handle: RequestHandle
    leaves_after: int | None
    tokens: list[int] = field(default_factory=list)
    left: bool = False
    reason: FinishReason | None = None
    error: str = ""
    arrived: Arrived = field(default_factory=Arrived)


class Outcome(NamedTuple):
    """What came of a schedule.

    Attributes:
        seed: of the schedule.
        requests: how many there were.
        lost: requests that have not ended, or without all their tokens, for no reason.
        repeated: tokens that came twice, or are not those of the script.
        leaked: what engines and clients hold without requests.
        wrong: anything else that must not happen.
        ends: how requests ended.
        faults: how often each kind happened.
        digest: of all that happened, in order.
        trace: all that.
    """

    seed: int
    requests: int
    lost: list[str]
    repeated: list[str]
    leaked: list[str]
    wrong: list[str]
    ends: Counter[str]
    faults: Counter[str]
    digest: str
    trace: list[str]

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.repeated or self.leaked or self.wrong)


class World:
    """One schedule and all that takes part in it. Made inside its loop; ``logs`` gets what they log."""

    def __init__(self, seed: int, logs: Sequence[Mapping[str, Any]]) -> None:
        self._logs = logs
        self.random = random.Random(f"what happens {seed}")
        plan = self._plan = random.Random(f"what is planned {seed}")
        self.numbers = itertools.count()
        self.sockets: dict[str, Socket] = {}
        self.hosts: list[SimulatedHost] = []
        self.wrong: list[str] = []
        self.trace: list[str] = []
        self.faults: Counter[str] = Counter()
        self.full_until_s: dict[ReplicaId, float] = {}
        self.torn: set[AdapterDigest] = set()
        self.full_disks = 0
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._asked: list[Asked] = []
        self._readers: list[asyncio.Task[None]] = []
        self._drops: list[asyncio.Task[int]] = []
        self._changes: list[asyncio.Task[None]] = []
        self._versions = dict.fromkeys(NAMES, 0)
        self._slow_s = plan.choice((0.001, 0.02, 0.2))
        self._read_fails, self._copy_fails = plan.choice((0.0, 0.0, 0.3)), plan.choice((0.0, 0.0, 0.2))
        self._bench: dict[str, Any] = {
            "blocks": plan.randint(20, 40),
            "host_blocks": plan.choice((0, plan.randint(1, 6), plan.randint(20, 60))),
            "preset": PRESETS[plan.choice(sorted(PRESETS))],
            "limits": SchedulerLimits(
                max_num_seqs=plan.randint(2, 6),
                max_num_batched_tokens=plan.randint(3, 20),
                max_model_len=LONGEST,
                num_scheduler_steps=plan.randint(1, 6),
                async_scheduling=plan.random() < 0.3,
            ),
        }
        self._replicas = plan.choice((1, 1, 2, 3))
        engine = EngineSettings(
            max_num_seqs=self._bench["limits"].max_num_seqs, heartbeat_timeout_s=plan.choice((3.0, 30.0))
        )
        self._settings = Settings(ModelSettings("none"), engine=engine)
        self._client = self._make_client()

    # --- for those who take part ---

    def now(self) -> float:
        return self._loop.time()

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now() - self._began_s:9.4f}  {what}")

    def latency_s(self) -> float:
        return self.random.uniform(0.0001, self._slow_s)

    def new_bench(self) -> Bench:
        return Bench(**self._bench, fails=self._is_torn)

    def _is_torn(self, transfer: Transfer) -> bool:
        chance = self._read_fails if transfer.source is Tier.SOURCE else self._copy_fails
        torn = self._is_faulty_time() and self.random.random() < chance
        if torn and transfer.adapter is not None:
            self.torn.add(transfer.adapter.digest)
        return torn

    def _is_faulty_time(self) -> bool:
        return self.now() - self._began_s < FAULTS_UNTIL_S

    # --- the run ---

    async def run(self) -> None:
        await self._client.start(lambda progress: None)
        self._client.register_adapters([self._ref(name) for name in NAMES])
        events = sorted([*self._traffic(), *self._faults()], key=lambda event: event[0])
        for at_s, act in events:
            await asyncio.sleep(max(0.0, self._began_s + at_s - self.now()))
            result = act()
            if result is not None:
                await result
        waiting = [*self._readers, *self._drops, *self._changes]
        _, pending = await asyncio.wait(waiting, timeout=ALL_END_BY_S)
        for task in pending & {*self._drops, *self._changes}:
            self.wrong.append(f"never ends: {task}")
        await asyncio.sleep(8.0)  # engines that died last are back

    async def close(self) -> None:
        for task in (*self._readers, *self._drops, *self._changes):
            task.cancel()
        await self._client.close()

    def outcome(self, seed: int) -> Outcome:
        lost, repeated, leaked, ends = list[str](), list[str](), list[str](), Counter[str]()
        for asked in self._asked:
            self._judge(asked, lost, repeated)
            ends[self._explanation(asked) or str(asked.reason)] += 1
        for host in self.hosts:
            if host.engine is not None and host.engine.returncode is None:
                leaked += host.engine.leaks()
        leaked += self._client_leaks()
        digest = hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]
        return Outcome(
            seed, len(self._asked), lost, repeated, leaked, self.wrong, ends, self.faults, digest, self.trace
        )

    def _make_client(self) -> EngineClient | ClusterClient:
        with (
            mock.patch("zmq.asyncio.Context", return_value=Context(self)),
            mock.patch("lorikeet.client.client.LocalHost", partial(SimulatedHost, self, "engine")),
        ):
            return EngineClient(self._settings) if self._replicas == 1 else self._make_cluster()

    def _make_cluster(self) -> ClusterClient:
        cluster = ClusterSettings(replicas=self._replicas, pool_dir="simulated")
        settings = msgspec.structs.replace(self._settings, cluster=cluster)
        replicas = [ReplicaId(f"replica-{number}") for number in range(self._replicas)]
        placement = SimulatedPlacement(Orchestrator(FullReplication(), replicas, self.now()), self.now)
        routing = self._plan.choice(_ROUTING_POLICIES)()
        transport = SimulatedTransport(self)
        prefetch = self._plan.random() < 0.3
        speed = self._plan.choice(
            (None, lambda: 2000.0, lambda: math.inf)
        )  # KV stays, or moves if it is long, or always
        times = MoveTimes(lambda tokens: tokens**2 / 20_000, math.inf, 1.0, speed)
        hosts = partial(SimulatedHost, self)
        processes = ClusterProcesses(hosts, transport, placement)
        policies = ClusterPolicies(routing, 3.0, prefetch)
        return ClusterClient(settings, processes, policies, ClusterCosts(times, KvBandwidth()))

    # --- what is planned ---

    def _traffic(self) -> Iterator[tuple[float, Callable[[], Awaitable[None] | None]]]:
        plan = self._plan
        for number in range(plan.randint(8, 20)):
            prompt = [
                plan.randrange(3),
                *range(100, 100 + plan.randint(0, 30)),
                *[plan.randrange(9)] * plan.randint(0, 4),
            ]
            sampling = SamplingParams(
                max_tokens=plan.randint(1, 20), seed=plan.randrange(1000), stop_token_ids=(plan.randrange(1000),)
            )
            leaves_after = plan.randrange(10) if plan.random() < 0.15 else None
            name = plan.choice((None, *NAMES))
            yield (
                plan.uniform(0.0, 0.8 * FAULTS_UNTIL_S),
                self._submission(number, prompt, sampling, name, leaves_after),
            )

    def _submission(
        self, number: int, prompt: list[int], sampling: SamplingParams, name: str | None, leaves_after: int | None
    ) -> Callable[[], None]:
        def submit() -> None:
            ref = None if name is None else self._ref(name)
            request = Request(RequestId(f"r{number}"), prompt, sampling, self.now(), ref)
            self.note(f"{request.request_id} is submitted under {name}")
            asked = Asked(self._client.submit(request), leaves_after)
            self._asked.append(asked)
            self._readers.append(asyncio.ensure_future(self._read(asked)))

        return submit

    def _ref(self, name: str) -> AdapterRef:
        version = self._versions[name]
        ref = adapter(name if not version else f"{name}-{version}", 1 + (len(name) + version) % 4)
        return msgspec.structs.replace(ref, folder="folder", weight_bytes=1024)

    async def _read(self, asked: Asked) -> None:
        name = asked.handle.request.request_id
        try:
            async for output in outputs_of(asked.handle, asked.arrived):
                asked.tokens += [token.token_id for token in output.tokens]
                self.note(f"{name} gets {len(output.tokens)} tokens")
                if output.finished is not None:
                    asked.reason, asked.error = output.finished.reason, output.finished.error or ""
                    self.note(f"{name} ends: {asked.reason} {asked.error}")
                elif asked.leaves_after is not None and len(asked.tokens) >= asked.leaves_after and not asked.left:
                    asked.left = True
                    asked.handle.abort(is_complete=len(asked.tokens) % 2 == 0)
        except EngineError as error:
            asked.reason, asked.error = FinishReason.ERROR, f"EngineError: {error}"

    def _faults(self) -> Iterator[tuple[float, Callable[[], Awaitable[None] | None]]]:
        plan = self._plan
        kinds = [self._kill, self._stop, self._lose, self._repeat, self._delay, self._stall, self._drop, self._replace]
        if self._replicas > 1:
            kinds += [self._move, self._move, self._move, self._fill_disk, self._resize]
        chosen = plan.sample(kinds, plan.randint(1, len(kinds)))
        for _ in range(plan.randint(0, 12)):
            kind = plan.choice(chosen)
            yield plan.uniform(0.05, 0.9 * FAULTS_UNTIL_S), self._counted(kind)

    def _counted(self, act: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            self.faults[act.__name__.removeprefix("_")] += 1
            act()

        return counted

    # --- what goes wrong ---

    def _engine(self) -> SimulatedEngine | None:
        running = [host.engine for host in self.hosts if host.engine is not None and host.engine.returncode is None]
        return self._plan.choice(running) if running else None

    def _kill(self) -> None:
        if (engine := self._engine()) is not None:
            host = next(host for host in self.hosts if host.engine is engine)
            host.failing_starts = self._plan.choice((0, 0, 0, 1, 2))
            self.note(f"{engine.name} is killed, and {host.failing_starts} starts fail")
            engine.kill()

    def _stop(self) -> None:
        if (engine := self._engine()) is not None:
            self.note(f"{engine.name} is stopped")
            engine.stop(self._plan.uniform(0.05, 6.0))

    def _wire(self) -> Wire | None:
        engine = self._engine()
        return engine and self._plan.choice((engine.socket.to_client, engine.socket.to_engine))

    def _lose(self) -> None:
        if (wire := self._wire()) is not None:
            self.note("messages are lost")
            wire.lose = self._plan.randint(1, 3)

    def _repeat(self) -> None:
        if (wire := self._wire()) is not None:
            self.note("messages come twice")
            wire.repeat = self._plan.randint(1, 5)

    def _delay(self) -> None:
        if (wire := self._wire()) is not None:
            self.note("messages are late")
            wire.late_until_s = self.now() + self._plan.uniform(0.05, 3.0)

    def _stall(self) -> None:
        """The client's loop does nothing for a while."""
        until_s = self.now() + self._plan.uniform(0.05, 2.0)
        self.note("the client stalls")
        for socket in self.sockets.values():
            socket.to_client.late_until_s = max(until_s, socket.to_client.late_until_s)

    def _drop(self) -> None:
        """An adapter is removed, and perhaps comes back soon."""
        ref = self._ref(self._plan.choice(NAMES))
        self.note(f"{ref.name} is dropped")
        self._drops.append(asyncio.ensure_future(self._client.drop_adapter(ref.digest)))
        if self._plan.random() < 0.5:
            self._loop.call_later(self._plan.uniform(0.0, 0.5), self._client.register_adapters, [ref])

    def _replace(self) -> None:
        name = self._plan.choice(NAMES)
        old = self._ref(name)
        self.note(f"{name} is replaced")
        self._versions[name] += 1
        self._client.register_adapters([self._ref(name)])
        self._drops.append(asyncio.ensure_future(self._client.drop_adapter(old.digest)))

    def _move(self, rounds: int = 3) -> None:
        """Requests move to other replicas, and perhaps back before their first one has heard of it."""
        assert isinstance(self._client, ClusterClient)
        targets = list(self._client._replicas)
        for request_id in [asked.handle.request.request_id for asked in self._asked if asked.reason is None]:
            if self._plan.random() < 0.7:
                target, with_kv = self._plan.choice(targets), self._plan.random() < 0.4
                self.note(f"{request_id} moves to {target}, with its KV: {with_kv}")
                self._client.move(request_id, target, with_kv=with_kv)
        if rounds > 1:
            self._loop.call_later(self._plan.uniform(0.0, 0.1), self._move, rounds - 1)

    def _fill_disk(self) -> None:
        assert isinstance(self._client, ClusterClient)
        replica = self._plan.choice(list(self._client._replicas))
        self.note(f"the disk of {replica} is full")
        self.full_until_s[replica] = self.now() + self._plan.uniform(0.1, 2.0)

    def _resize(self) -> None:
        """A replica is added or removed."""
        assert isinstance(self._client, ClusterClient)
        if self._plan.random() < 0.5:
            self._changes.append(asyncio.ensure_future(self._change(self._client.add_replica())))
        else:
            replica = self._plan.choice(list(self._client._replicas))
            drain_s = self._plan.choice((0.0, 1.0))
            self._changes.append(asyncio.ensure_future(self._change(self._client.remove_replica(replica, drain_s))))

    async def _change(self, work: Awaitable[object]) -> None:
        with suppress(EngineError, KeyError):  # it cannot be started, is the last one, or is gone already
            self.note(f"replicas: {await work}")

    # --- what must hold ---

    def _judge(self, asked: Asked, lost: list[str], repeated: list[str]) -> None:
        request, tokens = asked.handle.request, asked.tokens
        name, prompt, sampling = request.request_id, len(request.prompt_token_ids), request.sampling
        start = SequenceStart(name, request.prompt_token_ids, prompt, sampling, request.digest)
        longest = min(sampling.max_tokens, LONGEST - prompt)
        script = [token_by_seed(start, prompt + index) for index in range(longest)]
        stop = next((index for index, token in enumerate(script) if token in sampling.stop_token_ids), None)
        whole = script if stop is None else script[: stop + 1]
        if tokens != whole[: len(tokens)]:
            repeated.append(f"{name}: {tokens} instead of {whole}")
        if not asked.arrived.empty():
            repeated.append(f"{name}: something came after its end")
        if asked.reason is None:
            lost.append(f"{name} never ends")
        elif asked.reason is FinishReason.ABORT:
            if not asked.left:
                lost.append(f"{name} was aborted, but its client had not left")
        elif asked.reason is FinishReason.ERROR:
            if not self._explanation(asked):
                lost.append(f"{name} ended with an error: {asked.error}")
        elif tokens != whole:
            lost.append(f"{name} ended with {len(tokens)} of {len(whole)} tokens: {asked.reason}")

    def _explanation(self, asked: Asked) -> str:
        """Return which fault explains that a request ended with an error; empty if none does."""
        if "the engine died" in asked.error and asked.handle.deaths >= DEATHS_PER_REQUEST:
            return "died with too many engines"
        if "scripted failure" in asked.error and asked.handle.request.digest in self.torn:
            return "its adapter was torn"
        if "could not be loaded" in asked.error and self.full_disks:
            return "full disks"
        gave_up = any(e["event"] == "engine did not start" and e["attempt"] == MAX_FAILED_STARTS for e in self._logs)
        if gave_up and asked.error.startswith("EngineError"):
            return "no engine starts"
        return ""

    def _client_leaks(self) -> list[str]:
        client = self._client
        if client._failure is not None:
            return []  # it has given up, and takes no more requests
        found = [f"client: stream {handle.request.request_id}" for handle in client._streams]
        if isinstance(client, EngineClient):
            return found + [f"client: drop {digest}" for digest in client._drops]
        found += [f"client: move {each}" for each in (*client._moves._exporting, *client._moves._exported)]
        found += [f"dispatcher: request {each}" for each in client._dispatcher._requests]
        found += [f"dispatcher: waiting {each}" for each in client._dispatcher._waiting]
        found += [f"dispatcher: copies for {each}" for each in client._dispatcher._provisioning]
        return found


def simulate(seed: int) -> Outcome:
    """Run one schedule."""
    loop, unhandled = VirtualLoop(), list[str]()
    loop.set_exception_handler(
        lambda _, context: unhandled.append(f"{context['message']}: {context.get('exception')!r}")
    )

    async def whole() -> Outcome:
        world = World(seed, logs)
        try:
            await world.run()
        except Exception:
            world.wrong.append(traceback.format_exc())
        outcome = world.outcome(seed)
        await world.close()
        return outcome

    with mock.patch("time.monotonic", loop.time), capture_logs() as logs:
        try:
            outcome = loop.run_until_complete(whole())
        finally:
            loop.close()
    tracebacks = [str(entry) for entry in logs if "exc_info" in entry]
    return outcome._replace(wrong=[*outcome.wrong, *unhandled, *tracebacks])


# --- many schedules ----------------------------------------------------------------------------------


@dataclass
class Summary:
    """What came of many schedules."""

    schedules: int = 0
    requests: int = 0
    lost: int = 0
    repeated: int = 0
    leaked: int = 0
    wrong: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    bad: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.requests += outcome.requests
        self.lost += len(outcome.lost)
        self.repeated += len(outcome.repeated)
        self.leaked += len(outcome.leaked)
        self.wrong += len(outcome.wrong)
        self.ends += outcome.ends
        self.faults += outcome.faults
        if not outcome.is_good:
            self.bad.append(outcome._replace(trace=[]))

    def __str__(self) -> str:
        counts = f"{self.lost} lost, {self.repeated} repeated, {self.leaked} leaked, {self.wrong} otherwise wrong"
        what = f"{self.schedules} schedules, {self.requests} requests: {counts}"
        return f"{what}\nends {dict(self.ends)}\nfaults {dict(self.faults)}"


def run_schedules(seeds: Iterable[int], processes: int = 1) -> Summary:
    """Run many schedules."""
    summary = Summary()
    if processes == 1:
        for seed in seeds:
            summary.add(simulate(seed))
    else:
        with get_context("spawn").Pool(processes, maxtasksperchild=500) as pool:
            for outcome in pool.imap_unordered(simulate, seeds, chunksize=10):
                summary.add(outcome)
    return summary


def describe(outcome: Outcome) -> str:
    """Return what was wrong with a schedule."""
    wrong = [*outcome.lost, *outcome.repeated, *outcome.leaked, *outcome.wrong]
    return "\n  ".join([f"--seed {outcome.seed} ({outcome.digest}):", *wrong])


def main() -> None:
    """Run the schedules that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--schedules", type=int, default=150, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, help="run only this one, and print what happened")
    options = parser.parse_args()
    if options.seed is not None:
        outcome = simulate(options.seed)
        print("\n".join(outcome.trace))  # noqa: T201
        print(describe(outcome))  # noqa: T201
        sys.exit(not outcome.is_good)
    began_s = time.process_time()
    summary = run_schedules(range(options.first, options.first + options.schedules), options.processes)
    for outcome in summary.bad:
        print(describe(outcome))  # noqa: T201
    print(f"{summary}\n{time.process_time() - began_s:.0f} s of CPU time")  # noqa: T201
    sys.exit(bool(summary.bad))


if __name__ == "__main__":
    main()
