"""An engine in this process, driven until all its requests have ended."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.messages import EngineStats
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica, build_replica
from lorikeet.engine.driver import rest
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.base import Kernels

THREADS = len(os.sched_getaffinity(0))
"""All cores, for lines that measure one engine alone."""

DEVICE_VARIABLE = "LORIKEET_ENGINE__DEVICE"

_TOKENS = (300, 10_000)
"""Ordinary token ids of the default model."""


@contextmanager
def replica(model: Path, dtype: str, max_model_tokens: int = 0, **engine: object) -> Iterator[Replica]:
    """Build a replica of ``model`` and close it in the end; ``engine`` are engine settings.

    It runs where a server would by the environment.
    """
    given = EngineSettings(**{"device": os.environ.get(DEVICE_VARIABLE, "cpu")} | engine)  # type: ignore[arg-type]
    built = build_replica(
        Settings(ModelSettings(model=str(model), dtype=dtype, max_model_tokens=max_model_tokens), given)
    )
    try:
        yield built
    finally:
        built.engine.close()


def default_kernels() -> Kernels:
    """Return the backend that an engine chooses here for bfloat16."""
    return choose_kernels("auto", torch.bfloat16, torch.device("cpu"))


@contextmanager
def kernels_as(kernels: object) -> Iterator[None]:
    """Let every replica that is built meanwhile compute with ``kernels``, a wrapper of a real backend."""
    with mock.patch("lorikeet.engine.rank_setup.choose_kernels", return_value=kernels):
        yield


def make_requests(
    name: str,
    count: int,
    prompt_tokens: int,
    output_tokens: int,
    refs: Sequence[AdapterRef] = (),
    seed: int = 0,
) -> list[Request]:
    """Return greedy requests with prompts of their own; ``refs`` are taken in turns, none means the base."""
    prompts = np.random.default_rng(seed).integers(*_TOKENS, (count, prompt_tokens)).tolist()
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    return [
        Request(RequestId(f"{name}-{i}"), prompt, sampling, 0.0, refs[i % len(refs)] if refs else None)
        for i, prompt in enumerate(prompts)
    ]


def run_all(
    built: Replica,
    requests: Iterable[Request],
    on_turn: Callable[[EngineStats], None] | None = None,
) -> dict[RequestId, list[Token]]:
    """Submit all requests at once, run them to their end and return their tokens.

    Raises:
        RuntimeError: one of them failed.
    """
    engine, tokens = built.engine, dict[RequestId, list[Token]]()
    for request in requests:
        tokens[request.request_id] = []
        engine.submit(request)
    while engine.has_requests:
        outputs = engine.step()
        for output in outputs.tokens:
            tokens[output.request_id] += output.tokens
        for event in outputs.events:
            if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                raise RuntimeError(f"{event.request_id}: {event.error}")
        if on_turn is not None:
            on_turn(engine.stats())
        if not engine.is_busy and engine.has_requests:
            rest(engine, MonotonicClock(), math.inf)
    return tokens
