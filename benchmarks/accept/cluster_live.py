"""A live cluster of paced replicas under a workload: ``python -m benchmarks.accept.cluster_live FILE``.

That reads a :class:`LiveSetting` as JSON on standard input and writes to FILE what came of it. The head is that one
process: it submits requests to the cluster's client when they are due, and clocks their tokens as they arrive. Engines
are processes behind real sockets, which Ray starts, and Ray carries adapters between them; nothing goes over HTTP.

All times of settings and outcomes are the device's: replicas and workload run in slow motion, by ``stretch``.

Adapters are stand-ins: PEFT adapters of the right ranks, of one small layer, which the pool copies and checks like any
other. Engines reckon with the time, the blocks and the bytes of adapters of the whole model: a paced one reads no
weights. So a copy between replicas takes as long as a small file does here, and all counts of bytes are those of the
adapters that are stood for.
"""

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.accept.models import LLAMA_2_7B
from benchmarks.accept.runs import ROOT
from lorikeet.adapters.checkpoint import inspect_adapter
from lorikeet.adapters.store import compute_digest
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.choices import Range
from lorikeet.bench.exchange import Exchange
from lorikeet.bench.in_process import WorkloadArrivals
from lorikeet.bench.load_report import slo_attainment
from lorikeet.bench.prompts import Prompts
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import ATTENTION, adapter_names, parse_ranks, spread, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.cluster.client import ClusterClient
from lorikeet.cluster.open import open_cluster
from lorikeet.config import (
    AdapterSettings,
    ClusterSettings,
    EngineSettings,
    ExecutorKind,
    ModelSettings,
    ReplicaStart,
    ServerSettings,
    Settings,
)
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import FinishReason
from lorikeet.core.geometry import ModelGeometry, ModuleShape
from lorikeet.core.plan import KernelForm
from lorikeet.core.slo import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile, OperatingLoads, write_profile
from lorikeet.costs.stretch import stretched
from lorikeet.engine.streams import RequestHandle
from lorikeet.simulator.cluster import ClusterChoice, simulate_cluster
from lorikeet.simulator.operating_points import BRIEF, host_room_bytes, with_operating_loads

PROFILE = "a100-80-llama-2-7b"

_LEAD_S = 1.0
_PATIENCE_S = 1800.0
"""For a run with its start and its end."""
_LOOK_S = 1.0
"""Time between two looks at what replicas hold."""

_SMALL = ModelGeometry(1, 1, 16, dict.fromkeys(ATTENTION, ModuleShape(16, 16)), 4)
"""What the files of stand-ins are made for."""


class LiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are the device's.

    Attributes:
        row: system.
        kernel_form: of its adapters, whatever the row has.
        loads: operating points, for placements that go by them; of the same form and SLO.
        rate: requests per second, Poisson.
        repeat: number of the run: another draws other arrivals and adapters, and makes other stand-ins, whose digests
            decide where a random placement has them.
        replicas: engines.
        periods, period_s: of placement in a run, and how long one is.
        slo_ttft_s: limit on TTFT.
        adapters, ranks: how many, and of which ranks in turn.
        adapter_choice: see docs/workloads.md.
        prompt_tokens, output_tokens: of every request.
        stretch: so many times as long everything takes here.
        start: who starts engines.
    """

    row: str
    loads: OperatingLoads
    rate: float
    kernel_form: KernelForm = KernelForm.PADDED
    repeat: int = 0
    replicas: int = 8
    periods: int = 12
    period_s: float = 10.0
    slo_ttft_s: float = 10.0
    adapters: int = 25
    ranks: str = "8-128"
    adapter_choice: str = "rank-shifting"
    prompt_tokens: int = 512
    output_tokens: int = 128
    stretch: float = 2.0
    start: ReplicaStart = ReplicaStart.RAY

    def workload(self) -> list[WorkloadRequest]:
        """Return the requests, which arrive in all periods."""
        names = adapter_names(self.adapters)
        recipe = Recipe(
            rates=Rates.constant(self.rate),
            count=max(1, round(self.rate * self.periods * self.period_s)),
            adapters=tuple(names),
            ranks=tuple(spread(parse_ranks(self.ranks), self.adapters)),
            adapter_choice=self.adapter_choice,
            prompt_tokens=Range(self.prompt_tokens, self.prompt_tokens),
            output_tokens=Range(self.output_tokens, self.output_tokens),
            run=self.repeat,
        )
        return recipe.requests()

    def prompts(self) -> Prompts:
        """Return what makes their prompts."""
        return Prompts(0, self.repeat)

    def profile(self) -> CostProfile:
        """Return the device's, with the operating points."""
        return with_operating_loads(load_profile(PROFILE), self.loads)

    def row_name(self, stretch: float) -> str:
        """Return the row as settings name it where everything takes so many times as long."""
        return f"{self.row},kernel_form={self.kernel_form},placement_period_s={self.period_s * stretch!r}"


class LiveOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run. Times are the device's unless they say otherwise.

    Attributes:
        ttft_s: of every request, in the order of the workload; from when it was due.
        tpot_p50_s, tpot_p95_s: over all requests.
        attainment: share of requests that met the limit on TTFT.
        duration_s: until the last answer was there.
        held_share: bytes of the adapters that a replica held, as a share of all adapters' bytes; mean over time and
            replicas.
        placements, fetches, provisions, deletes, failed: tables after the first, and copies.
        late_p99_ms: by how much the head was late with requests, in this machine's milliseconds.
        cpu_head, cpu_engines, cpu_others: cores in use on average: by the head, by all engines, by Ray.
        cores: that there are.
    """

    ttft_s: list[float]
    tpot_p50_s: float
    tpot_p95_s: float
    attainment: float
    duration_s: float
    held_share: float
    placements: int
    fetches: int
    provisions: int
    deletes: int
    failed: int
    late_p99_ms: float
    cpu_head: float
    cpu_engines: float
    cpu_others: float
    cores: int

    @property
    def ttft_p95_s(self) -> float:
        """95th percentile of TTFT."""
        return float(np.percentile(self.ttft_s, 95))

    @property
    def cpu(self) -> float:
        """Cores in use on average, by all."""
        return self.cpu_head + self.cpu_engines + self.cpu_others


# --- what both kinds of runs are made of ---------------------------------------------------------------


def engine_settings(row: str, **others: Any) -> EngineSettings:
    """Return the settings of an engine, live or modelled.

    It decides anew after every step, as the systems that are compared do, and all adapters have room in the host's
    memory, where LoRAServe keeps them.
    """
    room_bytes = host_room_bytes(load_profile(PROFILE).geometry, BRIEF)
    return EngineSettings(row=row, max_repeat=1, host_memory_bytes=room_bytes, **others)


def stand_ins(setting: LiveSetting, folder: Path) -> list[AdapterRef]:
    """Write a small file for every adapter, and return references to them as adapters of the whole model."""
    geometry = load_profile(PROFILE).geometry
    whole = synthetic_adapters(setting.adapters, parse_ranks(setting.ranks), geometry)
    refs = []
    for number, ref in enumerate(whole):
        place = write_random_adapter(
            folder / ref.name, _SMALL, ref.max_rank, seed=setting.repeat * setting.adapters + number
        )
        digest = compute_digest(inspect_adapter(place))
        refs.append(msgspec.structs.replace(ref, digest=digest, folder=str(place)))
    return refs


class SimulatedOutcome(msgspec.Struct, frozen=True):
    """The same on a virtual clock; see :class:`LiveOutcome`."""

    ttft_p50_s: float
    ttft_p95_s: float
    attainment: float
    held_share: float
    fetches: int


def simulate_setting(setting: LiveSetting) -> SimulatedOutcome:
    """Run a setting by the modelled executor: steps one by one, copies as long as they take over a network."""
    slo = Slo(ttft_s=setting.slo_ttft_s)
    with tempfile.TemporaryDirectory(prefix="lorikeet-stand-ins-") as scratch:
        refs = stand_ins(setting, Path(scratch))
    simulated = simulate_cluster(
        Settings(engine=engine_settings(setting.row_name(1.0))),
        setting.profile(),
        setting.workload(),
        {ref.name: ref for ref in refs},
        setting.prompts(),
        ClusterChoice(setting.replicas, slo=slo),
    )
    exchanges = simulated.run.exchanges
    attainment, cluster = slo_attainment(exchanges, slo), simulated.cluster
    assert attainment is not None  # there is a limit
    assert cluster is not None
    p50, p95 = np.percentile([exchange.ttft_s or math.inf for exchange in exchanges], [50, 95])
    return SimulatedOutcome(float(p50), float(p95), attainment, cluster.held_share or 0.0, cluster.fetches)


# --- live ----------------------------------------------------------------------------------------------


def run_apart(setting: LiveSetting) -> LiveOutcome:
    """Run a setting in a process of its own, with nothing left of an earlier run.

    Raises:
        RuntimeError: it failed; the message has the end of what it printed.
        subprocess.TimeoutExpired: it does not end.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-live-") as scratch:
        file = Path(scratch) / "outcome.json"
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(file)],
            input=msgspec.json.encode(setting),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            check=False,
            timeout=_PATIENCE_S,
        )
        if done.returncode:
            printed = done.stdout.decode(errors="replace")
            raise RuntimeError(f"{setting.row} at {setting.rate:g}/s: code {done.returncode}: {printed[-2000:]}")
        return msgspec.json.decode(file.read_bytes(), type=LiveOutcome)


