"""Real engine processes over tiny random checkpoints, and requests for them."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from lorikeet.adapters.store import reference
from lorikeet.client.client import EngineClient, RequestHandle
from lorikeet.config import AdapterSettings, EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Finished
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import EngineStats
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.engine.loop import Engine
from lorikeet.models.config import read_model_config
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.models.checkpoints import make_checkpoint
from tests.support.outputs import outputs_of

VOCAB = 97
CONTEXT_TOKENS = 512
TIE = 1e-4
"""Where the two likeliest tokens are closer than this, the order of a sum may decide between them."""


def make_model(folder: Path, **overrides: Any) -> Path:
    """Save a tiny fp32 Llama."""
    make_checkpoint(folder, "llama", **{"max_position_embeddings": CONTEXT_TOKENS, **overrides})
    return folder


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> Path:
    """Save an adapter that plainly changes what the model says."""
    return write_random_adapter(folder, read_model_config(model).geometry(4), rank, seed=seed, b_std=0.4)


def make_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> AdapterRef:
    """Save such an adapter and return a reference to it."""
    write_adapter(folder, model, seed, rank)
    return reference(folder.name, folder, read_model_config(model).geometry(4))


def live_settings(model: Path, **engine: Any) -> Settings:
    """fp32, one thread, small blocks, a small arena, no host tier."""
    small = {"block_size": 4, "memory_bytes": 8 * 2**20, "host_memory_bytes": 0}
    given = {**small, "threads": 1, "num_scheduler_steps": 2, **engine}
    return Settings(ModelSettings(str(model), dtype="float32"), EngineSettings(**given), AdapterSettings())


@asynccontextmanager
async def engine_process(settings: Settings) -> AsyncIterator[EngineClient]:
    """Start an engine, and close it at the end."""
    client = EngineClient(settings)
    try:
        await client.start(lambda progress: None)
        yield client
    finally:
        await client.close()


def prompt(count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(VOCAB), k=count)


def greedy(
    name: str, token_ids: list[int], max_tokens: int, adapter: AdapterRef | None = None, **sampling: Any
) -> Request:
    """A greedy request that nothing but its length ends, with the two likeliest tokens of every position."""
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 2, **sampling})
    return Request(RequestId(name), token_ids, params, 0.0, adapter)


def engine_processes() -> set[int]:
    """Return the process ids of the engines that run below this process, Ray's among them."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, though its parent may not have asked for its code yet
            if "lorikeet.engine" in child.cmdline():
                found.add(child.pid)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether a process runs no more, though its parent, if it has one yet, may not have asked for its code."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def finish(handle: RequestHandle) -> tuple[Finished, list[float]]:
    """Read a request to its end; return how it ended, and by how much each token was the likeliest."""
    gaps: list[float] = []
    async for output in outputs_of(handle):
        gaps += [token.top[0][1] - token.top[1][1] if token.top else 0.0 for token in output.tokens]
        if output.finished is not None:
            return output.finished, gaps
    raise AssertionError("the outputs ended without an end")


def is_idle(stats: EngineStats | None) -> bool:
    """Whether no request holds or awaits anything, and the accounts of all blocks add up."""
    if stats is None or stats.running or stats.waiting:
        return False
    used = stats.kv_blocks + stats.adapter_blocks + stats.inflight_blocks
    return used == 0 and stats.free_blocks + stats.cached_blocks == stats.total_blocks


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Run requests at once to their ends and return their tokens."""
    for each in requests:
        engine.submit(each)
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    while engine.has_requests:
        for output in engine.step().tokens:
            tokens[output.request_id] += [token.token_id for token in output.tokens]
        if not engine.is_busy:
            engine.wait_for_transfer()
    return list(tokens.values())


def answer_alone(model: Path, request: Request) -> list[int]:
    """What an engine with nothing else to do says."""
    engine = build_replica(live_settings(model)).engine
    try:
        return run(engine, [request])[0]
    finally:
        engine.close()
