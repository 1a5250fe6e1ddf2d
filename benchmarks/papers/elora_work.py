"""ELORA's services and their runs here: stationary histories, a rate that rises in ten stages, and one engine.

The paper prints no lengths, pool sizes, limits of the batch or rates. Instead, this module uses the published
statistics of the data sets, the data sheets of the devices, and vLLM's defaults.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.memory_bench import MemorySetting, modelled_rig, warm_replica
from benchmarks.memory_watch import MemoryWatch
from benchmarks.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.in_process import run_workload
from lorikeet.bench.load_report import RequestResult
from lorikeet.core.clock import Clock
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.ids import AdapterName
from lorikeet.core.messages import MemoryStats, StepOutputs
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.loop import Engine
from lorikeet.memory.memory import Memory
from lorikeet.memory.tree import NodeKind
from lorikeet.papers.elora.cost_model import Elora
from lorikeet.workloads.adapter_choice import choose_adapters
from lorikeet.workloads.arrivals import Rates, arrivals_until, at_rate
from lorikeet.workloads.function_trace import Invocation, popularity, unit_calls
from lorikeet.workloads.shapes import Dialogues, LengthRange, Translation
from lorikeet.workloads.synthetic import adapter_names, spread, synthetic_adapters
from lorikeet.workloads.workload import WorkloadRequest

MODELS = {"8B": "h800-llama-3-8b", "34B": "h800x4-llama-2-34b", "70B": "h800x8-llama-2-70b"}
"""Profiles of the paper's models on its devices (Table II). Llama-2-70B stands for Llama3-70B, of the same shapes."""
RANKS = (32, 64)
BLOCK_TOKENS = 32
HOST_BYTES = 256 * 10**9
MAX_NUM_SEQS, MAX_STEP_TOKENS = 1024, 8192
"""Defaults of vLLM's server on devices of 70 GB and more, since its version 0.8 (``EngineArgs``)."""
FULL_BATCH_ADAPTERS = 50
"""The middle one of the paper's numbers of adapters."""
STAGES = 10
PAST_FULL = 2.0
"""The last stage's rate, divided by the rate of a full batch. It is beyond the peak of every system."""
WINDOW_ANSWERS = 5
"""Length of the window as a multiple of the longest answer at the speed of a quarter full batch, which is slower than
the middle stages."""
CALL_VARIATION = 2.0
"""Coefficient of variation of the gaps between calls of one of Azure's functions."""
SAMPLE_S = 1.0
OLD_TOKENS = 2048
"""Tokens of each text that fills the device before the window and is not used again."""
LEAST_AGE_S = 2.0
"""Minimum age of the texts that are on the device before the window."""

CHATBOT = Dialogues(
    scene_blocks=0,
    turns=1.2,
    utterance=LengthRange(31.7, 1.0, 1024),
    answer=LengthRange(140.0, 0.8, 256),
    pause_s=15.0,
)
"""LMSYS-33k: 1.2 turns, prompts of 52.3 and answers of 189.5 tokens on average (Zheng and others, LMSYS-Chat-1M, 2024,
Table 1). Answers are cut to 256 tokens."""
TRANSLATION = Translation(sentence=LengthRange(24, 0.7, 64))
AGENT = Dialogues(utterance=LengthRange(16, 0.7, 64), pause_s=5.0)


class Service(NamedTuple):
    """A scenario of the paper (III-B).

    Attributes:
        shape: lengths and turns of the requests.
        choice: distribution over adapters, which are then called at Poisson times; None if each adapter is called like
            one of Azure's functions.
        answer_tokens: tokens of the longest answer.
    """

    shape: Translation | Dialogues
    choice: str | None
    answer_tokens: int


SERVICES = {
    "chatbot": Service(CHATBOT, "zipf:1", 256),
    "translation": Service(TRANSLATION, None, 128),
    "agent": Service(AGENT, None, 64),
}


class Case(msgspec.Struct, frozen=True):
    """Describes the setting of one run, which is the same for all systems.

    Attributes:
        service: name in ``SERVICES``.
        model: name in ``MODELS``.
        adapters: number of adapters.
        seed: seed of all draws.
        choice: distribution over adapters; empty for the service's.
        load: constant rate as a share of the highest; 0 for ten stages up to it.
        pool: size of the device's pool, as a share of the memory beside the weights.
        filled: whether the device is full of earlier texts at the start.
        window: length of the window, as a multiple of ``WINDOW_ANSWERS``.
    """

    service: str
    model: str
    adapters: int
    seed: int
    choice: str = ""
    load: float = 0.0
    pool: float = 1.0
    filled: bool = True
    window: float = 1.0


