"""modes.5: prefills that host cores assist say what prefills of resident adapters say, whatever happens on the way."""

import math
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from benchmarks.accept.inprocess import make_requests, replica
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.parity import PeerAnswer, compare
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.serve_2 import MAX_TIES
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.memory_bench import fill_host
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica
from lorikeet.engine.driver import rest
from lorikeet.engine.host_lora.assist import HostLora
from lorikeet.engine.host_lora.pool import Deal, HostPool
from lorikeet.models.config import read_model_config

QKV, QV = ("q", "k", "v"), ("q", "v")
ADAPTERS: dict[str, dict[str, Any]] = {
    "qkv-8": {"rank": 8, "modules": QKV},
    "qkv-16": {"rank": 16, "modules": QKV},
    "qkv-32": {"rank": 32, "modules": QKV},
    "qkv-64": {"rank": 64, "modules": QKV},
    "qkv-128": {"rank": 128, "modules": QKV},
    "qv-24": {"rank": 24, "modules": QV},
    "qv-100": {"rank": 100, "modules": QV},
    "qkvo-16": {"rank": 16},
}
REQUESTS, ANSWER_TOKENS = 36, 12
PROMPT_TOKENS = (3, 16, 40, 90, 180, 330)
MEMORY_BYTES, HOST_BYTES, STEP_TOKENS = 512 * 2**20, 512 * 2**20, 128
LINKS = {"slow link": 0.05e9, "link": 0.3e9, "fast link": 2e9}
ARRIVALS = {"all at once": 0, "one by one": 3}
"""Turns of the engine between one request and the next."""

ROWS = ("toppings", "toppings:auto", "toppings:static", "toppings:one-group", "toppings:fewer-cores")
KILL_AT = (10, 200, 400)
"""A worker is killed with so many tickets submitted, if one is there."""

HANDOVERS, HANDOVER_TOKENS, HANDOVER_S = 1000, 16, 100e-6
HANDOVER_DTYPE = "bfloat16"
"""What the model is served in."""

HANDOVER_LINK_BYTES_PER_S = 0.02e9
"""So slow that the host computes nearly all layers."""

RUN_AHEAD = 0
"""Layers that are decided before their turn: the CPU backend computes while it decides."""


