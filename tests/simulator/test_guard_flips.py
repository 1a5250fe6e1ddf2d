"""The guard of the order on a whole engine, under a load that changes every five minutes which choice wins."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from lorikeet.simulator import study
from lorikeet.simulator.scenario import make_scenario
from lorikeet.simulator.study import run_scenario
from lorikeet.workloads.predictors import Predictor
from lorikeet.workloads.workload import WorkloadRequest

PHASE_S = 300.0
PHASES = 4
LENGTHS = (8, 16, 400)


class TurningPredictor(Predictor):
    """Predicts true lengths in every other phase, and the opposite in the phases between."""

    def predict(self, request: WorkloadRequest, index: int) -> int:
        is_right = int(request.arrival_s / PHASE_S) % 2 == 0
        return request.output_tokens if is_right else LENGTHS[-1] + LENGTHS[0] - request.output_tokens


def bursts(chance: random.Random) -> Iterator[WorkloadRequest]:
    """Bursts of single shots whose answers are short or long."""
    now = 0.0
    while now < PHASES * PHASE_S:
        now += chance.expovariate(0.1)
        for _ in range(chance.randint(1, 30)):
            yield WorkloadRequest(now, f"adapter-{chance.randrange(4):04}", 64, chance.choice(LENGTHS))


def phases_s(requests: Sequence[WorkloadRequest], preset: str, folder: Path) -> npt.NDArray[np.float64]:
    """Return the times to the first token of each phase's requests, added up."""
    trace = folder / "workload.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in requests))
    engine = {"memory_bytes": 6 * 10**9, "max_num_seqs": 16}
    fields = {"profile": "a100-80-llama-2-7b", "preset": preset, "trace": str(trace), "ranks": "16", "engine": engine}
    run = run_scenario(make_scenario(None, fields), lambda stage, done, total: None).simulated.run
    waits = np.zeros(PHASES + 1)
    for request, exchange in zip(requests, run.exchanges, strict=True):
        waits[int(request.arrival_s / PHASE_S)] += exchange.ttft_s
    return waits


@pytest.mark.long
def test_predictions_that_turn_wrong_cost_at_most_five_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "make_predictor", lambda *_: TurningPredictor())
    requests = list(bursts(random.Random(1)))
    guarded, always, never = (
        phases_s(requests, preset, tmp_path) for preset in ("auto", "auto,guard=false", "auto,admission=fifo")
    )
    best = np.minimum(always, never).sum()
    assert guarded.sum() <= 1.05 * best
    assert min(always.sum(), never.sum()) > 1.05 * best, "neither choice alone comes near"
