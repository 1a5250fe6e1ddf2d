"""Measures the CPU time of everything except arithmetic: ``python -m benchmarks.control_plane``.

Parts, each a table:

* ``step``: a decode step of 32 sequences on an executor that does nothing, beside the same step on the real executor. A
  real run is recorded and its results are replayed, so both run the same plans.
* ``grammars``: time that masks add to the critical path of such a step if all rows follow a JSON schema, and time that
  is hidden beside the forward pass.
* ``eviction``: matching a prompt, a tick of the swapper and an eviction for one more block, with 2,000 adapters and
  100,000 nodes in memory.
* ``kv_events``: what events of KV add to a turn of the engine's loop, in the same memory.
* ``admission``: a decision of Chameleon's queue over 1,000 waiting requests, and recomputing its size classes.
* ``routes``: a choice among 64 replicas with 10,000 adapters, by every routing and placement policy of the presets.
* ``placement``: LoRAServe's placement of 10,000 adapters on 1,000 replicas, and dLoRA's migration plans.
* ``scale``: a route and an orchestrator's tick by adapters and replicas, up to 100,000 on 1,000.
* ``streaming``: processor time of the API process and the engine process for each streamed token, over HTTP.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import psutil
import torch

from benchmarks.harness import (
    LORIKEET,
    THREADS,
    chat_body,
    default_kernels,
    default_model,
    kernels_as,
    make_requests,
    median_p95,
    print_setup,
    print_table,
    ratios,
    replica,
    running_server,
    sample_adapters,
    sample_flags,
    with_interval,
)
from benchmarks.steps import AT_ONCE, Stopwatch
from lorikeet.bench.replicas import build_modelled
from lorikeet.chat.grammar_process import GrammarKind, GrammarSpec, notation
from lorikeet.cluster.migration.problem import CoMigrationSettings, MovableRequest, ReplicaLoad
from lorikeet.cluster.migration.review import CoMigration
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.routing.base import AdapterPlaces
from lorikeet.cluster.routing.fleet import Fleet, ReplicaInfo, RequestAverages
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import GENERIC, ClusterOptions, PolicySetup
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.config import KvEventSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.executor import Executor
from lorikeet.core.ids import AdapterDigest, BlockId, ReplicaId, RequestId
from lorikeet.core.plan import SequenceStart, StepPlan, StepResult, Token, TransferDone
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.devices import MODELS
from lorikeet.engine.build import Replica, memory_options
from lorikeet.engine.kv_publisher import KvPublisher
from lorikeet.memory.blocks import SequenceLease, WaitReason
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.kv_events import BlockTokens, KvEvents
from lorikeet.memory.memory import Memory
from lorikeet.memory.packing import pack
from lorikeet.memory.prefix_insertion import ComputedTokens
from lorikeet.memory.tree import block_keys
from lorikeet.models.config import read_model_config
from lorikeet.papers.chameleon.options import REFRESH_S
from lorikeet.papers.chameleon.queue import ChameleonQueue
from lorikeet.papers.chameleon.size_classes import RequestSize
from lorikeet.papers.loraserve.placement import LoRAServe
from lorikeet.policies import ADMISSION, PLACEMENT, ROUTING
from lorikeet.presets import PRESETS, Preset
from lorikeet.scheduling.admission import RunningRequest
from lorikeet.scheduling.state import StepTimeEstimator
from lorikeet.simulator.scenario import Scenario
from lorikeet.worker.batch import RankSequence
from lorikeet.worker.grammars import GrammarCompiler, GrammarMasks
from lorikeet.worker.sampler import Sampler
from lorikeet.workloads.prompts import DEFAULT_IDS
from lorikeet.workloads.synthetic import synthetic_adapters

GEOMETRY = MODELS["llama-2-7b"].geometry
BLOCK_TOKENS = 16
US = 1e-6
MS = 1e-3


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    options = parser.parse_args()
    print_setup()
    for name in options.parts.split(","):
        PARTS[name]()


def _timed(times: int, call: Callable[[int], object], warm_up: int = 10) -> list[float]:
    """Return the processor time of each call in seconds, without the first calls."""
    seconds = []
    for number in range(warm_up + times):
        began_s = time.process_time()
        call(number)
        seconds.append(time.process_time() - began_s)
    return seconds[warm_up:]


@contextmanager
def _one_core() -> Iterator[None]:
    """Pin this thread, and threads that it starts, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


# --- step --------------------------------------------------------------------------------------------

ROWS_OF_STEP = 32
PAIRS = 5
STEP_WORK = (128, 64)


