"""How long torch's OpenMP threads should spin for work before they sleep (docs/decisions/threads.md).

    python -m benchmarks.spins 2000 4000

prints, for each of these spin counts, the median of a first step after a pause and of steps that follow each other, in
ms, and the throughput of two engines that insist on all cores as a share of one's. SmolLM2-135M-Instruct, bfloat16;
each count has two processes, which take turns in every round.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import IO

from benchmarks.accept.inprocess import THREADS
from benchmarks.accept.models import default_model
from lorikeet.bench.profiling.rig import Rig
from lorikeet.bench.profiling.sweeps import decodes, prefills
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.engine.torch_executor import build_torch_executor

ROUNDS, TIMES, PAUSE_S, TOGETHER_S = 7, 6, 0.4, 3.0
STEPS = {
    "16 tokens": prefills(1, 16, start=256),
    "100 tokens": prefills(1, 100),
    "8 decodes": decodes(8, 256),
    "32 decodes": decodes(32, 256),
}
PAUSED = ("16 tokens", "100 tokens")
COLUMNS = [*(f"{name}, after a pause" for name in PAUSED), *STEPS]


def work() -> None:
    """Answer each line of the input: ``steps`` by the means of all columns, ``together`` by how many steps ran."""
    model = default_model()
    settings = Settings(ModelSettings(model=str(model), dtype="bfloat16"), EngineSettings(threads=THREADS))
    executor, config, sizes = build_torch_executor(settings, model, lambda *_: None, lambda: None)
    rig = Rig(executor, sizes, config.vocab_size, 16_384)
    prepared = {name: rig.prepare(step) for name, step in STEPS.items()}

    def step_ms(name: str, pause_s: float) -> float:
        time.sleep(pause_s)
        return 1e3 * rig.run(prepared[name]).seconds

    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "steps":
            paused = [mean(step_ms(name, PAUSE_S) for _ in range(TIMES)) for name in PAUSED]
            print(*paused, *(mean(step_ms(name, 0.0) for _ in range(TIMES)) for name in STEPS), flush=True)
        else:
            ran, until_s = 0, time.monotonic() + TOGETHER_S
            while time.monotonic() < until_s:
                rig.run(prepared["32 decodes"])
                ran += 1
            print(ran, flush=True)
    executor.close()


class Worker:
    """A process that works with a spin count of its own."""

    def __init__(self, spins: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spins", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GOMP_SPINCOUNT": spins},
            cwd=Path(__file__).parent.parent,
        )

    def ask(self, words: str) -> None:
        """Send a line."""
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(words + "\n")
        stdin.flush()

    def answer(self) -> list[float]:
        """Return the numbers of the next line; it has none when the process has become ready."""
        stdout: IO[str] | None = self.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended")
        return [float(word) for word in line.split() if word != "ready"]


def _together(workers: list[Worker]) -> float:
    for worker in workers:
        worker.ask("together")
    return sum(worker.answer()[0] for worker in workers)


def main(counts: list[str]) -> None:
    """Measure all counts in turns and print a table."""
    with ExitStack() as processes:
        workers = {count: [Worker(count), Worker(count)] for count in counts}
        for worker in (each for pair in workers.values() for each in pair):
            processes.enter_context(worker.process)
            worker.answer()
        times_ms: dict[str, list[list[float]]] = {count: [] for count in counts}
        shares: dict[str, list[float]] = {count: [] for count in counts}
        for turn in range(ROUNDS):
            for count in counts if turn % 2 == 0 else reversed(counts):
                pair = workers[count]
                pair[0].ask("steps")
                times_ms[count].append(pair[0].answer())
                one = _together(pair[:1])
                shares[count].append(_together(pair) / one)
    print(*("| spins", *COLUMNS, "two engines ÷ one |"), sep=" | ")
    print("|" + "---|" * (len(COLUMNS) + 2))
    for count in counts:
        medians = [f"{median(values):.1f}" for values in zip(*times_ms[count], strict=True)]
        print(*(f"| {int(count):,}", *medians, f"{median(shares[count]):.2f} |"), sep=" | ")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main(sys.argv[1:])