@line(
    "modes.5",
    title="Assisted prefills: answers, lost workers, layers in vain, hand-over",
    bound=f"fp32 greedy answers as `cached`, no difference beyond ties (≤ {MAX_TIES} in each run); a worker killed in "
    f"a prefill loses no request; host layers after arrival ≤ {RUN_AHEAD}; {HANDOVER_TOKENS} tokens, engine on one "
    f"core, worker on the other: hand-over per layer ≤ {HANDOVER_S * 1e6:.0f} µs at the median of {HANDOVERS:,}",
)
def run(runs: StoredRuns) -> Result:
    """Answer the same requests by ``cached`` and by rows that assist; then again under kills; then measure."""
    model = default_model()
    with tempfile.TemporaryDirectory(prefix="lorikeet-modes5-") as scratch:
        geometry = read_model_config(model).geometry(4)
        folders = {
            name: write_random_adapter(Path(scratch) / name, geometry, seed=seed, **options)
            for seed, (name, options) in enumerate(ADAPTERS.items())
        }
        cached = runs.get("cached", lambda: _cached(model, folders))
        found: dict[str, dict[str, Any]] = {}
        for link, (arrivals, turns) in ((link, each) for link in LINKS for each in ARRIVALS.items()):
            name = f"toppings, {link}, {arrivals}"
            found[name] = runs.get(name, partial(_compared, model, folders, cached, "toppings", LINKS[link], turns))
        for row in ROWS[1:]:
            name = row.replace(":", " ")
            turns = ARRIVALS["one by one"]
            found[name] = runs.get(name, partial(_compared, model, folders, cached, row, LINKS["link"], turns))
        killed = runs.get(
            "killed", lambda: _compared(model, folders, cached, "toppings", LINKS["slow link"], 3, kills=True)
        )
        handover = runs.get("handover", lambda: _handover(model, geometry, Path(scratch)))
    every = {**found, "killed": killed}
    failures = [
        f"{name}: {one['different']} of {one['requests']} answers differ, {one['ties']} ties"
        for name, one in every.items()
        if one["different"] or one["ties"] > MAX_TIES
    ]
    failures += [
        f"{name}: {one['host_layers_after_arrival']} host layers after arrival"
        for name, one in every.items()
        if one["host_layers_after_arrival"] > RUN_AHEAD and name != "toppings static"
    ]
    totals = {
        key: sum(one[key] for one in every.values())
        for key in ("requests", "different", "ties", "host_layers", "device_layers", "host_layers_after_arrival")
    }
    if not (totals["host_layers"] and totals["device_layers"]):
        failures.append("the host, or the device, computed no layer of any adapter on its way")
    if not (killed["lost_workers"] and killed["rescued_slices"]):
        failures.append("no worker was killed in the middle of a layer")
    if handover["handovers"] < HANDOVERS or handover["median_us"] > HANDOVER_S * 1e6:
        failures.append(f"hand-over {handover['median_us']:.0f} µs at the median of {handover['handovers']}")
    return Result(
        figure={
            **totals,
            "workers killed": killed["lost_workers"],
            "slices computed for them": killed["rescued_slices"],
            "handover_us": handover["median_us"],
            "handover_p90_us": handover["p90_us"],
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"SmolLM2-135M-Instruct, fp32 but for the hand-over ({HANDOVER_DTYPE}); "
        f"{REQUESTS} requests of {min(PROMPT_TOKENS)} to {max(PROMPT_TOKENS)} tokens over the base and "
        f"{len(ADAPTERS)} adapters, of which one changes o, too, and is waited for; "
        f"links of {', '.join(f'{link / 1e9:g}' for link in LINKS.values())} GB/s, requests at once and one by one; "
        "ties as in serve.2, by the two likeliest tokens of `cached`. Under toppings:static the group that comes last "
        "is the host's whether it has arrived or not, so its layers after arrival are counted and not bounded. "
        "Hand-over: from the rows of x to the worker's start and from its end to the sums in q, k, v, without "
        "its computing and without what the engine computes meanwhile",
        details={**every, "handover": handover},
    )


def _requests(built: Replica, folders: Mapping[str, Path]) -> list[Request]:
    """Return requests over all adapters and the base, some of an adapter that others are using and some alone."""
    refs = {name: reference(name, folder, built.sizes.geometry) for name, folder in folders.items()}
    names = [None, *refs]
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=2)
    order = np.random.default_rng(5).integers(0, len(names), REQUESTS).tolist()
    requests = []
    for i, which in enumerate(order):
        tokens = PROMPT_TOKENS[i % len(PROMPT_TOKENS)]
        prompt = make_requests("", 1, tokens, 1, seed=i)[0].prompt_token_ids
        name = names[which]
        requests.append(Request(RequestId(f"r{i}"), prompt, sampling, 0.0, None if name is None else refs[name]))
    return requests


def _settings(row: str, link_bytes_per_s: float) -> dict[str, Any]:
    return {
        "row": row,
        "memory_bytes": MEMORY_BYTES,
        "host_memory_bytes": HOST_BYTES,
        "link_bytes_per_s": link_bytes_per_s,
        "max_step_tokens": STEP_TOKENS,
        "max_repeat": 1,
    }


def _answers(built: Replica, requests: Sequence[Request], turns: int) -> dict[RequestId, list[Token]]:
    """Submit a request every ``turns`` turns, all at once for 0, and return the tokens of all.

    Raises:
        RuntimeError: one of them failed.
    """
    engine, waiting, turn = built.engine, list(requests), 0
    tokens: dict[RequestId, list[Token]] = {request.request_id: [] for request in requests}
    while waiting or engine.has_requests:
        while waiting and (not turns or turn % turns == 0 or not engine.has_requests):
            engine.submit(waiting.pop(0))
            if turns:
                break
        turn += 1
        outputs = engine.step()
        for output in outputs.tokens:
            tokens[output.request_id] += output.tokens
        for event in outputs.events:
            if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                raise RuntimeError(f"{event.request_id}: {event.error}")
        if not engine.is_busy and engine.has_requests:
            rest(engine, MonotonicClock(), math.inf)
    return tokens