class _Recorder:
    """Runs plans with another executor, and records the plans and their results."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.steps: list[tuple[StepPlan, StepResult]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """Run it."""
        result = self._inner.execute(plan)
        self.steps.append((plan, result))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _NoOpExecutor:
    """Returns the results of a recorded run immediately. Implements ``core.executor.Executor``."""

    grammars = None

    def __init__(self) -> None:
        self.recorded: Iterator[tuple[StepPlan, StepResult]] = iter(())
        self.different = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Return what the recorded run returned."""
        recorded, result = next(self.recorded)
        self.different += plan != recorded
        return result

    def assist_counters(self) -> None:
        """Return None: there are no host workers."""

    def completed_transfers(self) -> list[TransferDone]:
        """Return none: the base model needs no adapters."""
        return []

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Do nothing: no transfer is in flight."""

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Return no bytes: blocks hold nothing."""
        return (b"",) * len(blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Do nothing: blocks hold nothing."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def step() -> None:
    """Print the time of a decode step with and without arithmetic."""
    model = default_model()
    torch.set_num_threads(THREADS)
    watch = Stopwatch(default_kernels(), timed=AT_ONCE)
    noop = _NoOpExecutor()
    real_s = list[float]()
    noop_s = list[float]()
    kernels_s = list[float]()
    with kernels_as(watch), replica(model, threads=THREADS) as real:
        recorder = _Recorder(real.engine._executor)
        made = (noop, read_model_config(model), real.sizes)
        with (
            mock.patch.object(real.engine, "_executor", recorder),
            mock.patch("lorikeet.engine.build.build_torch_executor", return_value=made),
            replica(model, threads=THREADS) as empty,
        ):
            for batch in range(PAIRS + 1):
                recorder.steps.clear()
                watch.steps.clear()
                taken = _turns_s(real, batch)
                noop.recorded = iter(recorder.steps)
                replayed = _turns_s(empty, batch)
                if noop.different:
                    raise RuntimeError(f"{noop.different} plans differ from the recorded ones")
                turns = [i for i, (plan, _) in enumerate(recorder.steps) if _decodes_all(plan)]
                steps = sum(recorder.steps[i][1].steps_run for i in turns)
                if batch:  # the first one warms up
                    real_s.append(sum(taken[i] for i in turns) / steps)
                    noop_s.append(sum(replayed[i] for i in turns) / steps)
                    times = [sum(each.in_kernels_s.values()) for _, each in watch.decode_steps(ROWS_OF_STEP)]
                    kernels_s.append(statistics.mean(times))
    outside_s = [real - kernels for real, kernels in zip(real_s, kernels_s, strict=True)]
    rows = [
        [name, f"{statistics.median(seconds) / MS:.3f}", with_interval(ratios(seconds, real_s), ".1%")]
        for name, seconds in (
            ("on the real executor", real_s),
            ("of which outside of kernel calls", outside_s),
            ("on one that does nothing", noop_s),
        )
    ]
    print_table(f"A decode step of {ROWS_OF_STEP}", ["step", "ms", "share"], rows)
    loop_s = [f"{seconds / MS:.2f}" for seconds in np.quantile(_loop_of_many(), (0.0, 0.5, 0.9))]
    title = f"The engine's loop around a decode step of {MANY_ROWS} over {MANY_ADAPTERS} adapters, processor time"
    print_table(title, ["least, ms", "median", "P90"], [loop_s])


MANY_ROWS = 256
MANY_ADAPTERS = 100
MANY_TOKENS = 400


def _loop_of_many() -> list[float]:
    """Return the seconds of each turn of an engine on a modelled H100, without the time of its executor."""
    scenario = Scenario(
        profile="h100-llama-2-7b",
        adapters=MANY_ADAPTERS,
        ranks="8-64",
        arrivals="now",
        count=MANY_ROWS,
        output_tokens=f"{MANY_TOKENS}",
        engine={"max_num_seqs": MANY_ROWS},
    )
    profile = load_profile(scenario.profile)
    workload = scenario.recipe().requests()
    refs = list(scenario.adapter_refs(profile.geometry, workload).values())
    made = build_modelled(scenario.settings(), profile)
    engine = made.replica.engine
    executor = made.executor
    taken_s = list[float]()
    for number, request in enumerate(make_requests("", MANY_ROWS, 64, MANY_TOKENS)):
        engine.submit(msgspec.structs.replace(request, adapter=refs[number % len(refs)]))
    execute = executor.execute
    executing_s = 0.0

    def timed_execute(plan: StepPlan) -> StepResult:
        nonlocal executing_s
        began_s = time.thread_time()
        result = execute(plan)
        executing_s = time.thread_time() - began_s
        return result

    with mock.patch.object(executor, "execute", timed_execute):
        while engine.has_requests:
            began_s = time.thread_time()
            executing_s = 0.0
            outputs = engine.step()
            if len(outputs.tokens) == MANY_ROWS:
                taken_s.append(time.thread_time() - began_s - executing_s)
            if not engine.is_busy and (due_s := executor.next_transfer_s()) is not None:
                made.clock.wait_until(due_s)
    return taken_s


DECISION_ADAPTERS = 2000
DECISION_QUEUE = 32
DECISION_TURNS = 600


def decisions() -> None:
    """Print the time of a step's decisions beside the step, with many adapters and sequences."""
    decided_s, steps_s = _decisions()
    shares = [decided / step for decided, step in zip(decided_s, steps_s, strict=True)]
    row = [f"{seconds / MS:.2f}" for seconds in np.quantile(decided_s, (0.5, 0.9))]
    row += [f"{np.median(steps_s) / MS:.1f}", f"{np.median(shares):.1%}", f"{sum(decided_s) / sum(steps_s):.1%}"]
    title = f"Decisions of a step: {MANY_ROWS} sequences, {DECISION_QUEUE} wait, {DECISION_ADAPTERS} adapters; A100, 7B"
    print_table(title, ["median, ms", "P90", "step, ms", "median share", "share of all time"], [row])


def _decisions() -> tuple[list[float], list[float]]:
    """Return processor time of the decisions of full steps, and the modelled durations of the steps.

    A request replaces each that ends. Its adapter is drawn at random, so that adapters are loaded and evicted.
    Decisions are all that happens between two steps, but for what applies the tokens: finished transfers, tick, plan.
    """
    scenario = Scenario(
        profile="a100-80-llama-2-7b",
        adapters=DECISION_ADAPTERS,
        ranks="8-64",
        arrivals="now",
        count=1,
        engine={"max_num_seqs": MANY_ROWS, "max_num_batched_tokens": 2048, "host_memory_bytes": 256 * 10**9},
    )
    profile = load_profile(scenario.profile)
    refs = list(scenario.adapter_refs(profile.geometry, scenario.recipe().requests()).values())
    made = build_modelled(scenario.settings(), profile)
    engine = made.replica.engine
    engine.register_adapters(tuple(refs))
    draw = random.Random(1)
    count = MANY_ROWS + DECISION_QUEUE + 8 * DECISION_TURNS
    fresh = iter(make_requests("", count, 64, MANY_TOKENS))
    decided_s = list[float]()
    steps_s = list[float]()
    taken_s = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal taken_s
            began_s = time.thread_time()
            result = call(*arguments)
            taken_s += time.thread_time() - began_s
            return result

        return run

    execute = made.executor.execute

    def noted_execute(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if len(plan.sequences) >= MANY_ROWS * 0.9:
            steps_s.append(result.duration_s)
            decided_s.append(taken_s)
        return result

    with (
        mock.patch.object(made.executor, "execute", noted_execute),
        mock.patch.object(engine, "_plan", timed(engine._plan)),
        mock.patch.object(engine, "_apply_transfers", timed(engine._apply_transfers)),
    ):
        live = 0
        while len(steps_s) < DECISION_TURNS:
            while live < MANY_ROWS + DECISION_QUEUE:
                # Answers of different lengths, so that requests end one after the other.
                request = next(fresh)
                sampling = msgspec.structs.replace(request.sampling, max_tokens=draw.randint(50, MANY_TOKENS - 100))
                ref = refs[int(DECISION_ADAPTERS * draw.random() ** 2)]
                engine.submit(msgspec.structs.replace(request, adapter=ref, sampling=sampling))
                live += 1
            taken_s = 0.0
            outputs = engine.step()
            live -= sum(isinstance(event, Finished) for event in outputs.events)
            if not engine.is_busy and (due_s := made.executor.next_transfer_s()) is not None:
                made.clock.wait_until(due_s)
    return decided_s, steps_s


def _turns_s(built: Replica, batch: int) -> list[float]:
    """Run a batch and return the seconds of each turn that ran a plan."""
    engine = built.engine
    seconds = []
    for request in make_requests(f"{batch}", ROWS_OF_STEP, *STEP_WORK, seed=batch):
        engine.submit(request)
    while engine.has_requests or engine.is_busy:
        began_s = time.perf_counter()
        engine.step()
        took_s = time.perf_counter() - began_s
        if engine.is_busy:
            seconds.append(took_s)
    return seconds


def _decodes_all(plan: StepPlan) -> bool:
    return len(plan.sequences) == ROWS_OF_STEP and all(each.tokens == 1 and each.samples for each in plan.sequences)


# --- grammars ----------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 200},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "object", "properties": {"w": {"type": "number"}, "h": {"type": "number"}}},
    },
    "required": ["name", "tags", "size"],
}
MASKED_STEPS = 100