# --- costs -------------------------------------------------------------------------------------------


@cache
def profile_of(model: str) -> CostProfile:
    """Return a model's profile with KV of all its heads.

    The paper's block has 32 tokens (III-C) and 16 MB (VIII-L), which is the KV of all 32 heads of Llama-3-8B, four
    times that of the 8 that the model needs, and "other dimensions of LoRAs align with those of the KV caches" (VII): a
    row of KV is as wide as the model. A decode step reads all of it.
    """
    profile = load_profile(MODELS[model])
    geometry, step = profile.geometry, profile.step
    heads = geometry.modules["q"].out_features // geometry.head_dim
    read = msgspec.structs.replace(step.decode_attention, value=step.decode_attention.value * heads / geometry.kv_heads)
    return msgspec.structs.replace(
        profile,
        geometry=msgspec.structs.replace(geometry, kv_heads=heads),
        step=msgspec.structs.replace(step, decode_attention=read),
    )


# --- rates and requests ------------------------------------------------------------------------------


@cache
def sample(service: str) -> tuple[float, float, float]:
    """Return the mean tokens of the prompt, of its part that is new to the service, and of the answer."""
    requests = _dataset(Case(service, "8B", 50, 0), 20.0, 200.0)
    seen: dict[str, int] = {}
    new = []
    for request in requests:
        before = seen.get(request.conversation or "", 0)
        new.append(request.input_tokens - before)
        if request.conversation:
            seen[request.conversation] = request.input_tokens + request.output_tokens
    prompts, answers = ([getattr(each, name) for each in requests] for name in ("input_tokens", "output_tokens"))
    return float(np.mean(prompts)), float(np.mean(new)), float(np.mean(answers))


class FullBatch(NamedTuple):
    """A service on a device whose batch stays full: requests that end per second; seconds of a quarter full step."""

    requests_per_s: float
    quarter_step_s: float


