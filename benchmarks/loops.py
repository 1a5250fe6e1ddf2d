"""Runs two training loops on one server, at once and one after the other: ``python -m benchmarks.loops``.

A step of a loop samples rollouts, whose lengths have a long tail, and then gives the server a new version. A loop alone
leaves the batch almost empty at the end of each step, while its longest rollouts run; beside another loop that space is
filled. Both arrangements compute the same tokens, in turns. Steps of the engine are counted beside the time: they do
not depend on what else the machine does.
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np

from benchmarks.harness import default_model, print_setup, print_table, running_server, sample_adapters

LOOPS = ("one", "two")
PROMPT = [504, 3575, 314]
REPORT_S = 0.5


def main() -> None:
    """Run the loops and print the throughput of both arrangements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--base", default=str(default_model()), help="folder of the base model")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of a step")
    parser.add_argument("--steps", type=int, default=3, help="steps of a loop")
    parser.add_argument("--longest", type=int, default=192, help="tokens of the longest rollout")
    parser.add_argument("--train-s", type=float, default=0.0, help="seconds of a step's training, on another machine")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print_setup()
    lengths = {name: drawn(options, seed) for seed, name in enumerate(LOOPS)}
    tokens = sum(sum(step) for steps in lengths.values() for step in steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "adapters")
        for name, sample in zip(LOOPS, sample_adapters().values(), strict=False):
            shutil.copytree(sample, folder / name)
        flags = [options.base, "--memory", "1GiB", "--store-dir", f"{scratch}/store", "--adapter-dir", str(folder)]
        with running_server(flags, Path(scratch, "log")) as server:
            found: dict[str, list[Cost]] = {"one after the other": [], "at once": []}
            for round_ in range(options.rounds + 1):
                alone = [timed(server.url, {name: steps}, options.train_s) for name, steps in lengths.items()]
                both = timed(server.url, lengths, options.train_s)
                if round_:  # The first warms up.
                    found["one after the other"].append(Cost(*map(sum, zip(*alone, strict=True))))
                    found["at once"].append(both)
    rows = []
    for name, costs in found.items():
        seconds, steps = (statistics.median(column) for column in zip(*costs, strict=True))
        rows.append([name, f"{seconds:.1f} s", f"{tokens / seconds:.0f}", f"{steps:.0f}", f"{tokens / steps:.1f}"])
    title = f"{len(LOOPS)} loops of {options.steps} steps of {options.rollouts} rollouts, medians of {options.rounds}"
    print_table(title, ["loops", "time", "tokens/s", "steps of the engine", "tokens a step"], rows)
    for at, what in enumerate(("tokens/s", "tokens a step")):
        ratios = sorted(one[at] / both[at] for one, both in zip(*found.values(), strict=True))
        print(f"{what} at once: × {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


class Cost(NamedTuple):
    """The seconds and the steps of the engine that loops took."""

    seconds: float
    steps: float


def drawn(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """Return the lengths of a loop's rollouts, by step. A few are many times as long as the median."""
    generator = np.random.default_rng(seed)
    shape = (options.steps, options.rollouts)
    lengths = np.exp(generator.normal(np.log(options.longest / 8), 1.0, shape))
    return [[int(each) for each in step] for step in lengths.clip(4, options.longest)]


def timed(url: str, loops: dict[str, list[list[int]]], train_s: float) -> Cost:
    """Run loops at once; return their cost."""

    async def run() -> Cost:
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
            steps = await engine_steps(session)
            began_s = time.perf_counter()
            await asyncio.gather(*(loop(session, name, each, train_s) for name, each in loops.items()))
            return Cost(time.perf_counter() - began_s, await engine_steps(session) - steps)

    return asyncio.run(run())


async def engine_steps(session: aiohttp.ClientSession) -> float:
    """Return the number of steps that the engine has run, once it is idle and has reported all."""
    await asyncio.sleep(REPORT_S)
    async with session.get("/metrics") as reply:
        page = await reply.text()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith("lorikeet:steps_total"))


async def loop(session: aiohttp.ClientSession, name: str, steps: list[list[int]], train_s: float) -> None:
    """Sample and sync, step by step."""
    for lengths in steps:
        await asyncio.gather(*(post(session, "/v1/completions", rollout(name, each)) for each in lengths))
        await asyncio.sleep(train_s)
        await post(session, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": name, "load_inplace": True})


def rollout(name: str, length: int) -> dict[str, object]:
    """Return the body of a rollout."""
    return {"model": name, "prompt": PROMPT, "max_tokens": length, "ignore_eos": True, "temperature": 1.0}


async def post(session: aiohttp.ClientSession, path: str, body: dict[str, object]) -> None:
    """Send a body.

    Raises:
        RuntimeError: the answer is an error.
    """
    async with session.post(path, json=body) as reply:
        if reply.status >= 400:
            raise RuntimeError(f"{path}: {await reply.text()}")
        await reply.read()


if __name__ == "__main__":
    main()