def grammars() -> None:
    """Print the cost of masks in a decode step whose rows all follow a JSON schema."""
    model = default_model()
    with replica(model, threads=THREADS) as real:
        recorder = _Recorder(real.engine._executor)
        with mock.patch.object(real.engine, "_executor", recorder):
            for batch in range(3):
                recorder.steps.clear()
                taken = _turns_s(real, batch)
        turns = [i for i, (plan, _) in enumerate(recorder.steps) if _decodes_all(plan)]
        step_s = sum(taken[i] for i in turns) / sum(recorder.steps[i][1].steps_run for i in turns)
    torch.set_num_threads(1)  # on one thread, so that this thread's time is the whole time
    config = read_model_config(model)
    compiler = GrammarCompiler(model / "tokenizer.json", config.vocab_size, config.eos_token_ids)
    text = notation(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), ""))
    began_s = time.perf_counter()
    compiler.read_tokenizer().result()
    read_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    compiler.compile(text).result()
    compile_s = time.perf_counter() - began_s
    dtype = getattr(torch, config.dtype)
    plain_s, _ = _sampled(config.vocab_size, "", GrammarMasks(compiler, torch.device("cpu"), dtype), dtype)
    masked_s, beside_s = _sampled(config.vocab_size, text, GrammarMasks(compiler, torch.device("cpu"), dtype), dtype)
    added_s = masked_s - plain_s
    rows = [
        ["a decode step", f"{step_s / MS:.3f}", ""],
        ["sampling without grammars", f"{plain_s / MS:.3f}", f"{plain_s / step_s:.1%}"],
        ["added by masks, after the forward pass", f"{added_s / MS:.3f}", f"{added_s / step_s:.1%}"],
        ["masks, beside the forward pass", f"{beside_s / MS:.3f}", f"{beside_s / step_s:.1%}"],
        ["compiling the grammar, once", f"{compile_s / MS:.3f}", ""],
        ["reading the tokenizer, once", f"{read_s / MS:.0f}", ""],
    ]
    print_table(f"Grammars in a decode step of {ROWS_OF_STEP}", ["work", "ms", "share"], rows)
    compiler.close()


