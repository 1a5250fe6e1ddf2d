"""admission.5: what Chameleon's queue costs: a decision over many waiting requests, and finding classes anew."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.accept.admission_common import OURS
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.synthetic import synthetic_adapters
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import RequestId
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.devices import MODELS
from lorikeet.memory.leases import Wait
from lorikeet.scheduling.admission import Running
from lorikeet.scheduling.multilevel.options import REFRESH_S
from lorikeet.scheduling.multilevel.queue import ChameleonQueue
from lorikeet.scheduling.multilevel.sizes import Sizes
from lorikeet.scheduling.pace import Pace
from lorikeet.scheduling.policies import ADMISSION

WAITING, SAMPLES, RUNNING = 1_000, 15_000, 64
DECISION_S, REFRESH_BOUND_S = 1e-3, 20e-3
REPEATS, WARM_UP = 200, 10
LEAST_ASKED = 8
"""Two of each class."""
RUN_S = 60.0
_TOKENS = 300_000


class _Engine:
    """A full one: whoever is tried finds no room for its adapter, the outcome that costs the policy most.

    Attributes:
        admitted: who runs.
        asked: how often the policy has asked for the room of a request.
    """

    total_tokens, max_model_tokens, pace = _TOKENS, 4096, Pace()

    def __init__(self, adapters: list[AdapterRef]) -> None:
        self.admitted: list[Running] = []
        self.asked = 0
        self._absent = {ref.digest for ref in adapters[::2]}

    def adapter_tokens(self, adapter: AdapterRef | None) -> int:
        return 0 if adapter is None else 4 * adapter.max_rank

    def is_resident(self, adapter: AdapterRef | None) -> bool:
        self.asked += 1
        return adapter is None or adapter.digest not in self._absent

    def may_run(self, request: Request) -> bool:
        return True

    def running(self) -> list[Running]:
        return self.admitted

    def free_tokens(self) -> int:
        return 0


@line(
    "admission.5",
    title=f"Chameleon's decisions over {WAITING:,} waiting requests, and its refresh over {SAMPLES:,} samples",
    bound=f"a decision ≤ {DECISION_S * 1e3:g} ms, a refresh ≤ {REFRESH_BOUND_S * 1e3:g} ms",
)
def run(runs: StoredRuns) -> Result:
    """Fill a queue, then time both."""
    found = runs.get("decisions", _measure)
    medians = {name: statistics.median(found[f"{name}_s"]) for name in ("decision", "review", "refresh")}
    bounds = {"decision": DECISION_S, "refresh": REFRESH_BOUND_S}
    failures = [
        f"a {name} takes {medians[name] * 1e3:.2f} ms" for name, bound in bounds.items() if medians[name] > bound
    ]
    if not found["tried"] or found["asked"] < LEAST_ASKED:
        failures.append(f"{found['tried']} are tried and {found['asked']} looked at: that is not the most there is")
    return Result(
        figure={
            **{
                f"{name}_ms": f"{median * 1e3:.3f} (P95 {float(np.quantile(found[f'{name}_s'], 0.95)) * 1e3:.3f})"
                for name, median in medians.items()
            },
            "tried a decision": found["tried"],
            "looked at a decision": found["asked"],
            "classes": found["classes"],
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{WAITING:,} requests wait, {RUNNING} run; decision: all that a step asks the policy of {OURS}, until "
        "it names nobody any more: who may join others finds no room, the oldest head is blocked by its adapter, so "
        "that those behind it are looked at, and the other heads leave it its room; review: of the running ones; "
        f"refresh: classes, quotas and classing of all {WAITING:,} by {SAMPLES:,} arrivals and ends in {REFRESH_S:g} "
        f"s; medians of {REPEATS}",
        details=found,
    )


def _measure() -> dict[str, Any]:
    chance = random.Random(3)
    adapters = synthetic_adapters(100, (8, 16, 32, 64, 128), MODELS["llama-2-7b"].geometry)
    engine = _Engine(adapters)
    for _ in range(100):
        engine.pace.note(chance.randrange(2000), chance.randrange(1, 60), 0.03)
    queue = ADMISSION[OURS](engine)
    assert isinstance(queue, ChameleonQueue)
    step_s = REFRESH_S / SAMPLES
    for index in range(SAMPLES):
        now = index * step_s
        request = _request(index, now, chance, adapters)
        queue.add(request, now)
        if index < SAMPLES - WAITING - RUNNING:
            queue.remove(request, now)
            queue._census.ended(_sizes(request, engine), chance.expovariate(0.2), now)
    now = SAMPLES * step_s
    _admit(queue, engine, now)
    assert (len(queue), len(engine.admitted)) == (WAITING, RUNNING)
    classes = len(queue.stats().quota_tokens)
    # Nobody has been waited for too long yet: else those who could join others leave their room to the first head.
    for number in range(classes):
        queue._stuck.ran(number, RUN_S)
    engine.asked = 0
    tried = sum(1 for _ in _decide(queue, now))
    asked = engine.asked
    return {
        "decision_s": _timed(lambda: [None for _ in _decide(queue, now)]),
        "review_s": _timed(lambda: queue.review(now)),
        "refresh_s": _timed(lambda: queue._refresh(now - 1e-6)),
        "tried": tried,
        "asked": asked,
        "classes": classes,
    }


def _request(index: int, now: float, chance: random.Random, adapters: list[AdapterRef]) -> Request:
    output = min(1000, 1 + int(chance.lognormvariate(4.9, 0.9)))
    prompt = [0] * min(3000, 1 + int(chance.lognormvariate(6.8, 0.8)))
    sampling = SamplingParams(max_tokens=1000)
    return Request(RequestId(str(index)), prompt, sampling, now, chance.choice(adapters), predicted_tokens=output)


def _sizes(request: Request, engine: _Engine) -> Sizes:
    return Sizes(len(request.prompt_token_ids), request.expected_tokens, engine.adapter_tokens(request.adapter))


def _admit(queue: ChameleonQueue, engine: _Engine, now: float) -> None:
    policy = queue.admit(now)
    request = next(policy)
    while len(engine.admitted) < RUNNING:
        engine.admitted.append(Running(request, 1, len(request.prompt_token_ids)))
        request = policy.send(None)


def _decide(queue: ChameleonQueue, now: float) -> Any:
    policy = queue.admit(now)
    request = next(policy, None)
    while request is not None:
        yield request
        try:
            request = policy.send(Wait.ADAPTER_ROOM)
        except StopIteration:
            return


def _timed(call: Callable[[], object]) -> list[float]:
    seconds = []
    for number in range(WARM_UP + REPEATS):
        started_s = time.perf_counter()
        call()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - started_s)
    return seconds