async def run_live(setting: LiveSetting, scratch: Path) -> LiveOutcome:
    """Run a setting with this process as the head; ``scratch`` is an empty folder."""
    settings, refs = _settings(setting, scratch), stand_ins(setting, scratch / "adapters")
    async with AsyncExitStack() as stack:
        client = open_cluster(settings, stack)
        try:
            await client.start(lambda progress: None)
            client.know_adapters(refs)
            await _placed(client, refs)
            return await _Drive(setting, client, refs).run()
        finally:
            await client.close()


def _settings(setting: LiveSetting, scratch: Path) -> Settings:
    profile = scratch / "profile.toml"
    write_profile(stretched(setting.profile(), setting.stretch), profile)
    (scratch / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return Settings(
        ModelSettings(str(scratch)),
        engine_settings(
            setting.row_name(setting.stretch),
            executor=ExecutorKind.PACED,
            profile=str(profile),
            threads=1,
        ),
        AdapterSettings(store_dir=str(scratch / "store")),
        ServerSettings(slo_ttft_s=setting.slo_ttft_s * setting.stretch),
        ClusterSettings(replicas=setting.replicas, start=setting.start, pool_dir=str(scratch / "pool")),
    )


async def _placed(client: ClusterClient, refs: Sequence[AdapterRef]) -> None:
    """Wait until all adapters have a place, and what replicas fetch unasked is there."""
    while True:
        state = client.describe()
        if len(state.shares) == len(refs) and not state.copies.under_way:
            return
        await asyncio.sleep(0.05)


class _Drive:
    """One workload through a cluster that is there."""

    def __init__(self, setting: LiveSetting, client: ClusterClient, refs: Sequence[AdapterRef]) -> None:
        self._setting = setting
        self._client = client
        self._adapters: dict[str, AdapterRef] = {ref.name: ref for ref in refs}
        self._bytes = sum(ref.weight_bytes for ref in refs)
        self._workload = setting.workload()
        self._exchanges: dict[int, Exchange] = {}
        self._late_s: list[float] = []
        self._held: list[float] = []

    async def run(self) -> LiveOutcome:
        """Run it."""
        epoch = self._client.describe().epoch
        start_s = time.monotonic() + _LEAD_S
        self._arrivals = self._arrivals_from(start_s)
        await asyncio.sleep(_LEAD_S)
        looks = asyncio.create_task(self._look())
        before, began_s = self._cpu_s(), time.monotonic()
        async with asyncio.TaskGroup() as answers:
            while (due_s := self._arrivals.next_s()) < math.inf:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                request = self._arrivals.take()
                self._late_s.append(time.monotonic() - due_s)
                answers.create_task(self._follow(self._client.submit(request), start_s))
        wall_s, after = time.monotonic() - began_s, self._cpu_s()
        looks.cancel()
        with suppress(asyncio.CancelledError):
            await looks
        used = {who: (after[who] - before[who]) / wall_s for who in after}
        return self._outcome(wall_s, used, epoch)

    def _arrivals_from(self, start_s: float) -> WorkloadArrivals:
        slow = [
            msgspec.structs.replace(request, arrival_s=request.arrival_s * self._setting.stretch)
            for request in self._workload
        ]
        return WorkloadArrivals(slow, self._adapters, self._setting.prompts(), start_s)

    async def _follow(self, handle: RequestHandle, start_s: float) -> None:
        """Clock an answer."""
        index, times_s = int(handle.request.request_id), list[float]()
        async for output in handle:
            now = time.monotonic()
            if output.tokens:
                times_s = [times_s[0] if times_s else now, now]
            finished = output.finished
        assert finished is not None  # it is the last output's
        sent_s, asked = self._arrivals.ended(index, handle.token_ids, now - start_s), self._workload[index]
        self._exchanges[index] = Exchange(
            adapter=asked.adapter,
            due_s=asked.arrival_s,
            sent_s=sent_s / self._setting.stretch,
            ended_s=(now - start_s) / self._setting.stretch,
            token_times_s=tuple((at_s - start_s) / self._setting.stretch for at_s in times_s),
            output_tokens=len(handle.token_ids),
            error=None if finished.reason is FinishReason.LENGTH else f"{finished.reason.value}: {finished.error}",
        )

    async def _look(self) -> None:
        """Note again and again what replicas hold."""
        while True:
            self._held.append(fmean(each.held_bytes for each in self._client.describe().replicas) / self._bytes)
            await asyncio.sleep(_LOOK_S)

    def _cpu_s(self) -> dict[str, float]:
        """Return the CPU time so far of the head, of the engines, and of all else that the head has started."""
        head = psutil.Process()
        engines = {view.process_id for view in self._client.views.values()}
        used = {"head": _cpu_s(head), "engines": 0.0, "others": 0.0}
        for process in head.children(recursive=True):
            used["engines" if process.pid in engines else "others"] += _cpu_s(process)
        return used

    def _outcome(self, wall_s: float, used: Mapping[str, float], epoch: int) -> LiveOutcome:
        exchanges = [self._exchanges[index] for index in sorted(self._exchanges)]
        failed = [exchange.error for exchange in exchanges if exchange.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(exchanges)} requests failed: {failed[0]}")
        attainment = slo_attainment(exchanges, Slo(ttft_s=self._setting.slo_ttft_s))
        assert attainment is not None  # there is a limit
        tpot_p50_s, tpot_p95_s = np.percentile([exchange.tpot_s or 0.0 for exchange in exchanges], [50, 95])
        state = self._client.describe()
        return LiveOutcome(
            ttft_s=[round(exchange.ttft_s or 0.0, 5) for exchange in exchanges],
            tpot_p50_s=float(tpot_p50_s),
            tpot_p95_s=float(tpot_p95_s),
            attainment=attainment,
            duration_s=wall_s / self._setting.stretch,
            held_share=fmean(self._held),
            placements=state.epoch - epoch,
            fetches=state.copies.fetches,
            provisions=state.copies.provisions,
            deletes=state.copies.deletes,
            failed=state.copies.failed,
            late_p99_ms=1e3 * float(np.percentile(self._late_s, 99)),
            cpu_head=used["head"],
            cpu_engines=used["engines"],
            cpu_others=used["others"],
            cores=len(os.sched_getaffinity(0)),
        )


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended meanwhile
        return 0.0
    return float(times.user + times.system)


def main() -> None:
    """Run one setting; see the module."""
    setting = msgspec.json.decode(sys.stdin.buffer.read(), type=LiveSetting)
    with tempfile.TemporaryDirectory(prefix="lorikeet-head-") as scratch:
        outcome = asyncio.run(run_live(setting, Path(scratch)))
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