def _sampled(vocabulary: int, grammar: str, masks: GrammarMasks, dtype: torch.dtype) -> tuple[float, float]:
    """Sample steps of rows with a grammar.

    Returns:
        Median seconds of this thread in sampling a step, and median seconds of the masks beside it.
    """
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(default_kernels().choose, masks)
    params = SamplingParams(max_tokens=MASKED_STEPS + 1, temperature=0.0, grammar=grammar)
    rows = [RankSequence(SequenceStart(RequestId(str(i)), [1, i], 2, params, None)) for i in range(ROWS_OF_STEP)]
    own_s = []
    beside_s = []
    for _ in range(MASKED_STEPS):
        logits = torch.randn(ROWS_OF_STEP, vocabulary, generator=generator).to(dtype)
        began_s = time.thread_time()
        began = time.perf_counter()
        sampler.begin(rows)
        took_s = time.thread_time() - began_s
        if sampler._masks is not None:
            sampler._masks.result()
            beside_s.append(time.perf_counter() - began)
        began_s = time.thread_time()
        tokens = sampler.sample(logits, rows)
        own_s.append(took_s + time.thread_time() - began_s)
        for row, token in zip(rows, tokens, strict=True):
            row.add_token(token.token_id if isinstance(token, Token) else 0)
    masks.close()
    return statistics.median(own_s), statistics.median(beside_s) if beside_s else 0.0


# --- eviction ----------------------------------------------------------------------------------------

MEMORY_ADAPTERS = 2_000
NODES = 100_000
MATCHED_TOKENS = 2_048
DEVICE_BLOCKS = 25_000
HOST_BLOCKS = 250_000


class _Filled:
    """Holds a memory of the preset ``elora`` whose transfers finish on request."""

    def __init__(self, refs: Sequence[AdapterRef], tokens: BlockTokens | None = None) -> None:
        self.refs = refs
        sizes = {ref.max_rank: _size(ref) for ref in refs[:2]}
        preset = PRESETS["elora"]
        block_bytes = GEOMETRY.block_bytes(BLOCK_TOKENS)
        policies = (preset.eviction, preset.prefetch, memory_options(preset))
        known = (lambda ref: sizes[ref.max_rank], *policies)
        self.memory = Memory(DEVICE_BLOCKS, HOST_BLOCKS, BLOCK_TOKENS, block_bytes, *known, tokens=tokens)
        self.now = 0.0
        self._generator = np.random.default_rng(1)

    def settle(self) -> None:
        """Finish all transfers."""
        self.memory.take_transfers()
        while self.memory.tiers.transfers:
            for transfer_id in list(self.memory.tiers.transfers):
                self.memory.finish_transfer(TransferDone(transfer_id), self.now)
            self.memory.take_transfers()
        self.memory.take_evictions()
        self.memory.take_events()

    def match(self, ref: AdapterRef, token_ids: Sequence[int]) -> Sequence[Any]:
        """Look up a prompt and return its block keys."""
        self.now += 0.01
        keys = self.memory.keys_of(ref.digest, token_ids)
        self.memory.arrive(ref, keys, len(token_ids), self.now)
        return keys

    def admit(self, ref: AdapterRef, token_ids: Sequence[int]) -> SequenceLease:
        """Admit a sequence, after the transfers that it waits for."""
        keys = self.match(ref, token_ids)
        for _ in range(100):
            lease = self.memory.try_admit(ref, keys, len(token_ids), self.now)
            self.settle()
            if isinstance(lease, SequenceLease):
                return lease
        raise RuntimeError(f"a sequence of {len(token_ids)} tokens is not admitted: {lease}")

    def add_kv(self, ref: AdapterRef, token_ids: list[int]) -> None:
        """Run a sequence to its end, so that its KV is cached."""
        lease = self.admit(ref, token_ids)
        self.memory.commit([ComputedTokens(lease, token_ids, len(token_ids))], self.now)
        self.memory.release(lease, self.now)
        self.settle()

    def fill_device(self) -> None:
        """Fill every device block with the KV of finished sequences."""
        while free := self.memory.counts().free:
            self.add_kv(self.refs[0], _tokens(min(free, 500) * BLOCK_TOKENS, self._generator))

    def tick_s(self) -> float:
        """Return the seconds of a tick of the swapper."""
        self.now += 1.0
        began_s = time.process_time()
        self.memory.swapper.tick(self.now)
        took_s = time.process_time() - began_s
        self.settle()
        return took_s

    def grow_s(self, lease: SequenceLease) -> float:
        """Return the seconds in which a sequence gets one more block of a full device."""
        self.now += 0.01
        wanted = [(lease, (len(lease.blocks) + 1) * BLOCK_TOKENS)]
        began_s = time.process_time()
        self.memory.try_grow(wanted, self.now)
        took_s = time.process_time() - began_s
        self.settle()
        if not self.memory.try_grow(wanted, self.now):
            raise RuntimeError("nothing could be evicted from a full device")
        return took_s