@cache
def full_batch(service: str, model: str) -> FullBatch:
    """Return the speed of a device with as many running sequences of ``FULL_BATCH_ADAPTERS`` adapters as it holds.

    Their number is ``MAX_NUM_SEQS``, or as many as fit beside the adapters. All history is found. In each step as many
    sequences begin as end.
    """
    profile = profile_of(model)
    costs = CostModel(profile, KernelForm.UNPADDED)
    refs = synthetic_adapters(FULL_BATCH_ADAPTERS, RANKS, profile.geometry, modules=LORA_MODULES)
    ranks = [costs.adapter_rank(ref) for ref in refs]
    prompt, new, answer = sample(service)
    context = prompt + answer / 2
    left_bytes = profile.pool_bytes - sum(ref.weight_bytes for ref in refs)
    count = min(MAX_NUM_SEQS, int(left_bytes / (context * profile.geometry.block_bytes(1))))
    began = count / answer

    def step_s(prefills: int, sequences: int = count) -> float:
        decodes = [
            SequenceWork(round(context), 1, True, place, ranks[place]) for place in np.arange(sequences) % len(refs)
        ]
        begin = [SequenceWork(round(prompt - new), round(new), True, place, ranks[place]) for place in range(prefills)]
        return costs.step_s(step_work([*decodes, *begin], KernelForm.UNPADDED))

    each_s = step_s(1) - step_s(0) if began < 1 else (step_s(round(began)) - step_s(0)) / round(began)
    seconds = step_s(0) + began * each_s
    return FullBatch(began / seconds, step_s(0, count // 4) + began / 4 * each_s)


def window_s(case: Case) -> float:
    """Return the seconds of the window in which requests arrive: the time of several answers, or of a dialogue."""
    service = SERVICES[case.service]
    longest_s = service.answer_tokens * full_batch(case.service, case.model).quarter_step_s
    dialogue_s = service.shape.turns * service.shape.pause_s if isinstance(service.shape, Dialogues) else 0.0
    return case.window * max(WINDOW_ANSWERS * longest_s, dialogue_s)


def stage_rates(case: Case) -> list[float]:
    """Return the rate of each stage of the window."""
    top = PAST_FULL * full_batch(case.service, case.model).requests_per_s
    return [case.load * top] * STAGES if case.load else [top * (stage + 1) / STAGES for stage in range(STAGES)]


def rates_of(case: Case) -> Rates:
    """Return the stages as rates over time."""
    stage_s = window_s(case) / STAGES
    times_s, per_s = [0.0], []
    for stage, rate in enumerate(stage_rates(case)):
        times_s += [stage_s * (stage + 1) - 1e-6, stage_s * (stage + 1)]
        per_s += [rate, rate]
    return Rates(tuple(times_s[:-1]), tuple(per_s))


def _dataset(case: Case, rate: float, duration_s: float) -> list[WorkloadRequest]:
    """Return requests of a service at a constant rate, its first dialogues beginning at 0."""
    service, names = SERVICES[case.service], adapter_names(case.adapters)
    turns = service.shape.turns if isinstance(service.shape, Dialogues) else 1.0
    calls_per_s = rate / turns
    of_arrivals, of_adapters, of_lengths = np.random.default_rng((case.seed, 0)).spawn(3)
    if service.choice is None:
        units = unit_calls(
            popularity(case.adapters).tolist(), CALL_VARIATION, of_arrivals, until=calls_per_s * duration_s
        )
        calls = [Invocation(call.at_s / calls_per_s, call.adapter) for call in units]
    else:
        times_s = arrivals_until("poisson", duration_s, Rates.constant(calls_per_s), of_arrivals)
        rule = "uniform" if case.choice == "distinct" else case.choice or service.choice
        ranks = spread(RANKS, case.adapters)
        places = choose_adapters(rule, range(case.adapters), times_s, of_adapters, ranks)
        calls = [Invocation(at_s, place) for at_s, place in zip(times_s, places, strict=True)]
    requests = service.shape.requests(calls, names, BLOCK_TOKENS, of_lengths)
    return [each for each in requests if each.arrival_s < duration_s]


class Load(NamedTuple):
    """Requests of one run.

    Attributes:
        old: requests that bring earlier texts onto the device, in the order of their times before the window.
        requests: requests of the window.
        rates: rates of the window's stages.
        stage_s: length of a stage.
    """

    old: list[WorkloadRequest]
    requests: list[WorkloadRequest]
    rates: list[float]
    stage_s: float


def load_of(case: Case) -> Load:
    """Return the requests of a run.

    The requests are those of a stationary service after its dialogues have begun. All times are stretched to the
    stages, as the paper scales its traces (III-B). Before the window, the device holds the texts so far of the
    dialogues that continue in the window, and as many texts that are not used again as fit.
    """
    profile = profile_of(case.model)
    rates, stage_rate = rates_of(case), stage_rates(case)
    window = window_s(case)
    count = max(STAGES, round(rates.expected(window)))
    shape = SERVICES[case.service].shape
    since_s = 2 * shape.turns * shape.pause_s if isinstance(shape, Dialogues) else 0.0
    mean_rate = float(np.mean(stage_rate))
    made = _dataset(case, mean_rate, since_s + 1.5 * count / mean_rate + 5.0)
    own = [each for each in made if each.arrival_s >= since_s][:count]
    requests = at_rate(own, rates)
    if case.choice == "distinct":
        names = adapter_names(case.adapters)
        requests = [
            msgspec.structs.replace(each, adapter=names[place]) for place, each in enumerate(requests[: case.adapters])
        ]
    going_on = {each.conversation for each in own}
    before = [each for each in made if each.arrival_s < since_s and each.conversation in going_on]
    old = [*(_old_texts(case, profile) if case.filled else []), *_texts_so_far(before, own)]
    return Load(old, requests, stage_rate, window / STAGES)


def _texts_so_far(before: Sequence[WorkloadRequest], own: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return the texts of dialogues with turns before the window, oldest first.

    If a dialogue continues in the window, its text includes the last answer.
    """
    latest = {each.conversation: each for each in before if each.conversation}
    after: dict[str, WorkloadRequest] = {}
    for request in own:
        after.setdefault(request.conversation or "", request)
    texts = []
    for conversation, last in latest.items():
        goes_on = after.get(conversation or "")
        tokens = last.input_tokens + (last.output_tokens if goes_on else 0)
        blocks = tokens // BLOCK_TOKENS
        text = msgspec.structs.replace(
            last,
            input_tokens=blocks * BLOCK_TOKENS + 1,
            output_tokens=1,
            prefix_blocks=(goes_on or last).prefix_blocks[:blocks],
            conversation=None,
        )
        texts.append(text)
    return sorted(texts, key=lambda each: each.arrival_s)


def _pool_tokens(case: Case, profile: CostProfile) -> float:
    geometry = profile.geometry
    return profile.pool_bytes * case.pool / geometry.kv_elements_per_token() / geometry.dtype_bytes


def _old_texts(case: Case, profile: CostProfile) -> list[WorkloadRequest]:
    """Return as many texts as the device holds, under adapters of the service's popularity."""
    count = int(_pool_tokens(case, profile) / OLD_TOKENS) + 1
    generator = np.random.default_rng((case.seed, 77))
    names = adapter_names(case.adapters)
    calls = _dataset(case, 50.0, max(20.0, count / 50.0))
    chosen = [calls[place].adapter for place in generator.integers(len(calls), size=count).tolist()]
    if case.choice == "distinct":
        chosen = choose_adapters("uniform", names, [0.0] * count, generator)
    return [WorkloadRequest(0.0, name, OLD_TOKENS + 1, 1, prefix_block_tokens=BLOCK_TOKENS) for name in chosen]


# --- runs --------------------------------------------------------------------------------------------


class Watch(MemoryWatch):
    """Also samples, every second, the number of adapters beside Low, and the largest branch."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.invalid_shares: list[float] = []
        super().__init__(engine, clock, BLOCK_TOKENS, SAMPLE_S)
        self._seen_s = clock.now()
        self._now = clock
        self._from: Memory = engine._memory
        self.adapters: list[tuple[int, float]] = []
        self.largest_branch = 0.0

    def begin(self) -> None:
        """Reset the counts, but keep the texts that an infinite cache would contain."""
        self.samples.clear()
        self.invalid_shares.clear()
        self.parts.clear()
        self.adapters.clear()
        self.reusable_tokens, self.largest_branch = 0, 0.0
        self._start_s = self._seen_s = self._now.now()
        self.began = self._sample()

    def _sample(self) -> MemoryStats:
        stats = super()._sample()
        if stats.device.kv_cached:
            self.invalid_shares.append(stats.invalid_kv_bytes / stats.device.kv_cached)
        return stats

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take a sample if it is due."""
        super().on_outputs(outputs)
        now = self._now.now()
        if now - self._seen_s < SAMPLE_S:
            return
        self._seen_s = now
        tree = self._from.tree
        nodes = np.flatnonzero(tree.kind[: tree.end] >= NodeKind.ADAPTER)
        blocks = np.bincount(tree.top[nodes], list(map(tree.device_size, nodes.tolist())))
        self.largest_branch = max(self.largest_branch, float(blocks.max(initial=0.0)) / self._from.total_blocks)
        policy = self._from._eviction
        if isinstance(policy, Elora):
            self.adapters.append((self._from.tiers.resident_adapters, policy.low(now)))


def run_case(preset: str, case: Case) -> dict[str, Any]:
    """Run a system on a case and return its figures; lists are by request.

    TTFT counts from when a request is sent: a turn is sent when it is due and the answer before is complete.

    Raises:
        RuntimeError: a request got no whole answer.
    """
    profile, load = profile_of(case.model), load_of(case)
    options = WorkOptions(source="", adapters=case.adapters, ranks=RANKS, modules=LORA_MODULES)
    work = MemoryWork(load.requests, tuple(adapter_names(case.adapters)), BLOCK_TOKENS, case.seed)
    (largest,) = synthetic_adapters(1, (max(RANKS),), profile.geometry, modules=LORA_MODULES)
    setting = MemorySetting(
        memory_bytes=int(profile.pool_bytes * case.pool),
        host_memory_bytes=max(HOST_BYTES, 2 * case.adapters * largest.weight_bytes if case.adapters > 100 else 0),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        num_scheduler_steps=1,
        max_model_len=profile.max_model_len,
        block_size=BLOCK_TOKENS,
    )
    rig = modelled_rig(profile, work, options)
    with warm_replica(rig, setting.settings(preset), work) as ((engine, *_), clock, coalesced):
        prompts = work.prompts_of(rig.vocabulary)
        old = [msgspec.structs.replace(each, arrival_s=0.0) for each in load.old]
        watch = Watch(engine, clock)
        run_workload(engine, clock, old, rig.adapters, prompts, coalesced=coalesced, observer=watch)
        idle_until_s = clock.now() + LEAST_AGE_S
        while clock.now() < idle_until_s:
            engine.step()
            clock.wait_until(min(idle_until_s, clock.now() + 0.1))
        watch.begin()
        run = run_workload(engine, clock, load.requests, rig.adapters, prompts, coalesced=coalesced, observer=watch)
    return _figures(preset, load, run.exchanges, watch, engine)


def _figures(preset: str, load: Load, records: Sequence[RequestResult], watch: Watch, engine: Engine) -> dict[str, Any]:
    failed = [each for each in records if each.error is not None]
    if failed:
        raise RuntimeError(f"{preset}: {len(failed)} requests failed, the first with {failed[0].error}")
    memory, began = engine.memory_stats(), watch.began
    device = [each.device for each in watch.samples]
    queries, reusable = memory.adapter_queries - began.adapter_queries, watch.reusable_tokens
    moved = sum(
        route.bytes - (began.transfers[name].bytes if name in began.transfers else 0)
        for name, route in memory.transfers.items()
        if name in ("host-device", "device-host", "source-device")
    )
    parts = np.mean(watch.parts, axis=0).tolist()
    return {
        "rates": load.rates,
        "stage_s": load.stage_s,
        "due_s": [round(each.due_s, 3) for each in records],
        "ttft_s": [round(each.token_times_s[0] - each.sent_s, 5) for each in records],
        "tpot_s": [
            round((each.token_times_s[-1] - each.token_times_s[0]) / (each.output_tokens - 1), 6)
            if each.output_tokens > 1
            else None
            for each in records
        ],
        "prefilled_tokens": sum(each.input_tokens - (each.cached_tokens or 0) for each in records),
        "drained_s": max(each.ended_s for each in records),
        "parts_s": dict(zip(("queue", "adapter", "kv", "prefill"), parts, strict=True)),
        "invalid_kv_share": float(np.mean(watch.invalid_shares)) if watch.invalid_shares else 0.0,
        "adapter_hit_rate": (memory.adapter_hits - began.adapter_hits) / queries,
        "kv_hit_rate": (memory.kv_hits_tokens - began.kv_hits_tokens) / reusable if reusable else 1.0,
        "used_share": float(np.mean([1 - each.free / each.total for each in device])),
        "history_share": [round(each.kv_cached / each.total, 4) for each in device],
        "adapter_share": [round(each.adapters / each.total, 4) for each in device],
        "running_share": [round(each.kv_running / each.total, 4) for each in device],
        "sampled_s": [round(each.at_s, 3) for each in watch.samples],
        "moved_bytes": moved,
        "adapters_low": [[count, round(low, 3)] for count, low in watch.adapters],
        "largest_branch": watch.largest_branch,
    }


# --- demand ------------------------------------------------------------------------------------------

DEMAND_RATE, DEMAND_S = 5.0, 600.0
"""Rate of Fig. 9."""


def demand_changes(service: str) -> dict[str, float]:
    """Return the changes from second to second of the device memory that a service's running requests need (III-B).

    A request needs the blocks of its prompt and answer, and its adapter, while it runs alone on 34B.

    Returns:
        ``mean``: mean of the changes, relative to the demand before. ``over_20_percent``: share of changes above 20 %.
    """
    profile = profile_of("34B")
    geometry = profile.geometry
    refs = synthetic_adapters(50, RANKS, geometry, modules=LORA_MODULES)
    sizes = {ref.name: ref.weight_bytes for ref in refs}
    token_s = profile.step.tokens.points[0][1] + profile.step.sampled_rows.points[0][1]
    seconds = np.arange(int(DEMAND_S))
    kv = np.zeros(len(seconds))
    needed: dict[str, np.ndarray] = {}
    for request in _dataset(Case(service, "34B", 50, 1), DEMAND_RATE, DEMAND_S):
        running = (seconds >= request.arrival_s) & (seconds < request.arrival_s + token_s * request.output_tokens)
        blocks = -(-(request.input_tokens + request.output_tokens) // BLOCK_TOKENS)
        kv += running * blocks * geometry.block_bytes(BLOCK_TOKENS)
        needed[str(request.adapter)] = needed.get(str(request.adapter), running) | running
    demand = kv + sum(there * float(sizes[AdapterName(name)]) for name, there in needed.items())
    before = demand[:-1] > 0
    changes = np.abs(np.diff(demand))[before] / demand[:-1][before]
    return {"mean": float(changes.mean()), "over_20_percent": float((changes > 0.2).mean())}