def _cached(model: Path, folders: Mapping[str, Path]) -> dict[str, Any]:
    with replica(model, "float32", **_settings("cached", 0.0)) as built:
        requests = _requests(built, folders)
        fill_host(built.engine, tuple({r.adapter.digest: r.adapter for r in requests if r.adapter}.values()))
        tokens = _answers(built, requests, 0)
    answers = [
        PeerAnswer(
            [token.token_id for token in tokens[request.request_id]],
            [token.top[0][1] - token.top[1][1] for token in tokens[request.request_id]],
        )._asdict()
        for request in requests
    ]
    return {"answers": answers}


def _compared(
    model: Path,
    folders: Mapping[str, Path],
    cached: Mapping[str, Any],
    row: str,
    link_bytes_per_s: float,
    turns: int,
    *,
    kills: bool = False,
) -> dict[str, Any]:
    found = {"requests": 0, "different": 0, "ties": 0}
    with replica(model, "float32", **_settings(row, link_bytes_per_s)) as built:
        requests = _requests(built, folders)
        fill_host(built.engine, tuple({r.adapter.digest: r.adapter for r in requests if r.adapter}.values()))
        host_lora = _host_lora(built)
        if kills:
            with _killing(host_lora.pool):
                tokens = _answers(built, requests, turns)
        else:
            tokens = _answers(built, requests, turns)
        counters = host_lora.counters._asdict()
    for request, answer in zip(requests, cached["answers"], strict=True):
        ours = [token.token_id for token in tokens[request.request_id]]
        comparison = compare(ours, PeerAnswer(**answer))
        found["requests"] += 1
        found["different"] += comparison.differs
        found["ties"] += comparison.is_tie
    return {**found, **counters}


@contextmanager
def _killing(pool: HostPool) -> Iterator[None]:
    """Kill a worker when some tickets have been submitted, while it is to compute one."""
    submitted = 0
    submit = pool.submit

    def submit_and_kill(layer: int, x: Tensor, deal: Deal) -> None:
        nonlocal submitted
        submitted += 1
        victims = pool.process_ids if submitted in KILL_AT else []
        for process_id in victims:
            os.kill(process_id, signal.SIGKILL)
        submit(layer, x, deal)

    with mock.patch.object(pool, "submit", submit_and_kill):
        yield


def _handover(model: Path, geometry: ModelGeometry, scratch: Path) -> dict[str, Any]:
    """Prefill short prompts, each under an adapter that is not there, on one core with the worker on another."""
    folders = [write_random_adapter(scratch / f"h{i}", geometry, 16, modules=QKV, seed=90 + i) for i in range(6)]
    settings = {**_settings("toppings", HANDOVER_LINK_BYTES_PER_S), "threads": 1, "host_lora_workers": 1}
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise RuntimeError("the worker needs a core of its own; this machine has one core")
    with replica(model, HANDOVER_DTYPE, **settings) as built:
        refs = [reference(f"h{i}", folder, built.sizes.geometry) for i, folder in enumerate(folders)]
        fill_host(built.engine, tuple(refs))
        host_lora = _host_lora(built)
        # The worker has taken the last core for itself; this thread, which computes the steps, keeps to another.
        os.sched_setaffinity(0, {min(allowed)})
        try:
            prompts = make_requests("h", 400, HANDOVER_TOKENS, 1, refs, seed=7)
            for request in prompts:
                _answers(built, [request], 0)
                if len(host_lora.pool.handovers_s) >= HANDOVERS:
                    break
        finally:
            os.sched_setaffinity(0, allowed)
        handovers = np.array(host_lora.pool.handovers_s)[:HANDOVERS] * 1e6
        counters = host_lora.counters._asdict()
    return {
        "handovers": len(handovers),
        "median_us": float(median(handovers)) if len(handovers) else math.inf,
        "p90_us": float(np.quantile(handovers, 0.9)) if len(handovers) else math.inf,
        **counters,
    }


def _host_lora(built: Replica) -> HostLora:
    host_lora = built.engine._executor.host_lora  # type: ignore[attr-defined]
    assert isinstance(host_lora, HostLora), "this row has no host workers here"
    return host_lora