def eviction() -> None:
    """Print the time of lookups, ticks and evictions, and the bytes of Python objects for a block."""
    generator = np.random.default_rng(0)
    refs = synthetic_adapters(MEMORY_ADAPTERS, (32, 64), GEOMETRY)
    looked_up = [(ref, _tokens(MATCHED_TOKENS, generator)) for ref in refs[:50]]
    tracemalloc.start()
    filled = _Filled(refs)
    for ref, token_ids in looked_up:
        filled.add_kv(ref, token_ids)
    each = (NODES - filled.memory.stats().nodes) // (MEMORY_ADAPTERS - len(looked_up)) + 1
    for ref in refs[len(looked_up) :]:
        filled.add_kv(ref, _tokens(each * BLOCK_TOKENS, generator))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    blocks = DEVICE_BLOCKS - filled.memory.counts().free + HOST_BLOCKS - filled.memory.host_counts().free
    matches = _timed(300, lambda i: filled.match(*looked_up[i % len(looked_up)]))
    full = []
    for _ in range(33):
        filled.fill_device()
        full.append(filled.tick_s())
    free = -1
    # A tick evicts only a part of the blocks that it wants to free
    while free != (free := filled.memory.counts().free):
        filled.tick_s()
    idle = [filled.tick_s() for _ in range(30)]
    lease = filled.admit(refs[0], _tokens(BLOCK_TOKENS, generator))
    filled.fill_device()
    grown = [filled.grow_s(lease) for _ in range(310)][10:]
    rows = [
        [f"match of a prompt of {MATCHED_TOKENS:,} tokens", *median_p95(matches, US)],
        ["tick of a full device, which evicts", *median_p95(full[3:], US)],
        ["tick with free blocks", *median_p95(idle, US)],
        ["eviction for one more block", *median_p95(grown, US)],
    ]
    title = f"Memory of elora, {MEMORY_ADAPTERS:,} adapters, {filled.memory.stats().nodes:,} nodes"
    print_table(f"{title}, {kept_bytes / blocks:.0f} bytes a block", ["call", "median, us", "P95, us"], rows)


