"""fast.9: two engines on one machine's cores."""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np

from benchmarks.accept.inprocess import THREADS
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.offline import interval_words
from benchmarks.accept.runs import ROOT, StoredRuns
from lorikeet.bench.statistics import median_interval
from lorikeet.engine.cores import BUSY_WITHIN_S

ROUNDS = 5
SUM, P99, FORCED = 0.95, 2.0, 0.6
ROWS = 32
WORK = {"requests": ROWS, "prompt_tokens": 128, "output_tokens": 128}

Steps = Sequence[tuple[float, int]]
"""End and rows of each step."""


class Window(NamedTuple):
    """What engines did while all of them decoded a full batch.

    Attributes:
        tok_s: tokens per second, all engines together.
        gaps_s: time of each step.
    """

    tok_s: float
    gaps_s: list[float]


@line(
    "fast.9",
    title="Two engines on two cores, by default and forced to two threads each, beside one",
    bound=f"by default ≥ {SUM:g} × one engine with P99 step ≤ {P99:g} × the median; forced ≥ {FORCED:g} ×",
)
def run(runs: StoredRuns) -> Result:
    """One, two by default, two forced, in turns."""
    found = runs.get("engines", _measure)
    ratios = [both / one for both, one in zip(found["both_tok_s"], found["one_tok_s"], strict=True)]
    forced = [both / one for both, one in zip(found["forced_tok_s"], found["one_tok_s"], strict=True)]
    ratio, forced_ratio = statistics.median(ratios), statistics.median(forced)
    gaps = np.array(found["both_gaps_s"])
    spread = float(np.percentile(gaps, 99) / np.median(gaps))
    failures = [
        *([f"two engines give {ratio:.2f} × one"] if ratio < SUM else []),
        *([f"the P99 step takes {spread:.1f} × the median"] if spread > P99 else []),
        *([f"forced to {THREADS} threads each they give {forced_ratio:.2f} ×"] if forced_ratio < FORCED else []),
    ]
    return Result(
        figure={
            "two_to_one": ratio,
            "p99_to_median_step": spread,
            "forced_to_one": forced_ratio,
            "forced_interval": interval_words(median_interval(forced)),
            "one_tok_s": statistics.median(found["one_tok_s"]),
            "two_tok_s": statistics.median(found["both_tok_s"]),
            "forced_tok_s": statistics.median(found["forced_tok_s"]),
            "median_step_ms": float(np.median(gaps)) * 1e3,
        },
        interval=median_interval(ratios),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{ROUNDS} rounds; processes with the environment as it is; {found['kernels']}; each engine decodes "
        f"{ROWS} sequences of {WORK['prompt_tokens']} + {WORK['output_tokens']} tokens, output rates while all "
        f"engines of the measurement do; P99 over {len(gaps)} steps of both engines; interval of two_to_one",
    )


def _measure() -> dict[str, Any]:
    found: dict[str, Any] = {"one_tok_s": [], "both_tok_s": [], "forced_tok_s": [], "both_gaps_s": []}
    with ExitStack() as stack:
        default = [stack.enter_context(engine(0)) for _ in range(2)]
        forced = [stack.enter_context(engine(THREADS)) for _ in range(2)]
        found["kernels"] = default[0].kernels
        seeds = itertools.count()
        for turn in range(ROUNDS + 1):
            order = [("one", default[:1]), ("both", default), ("forced", forced)]
            for name, engines in order if turn % 2 else reversed(order):
                window = together(engines, seeds)
                if turn:  # the first round warms up
                    found[f"{name}_tok_s"].append(window.tok_s)
                    found.get(f"{name}_gaps_s", []).extend(window.gaps_s)
    return found


class Worker:
    """One process of :mod:`benchmarks.accept.engine_worker`."""

    def __init__(self, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.accept.engine_worker", str(default_model()), str(threads)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.kernels = str(self._read()["kernels"])

    def start(self, work: dict[str, int]) -> None:
        """Let it begin a batch."""
        stream: IO[str] | None = self._process.stdin
        assert stream is not None
        stream.write(json.dumps(work) + "\n")
        stream.flush()

    def finish(self) -> Steps:
        """Wait for the end of the batch and return its steps."""
        return [(end_s, rows) for end_s, rows in self._read()["steps"]]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the engine ended with code {self._process.wait()}")
        return dict(json.loads(text))


@contextmanager
def engine(threads: int) -> Iterator[Worker]:
    """An engine with ``threads``, 0 for the default."""
    worker = Worker(threads)
    try:
        yield worker
    finally:
        worker.close()


def together(engines: Sequence[Worker], seeds: Iterator[int]) -> Window:
    """Let engines run one batch each at the same time, once nobody counts those that ran before."""
    time.sleep(BUSY_WITHIN_S)
    for worker in engines:
        worker.start(WORK | {"seed": next(seeds)})
    return common_window([worker.finish() for worker in engines])


def common_window(runs: Sequence[Steps]) -> Window:
    """Return what happened from the time when all engines decoded full batches until the first of them did no more."""
    full = [[end_s for end_s, rows in steps if rows == ROWS] for steps in runs]
    begin_s, stop_s = max(ends[0] for ends in full), min(ends[-1] for ends in full)
    tok_s, gaps = 0.0, list[float]()
    for ends in full:
        inside = [end_s for end_s in ends if begin_s <= end_s <= stop_s]
        tok_s += ROWS * (len(inside) - 1) / (inside[-1] - inside[0])
        gaps += [after - before for before, after in pairwise(inside)]
    return Window(tok_s, gaps)