def kv_events() -> None:
    """Print the time that events of KV add to a turn of the engine, beside a step of 5 ms."""
    generator = np.random.default_rng(0)
    refs = synthetic_adapters(MEMORY_ADAPTERS, (32, 64), GEOMETRY)
    rows = []
    for nodes in (NODES // 10, NODES):
        tokens = BlockTokens(BLOCK_TOKENS)
        filled = _Filled(refs, tokens)
        events = KvEvents(filled.memory.tree, tokens)
        events.set_names({ref.name: ref.digest for ref in refs})
        publisher = KvPublisher(KvEventSettings("ipc:///tmp/lorikeet-kv-events-benchmark"), BLOCK_TOKENS)
        for ref in refs:
            filled.add_kv(ref, _tokens(nodes // MEMORY_ADAPTERS * BLOCK_TOKENS, generator))
        publisher.publish(events.take())
        taken = []
        for turn in range(310):
            # Of 256 sequences that decode, a sixteenth fill a block in a step.
            for ref in refs[turn % 100 : turn % 100 + 256 // BLOCK_TOKENS]:
                filled.add_kv(ref, _tokens(BLOCK_TOKENS, generator))
            began_s = time.thread_time()
            publisher.publish(events.take())
            taken.append(time.thread_time() - began_s)
        publisher.close()
        median, p95 = median_p95(taken[10:], US)
        rows.append([f"{nodes:,}", median, p95, f"{float(median) / 5000:.1%}"])
    print_table("Events of KV, 16 new blocks a turn", ["nodes", "median, us", "P95, us", "share of 5 ms"], rows)


def _size(ref: AdapterRef) -> AdapterSize:
    packing = pack(ref.ranks, GEOMETRY, GEOMETRY.block_elements(BLOCK_TOKENS))
    return AdapterSize(packing.blocks, packing.used_elements * GEOMETRY.dtype_bytes)


def _tokens(count: int, generator: np.random.Generator) -> list[int]:
    return [int(token) for token in generator.integers(DEFAULT_IDS.low, DEFAULT_IDS.high, count)]


# --- admission ---------------------------------------------------------------------------------------

WAITING = 1_000
SAMPLES = 15_000
RUNNING = 64


class _FullEngine:
    """Simulates an engine without room for another adapter, which makes a policy's decision longest."""

    total_tokens = 300_000
    max_model_len = 4096
    max_running = RUNNING
    step_times = StepTimeEstimator()

    def __init__(self, adapters: list[AdapterRef]) -> None:
        self.admitted: list[RunningRequest] = []
        self._absent = {ref.digest for ref in adapters[::2]}

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        return 0 if adapter is None else 4 * adapter.max_rank

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        return adapter is None or adapter.digest not in self._absent

    def may_run(self, request: Request) -> bool:
        return True

    def running(self) -> list[RunningRequest]:
        return self.admitted

    def free_tokens(self) -> int:
        return 0


def admission() -> None:
    """Print the time of decisions of Chameleon's queue."""
    chance = random.Random(3)
    adapters = synthetic_adapters(100, (8, 16, 32, 64, 128), GEOMETRY)
    engine = _FullEngine(adapters)
    for _ in range(100):
        engine.step_times.note(chance.randrange(2000), chance.randrange(1, 60), 0.03)
    queue = ADMISSION["chameleon"](engine)
    assert isinstance(queue, ChameleonQueue)
    for index in range(SAMPLES):
        now = index * REFRESH_S / SAMPLES
        output = min(1000, 1 + int(chance.lognormvariate(4.9, 0.9)))
        prompt = [0] * min(3000, 1 + int(chance.lognormvariate(6.8, 0.8)))
        ref = chance.choice(adapters)
        sampling = SamplingParams(max_tokens=1000)
        request = Request(RequestId(str(index)), prompt, sampling, now, ref, predicted_tokens=output)
        queue.add(request, now)
        if index < SAMPLES - WAITING - RUNNING:
            queue.remove(request, now)
            sizes = RequestSize(len(prompt), request.expected_tokens, engine.adapter_tokens(ref))
            queue._class_stats.ended(sizes, chance.expovariate(0.2), now)
    now = REFRESH_S
    policy = queue.admit(now)
    request = next(policy).request
    while len(engine.admitted) < RUNNING:
        engine.admitted.append(RunningRequest(request, 1, len(request.prompt_token_ids)))
        request = policy.send(None).request
    rows = [
        ["decision of a step", *median_p95(_timed(200, lambda _: list(_decide(queue, now))), US)],
        ["review of running requests", *median_p95(_timed(200, lambda _: queue.review(now)), US)],
        ["recomputing size classes", *median_p95(_timed(50, lambda _: queue._refresh(now - 1e-6)), US)],
    ]
    print_table(f"Chameleon's queue, {len(queue):,} waiting", ["call", "median, us", "P95, us"], rows)


def _decide(queue: ChameleonQueue, now: float) -> Iterator[Request]:
    policy = queue.admit(now)
    candidate = next(policy, None)
    while candidate is not None:
        yield candidate.request
        try:
            candidate = policy.send(WaitReason.ADAPTER_BLOCKS)
        except StopIteration:
            return


# --- routes ------------------------------------------------------------------------------------------

RANKS = (8, 16, 32, 64, 128)
REPLICAS = 64
ADAPTERS = 10_000
LIVE = 6_400
ROUTES_TIMED = 1_000
RESIDENT = 500
PROMPT_TOKENS = 512
ANSWER_TOKENS = 128
ADAPTER_BYTES = 50_000_000


def routes() -> None:
    """Print the time of a choice among replicas, without hashing the prompt."""
    pairs = dict.fromkeys((preset.routing, preset.placement) for preset in PRESETS.values())
    with _one_core():
        rows = [
            [f"{routing}, {placement}", *median_p95(_routes(routing, placement), US)] for routing, placement in pairs
        ]
    title = f"A route among {REPLICAS} replicas, {ADAPTERS:,} adapters, {LIVE:,} live requests"
    print_table(title, ["routing, placement", "median, us", "P95, us"], rows)


def _routes(
    name: str, placement: str, replica_count: int = REPLICAS, adapter_count: int = ADAPTERS, live_count: int = LIVE
) -> list[float]:
    draw = random.Random(0)
    replicas = [ReplicaId(f"r{number}") for number in range(replica_count)]
    adapters = [AdapterDigest(f"a{number}") for number in range(adapter_count)]
    fleet = Fleet(RequestAverages(float(ANSWER_TOKENS), 1.0))
    for replica_id in replicas:
        fleet.join(ReplicaInfo(replica_id, total_tokens=400_000, kv_token_bytes=5e5))
        for adapter in draw.sample(adapters, RESIDENT):
            fleet.loaded(replica_id, adapter)
    policy = ROUTING[name](PolicySetup(Preset(), None, ClusterOptions(tpot_s=0.05)))
    table = _table(placement, replicas, adapters, draw)
    live: list[tuple[ReplicaId, RequestId]] = []
    seconds = []
    for number in range(live_count + ROUTES_TIMED):
        asked = _asked(number, draw, adapters)
        began_s = time.process_time()
        choice = policy.route(asked, fleet, AdapterPlaces(table), 0.0)
        took_s = time.process_time() - began_s
        if choice is None:
            raise RuntimeError(f"{name} found no replica for request {number}")
        chosen = choice.replica
        fleet.dispatched(asked, chosen)
        fleet.admitted(chosen, asked.request_id, 0.0)
        live.append((chosen, asked.request_id))
        if len(live) > live_count:
            seconds.append(took_s)
            fleet.ended(*live.pop(draw.randrange(len(live))), 1.0)
    return seconds


def _table(
    placement: str, replicas: list[ReplicaId], adapters: list[AdapterDigest], draw: random.Random
) -> RoutingTable:
    """Return a table as a placement makes it.

    Adapters are at all replicas, at one replica, or some of them at several replicas.
    """
    if placement == "everywhere":
        everywhere = tuple(ReplicaShare(replica_id, 1 / len(replicas)) for replica_id in replicas)
        return RoutingTable(1, dict.fromkeys(adapters, everywhere))
    counts = (1, 1, 1, 2, 4) if placement in ("loraserve", "rank-groups", "dlora") else (1,)
    homes = {adapter: draw.sample(replicas, draw.choice(counts)) for adapter in adapters}
    return RoutingTable(1, {each: tuple(ReplicaShare(home, 1 / len(of)) for home in of) for each, of in homes.items()})


def _asked(number: int, draw: random.Random, adapters: list[AdapterDigest]) -> RoutingRequest:
    """Return a request whose prompt shares its beginning with some others."""
    adapter = draw.choice(adapters)
    shared = [draw.randrange(4) for _ in range(4 * BLOCK_TOKENS)]
    prompt = shared + [draw.randrange(1000) for _ in range(PROMPT_TOKENS - len(shared))]
    keys = tuple(block_keys(adapter, prompt, BLOCK_TOKENS))
    rank = draw.choice(RANKS)
    return RoutingRequest(RequestId(str(number)), adapter, rank, ADAPTER_BYTES, PROMPT_TOKENS, ANSWER_TOKENS, keys)


# --- placement ---------------------------------------------------------------------------------------

PLACED_ADAPTERS = 10_000
PLACED_REPLICAS = 1_000
CHOSEN = 4
MOVABLE = 128
SOLVE_S = 1.0
TICK_ADAPTERS = 2_000


def placement() -> None:
    """Print the time of a placement of all adapters, and of a migration plan."""
    draw = np.random.default_rng(0)
    points = OperatingPoints({rank: 1000.0 / (1 + rank / 128) for rank in RANKS})
    policy = LoRAServe(points)
    replicas = [ReplicaId(f"r{number}") for number in range(PLACED_REPLICAS)]
    loads = draw.pareto(1.5, PLACED_ADAPTERS) * 50

    def place(period: int) -> None:
        nonlocal loads
        loads = loads * draw.uniform(0.5, 1.5, PLACED_ADAPTERS)
        demands = [
            AdapterDemand(AdapterDigest(f"a{number:05}"), RANKS[number % len(RANKS)], 10**8, float(load))
            for number, load in enumerate(loads)
        ]
        policy.place(demands, replicas, float(period))

    everywhere = PLACEMENT[PRESETS["lorikeet:auto"].placement](PolicySetup(Preset(), None, ClusterOptions()))
    ticked = Orchestrator(everywhere, replicas[:64], 0.0)
    known = [AdapterDigest(f"a{number:05}") for number in range(TICK_ADAPTERS)]
    ticked.register([AdapterInfo(each, RANKS[number % len(RANKS)], 10**8) for number, each in enumerate(known)], 0.0)

    def tick(period: int) -> None:
        ticked.period(DemandReport(tuple((each, PROMPT_TOKENS) for each in known), costs=GENERIC), 10.0 * (period + 1))

    def migrate(seed: int) -> None:
        CoMigration(CoMigrationSettings(time_limit_s=SOLVE_S / 2)).review(*_problem(seed))

    with _one_core():
        rows = [
            [f"LoRAServe, {PLACED_ADAPTERS:,} adapters on {PLACED_REPLICAS:,}", *median_p95(_timed(5, place, 1), MS)],
            [f"lorikeet:auto, {TICK_ADAPTERS:,} adapters on 64", *median_p95(_timed(20, tick, 1), MS)],
            [f"dLoRA's migration, {MOVABLE} requests on {CHOSEN}", *median_p95(_timed(9, migrate, 1), MS)],
        ]
    print_table("Placement, on one core", ["policy", "median, ms", "P95, ms"], rows)


SCALES = ((1_000, 10), (10_000, 100), (100_000, 100), (10_000, 1_000), (100_000, 1_000))
"""Adapters and replicas."""
LIVE_PER_REPLICA = 32
SCALE_TICKS = 5


def scale() -> None:
    """Print how the times of a route, and of a placement at the end of a period, grow with adapters and replicas."""
    rows = []
    with _one_core():
        for adapters, replicas in SCALES:
            live = LIVE_PER_REPLICA * replicas
            routed = [
                median_p95(_routes(routing, placement, replicas, adapters, live), US)[0]
                for routing, placement in (("table", "loraserve"), ("seconds", "everywhere"))
            ]
            ticks = [median_p95(_ticks(name, adapters, replicas), MS)[0] for name in ("everywhere", "loraserve")]
            rows.append([f"{adapters:,}", f"{replicas:,}", *routed, *ticks])
    headings = ["adapters", "replicas", "route by table, us", "by seconds, us", "tick, everywhere, ms", "LoRAServe, ms"]
    print_table("One orchestrator, on one core", headings, rows)


def _ticks(name: str, adapters: int, replicas: int) -> list[float]:
    """Return the seconds of ends of periods in which every adapter had a request."""
    ids = [ReplicaId(f"r{number}") for number in range(replicas)]
    if name == "loraserve":
        points = OperatingPoints({rank: 1000.0 / (1 + rank / 128) for rank in RANKS})
        orchestrator = Orchestrator(LoRAServe(points), ids, 0.0)
    else:
        orchestrator = Orchestrator(PLACEMENT[name](PolicySetup(Preset(), None, ClusterOptions())), ids, 0.0)
    known = [AdapterDigest(f"a{number:06}") for number in range(adapters)]
    orchestrator.register([AdapterInfo(each, RANKS[n % len(RANKS)], 10**8) for n, each in enumerate(known)], 0.0)
    draw = np.random.default_rng(0)
    sizes = [tuple(zip(known, draw.integers(1, 1000, adapters).tolist(), strict=True)) for _ in range(SCALE_TICKS + 1)]

    def tick(period: int) -> None:
        orchestrator.period(DemandReport(sizes[period]), 10.0 * (period + 1))

    return _timed(SCALE_TICKS, tick, 1)


def _problem(seed: int) -> tuple[list[ReplicaLoad], list[MovableRequest], dict[AdapterDigest, int]]:
    """Return replicas. The requests of one replica wait, because it is overloaded."""
    draw = random.Random(seed)
    adapters = [AdapterDigest(f"a{number:03}") for number in range(MOVABLE)]
    replicas = [ReplicaId(f"r{number}") for number in range(CHOSEN)]
    requests = [
        MovableRequest(
            RequestId(f"q{number}"),
            adapter,
            replicas[0] if draw.random() < 0.6 else draw.choice(replicas),
            draw.randrange(50, 1500) * 2**20,
            draw.uniform(5, 20),
            draw.uniform(0.05, 0.8),
        )
        for number, adapter in enumerate(adapters)
    ]
    loads = [ReplicaLoad(replica_id, (16 if seed % 2 else 60) * 2**30, 0, 9.0) for replica_id in replicas]
    return loads, requests, dict.fromkeys(adapters, 56 * 2**20)


# --- streaming ---------------------------------------------------------------------------------------

STREAM_ROUNDS = 3
FEW_TOKENS = 8
"""Of short answers, whose processor time is taken off that of long ones: what is left is that of further tokens."""
STREAM_TOKENS = {"the default model": 128, "an engine that computes nothing": 400}
STREAMS = {"the default model": 16, "an engine that computes nothing": 512}


IDLE_SERVER = (sys.executable, "-m", "benchmarks.idle_engine", "serve")
PROBES = 500
PAUSE_S = 0.02
PROBED_TOKENS = 800


def streaming() -> None:
    """Print the processor time of a streamed token, in the API process and in the engine process."""
    rows = [[engine, streams, *_streamed(engine, streams)] for engine, streams in STREAMS.items()]
    headings = ["engine", "streams at once", "API, us a token", "tokens/s of a core", "API, ms a request"]
    headings += ["engine, us a token", "tokens/s"]
    print_table("Streaming over HTTP, processor time", headings, rows)
    headings = ["streams beside it", "pause between requests, ms", "P50, ms", "P99, ms"]
    print_table("First token of an engine that gives it at once", headings, _first_tokens())


def _first_tokens() -> list[list[str]]:
    """Return the time that the API process and the channel add to the first token, idle and beside streams.

    Without pauses the caches are warm.
    """
    name = default_model().name
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch,
        running_server(
            [str(default_model()), "--store-dir", f"{scratch}/store"], Path(scratch) / "serve.log", command=IDLE_SERVER
        ) as server,
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes,
    ):
        for streams, pause_s in ((0, 0.0), (0, PAUSE_S), (STREAMS["an engine that computes nothing"], PAUSE_S)):
            background = processes.submit(_keep_streaming, server.url, name, streams)
            taken_s = processes.submit(_time_first_tokens, server.url, name, pause_s).result()
            have_ended = streams > 0 and background.done()  # the machine may be too busy
            background.result()
            quantiles = [f"{at / MS:.1f}" for at in np.quantile(taken_s, (0.5, 0.99))]
            rows.append([f"{streams}", f"{pause_s / MS:.0f}", *(["they ended"] * 2 if have_ended else quantiles)])
    return rows


def _keep_streaming(url: str, name: str, streams: int) -> None:
    asyncio.run(_stream_all(url, [name], streams, PROBED_TOKENS))


def _time_first_tokens(url: str, name: str, pause_s: float) -> list[float]:
    """Return the seconds until the first byte of the answer, of one request after the other."""
    taken_s = []
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as http:
        for number in range(PROBES):
            time.sleep(pause_s)
            body = json.dumps(chat_body(name, f"Tell me about the number {number}.", 1))
            began_s = time.perf_counter()
            http.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = http.getresponse()
            answer.read1()
            taken_s.append(time.perf_counter() - began_s)
            answer.read()
    return taken_s[PROBES // 5 :]  # without the chunks before all streams have begun


def _streamed(title: str, streams: int) -> list[str]:
    is_idle = title != "the default model"
    tokens = streams * (STREAM_TOKENS[title] - FEW_TOKENS)
    command = IDLE_SERVER if is_idle else (LORIKEET, "serve")
    adapters = {} if is_idle else sample_adapters()
    flags = [str(default_model()), *([] if is_idle else sample_flags())]
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch,
        running_server(
            [*flags, "--store-dir", f"{scratch}/store"], Path(scratch) / "serve.log", command=command
        ) as server,
    ):
        api = psutil.Process(server.process.pid)
        name = "benchmarks.idle_engine" if is_idle else "lorikeet.engine"
        engine = next(each for each in api.children() if name in each.cmdline())
        names = [default_model().name, *adapters]

        def times_of(answer_tokens: int) -> list[float]:
            before = (_cpu_s(api), _cpu_s(engine))
            began_s = time.monotonic()
            asyncio.run(_stream_all(server.url, names, streams, answer_tokens))
            return [_cpu_s(api) - before[0], _cpu_s(engine) - before[1], time.monotonic() - began_s]

        times_of(FEW_TOKENS)
        few, many = zip(
            *((times_of(FEW_TOKENS), times_of(STREAM_TOKENS[title])) for _ in range(STREAM_ROUNDS)), strict=True
        )
    api_s, engine_s, wall_s = (
        statistics.median(long[of] - short[of] for short, long in zip(few, many, strict=True)) / tokens
        for of in range(3)
    )
    request_s = statistics.median(short[0] for short in few) / streams - FEW_TOKENS * api_s
    return [
        f"{api_s / US:.1f}",
        f"{1 / api_s:,.0f}",
        f"{request_s / MS:.1f}",
        f"{engine_s / US:.0f}",
        f"{1 / wall_s:,.0f}",
    ]


class _StreamReader(asyncio.Protocol):
    """Requests one stream and reads it, with less processor time than a full HTTP client.

    Args:
        body: body of the chat request.
        ended: event that is set when the whole answer is read.
    """

    def __init__(self, body: dict[str, Any], ended: asyncio.Future[None]) -> None:
        content = json.dumps(body).encode()
        self._request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._request += b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        self._ended = ended
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep the end of the answer."""
        self._end = (self._end + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        """Check that the answer was complete."""
        if b"data: [DONE]" in self._end:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(RuntimeError(f"a stream ended with {self._end!r}"))


async def _stream_all(url: str, names: Sequence[str], streams: int, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    port = int(url.rpartition(":")[2])
    ends = []
    for number in range(streams):
        body = chat_body(names[number % len(names)], f"Tell me about the number {number}.", tokens)
        ends.append(ended := loop.create_future())
        await loop.create_connection(partial(_StreamReader, body, ended), "127.0.0.1", port)
    await asyncio.gather(*ends)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


PARTS: dict[str, Callable[[], None]] = {
    "step": step,
    "decisions": decisions,
    "grammars": grammars,
    "eviction": eviction,
    "kv_events": kv_events,
    "admission": admission,
    "routes": routes,
    "placement": placement,
    "scale": scale,
    "streaming": streaming,
}


if __name__ == "__main__":
    main()
