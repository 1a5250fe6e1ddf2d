"""costs.5: paced engines over HTTP keep the times of their model while eight of them share the cores."""

import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import LLAMA_2_7B, default_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from lorikeet.config import EngineSettings
from lorikeet.costs.catalog import load_profile
from lorikeet.engine.modelled_build import transfer_model
from lorikeet.engine.modelled_times import ModelledTimes
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import Turn, turns
from lorikeet.rows import Row

ENGINES, WITHIN = 8, 0.05
PROFILE = "a100-80-llama-2-7b"
LOAD_S, CLIENTS, PROMPT_TOKENS, OUTPUT_TOKENS = 40.0, 4, 400, 64
BUSY_S = 0.01
"""Plans that begin so soon after the end of the last one follow it without a pause."""


@line(
    "costs.5",
    title="Step times of paced engines over HTTP, eight on the cores of this machine",
    bound=f"median of measured ÷ modelled step time within {WITHIN:.0%} of 1 in every engine",
)
def run(runs: StoredRuns) -> Result:
    """Load eight servers at once and compare the times in their recordings with the model's."""
    found = runs.get("paced", _measure)
    medians = [engine["median"] for engine in found["engines"]]
    worst = max(medians, key=lambda median: abs(median - 1))
    failures = [f"an engine's median is {m:.3f} × the model's" for m in medians if abs(m - 1) > WITHIN]
    p5, p95 = min(e["p5"] for e in found["engines"]), max(e["p95"] for e in found["engines"])
    everything = [ratio for engine in found["engines"] for ratio in engine["quantiles"]]
    return Result(
        figure={
            "worst_median": worst,
            "medians": " ".join(f"{median:.3f}" for median in medians),
            "p5_to_p95": f"{p5:.3f} to {p95:.3f}",
            "median_step_ms": statistics.median(engine["median_step_ms"] for engine in found["engines"]),
            "steps": sum(engine["steps"] for engine in found["engines"]),
            "requests": found["requests"],
        },
        interval=(float(np.quantile(everything, 0.025)), float(np.quantile(everything, 0.975))),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"`lorikeet serve --executor paced --profile {PROFILE}`, {ENGINES} servers, each with {CLIENTS} clients "
        f"of streams of {OUTPUT_TOKENS} tokens for {LOAD_S:g} s; measured: from the end of a plan to the end of the "
        "one that follows without a pause, as recorded by the engines; interval: 95 % of all such steps",
        details=found,
    )


def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-costs5-") as scratch, ExitStack() as stack:
        model = _model_folder(Path(scratch) / "llama-2-7b")
        servers, recordings = [], []
        for number in range(ENGINES):
            recordings.append(Path(scratch) / f"{number}.rec")
            flags = ["--model", str(model), "--executor", "paced", "--profile", PROFILE, "--max-running-requests", "64"]
            flags += ["--record", str(recordings[-1]), "--store-dir", str(Path(scratch) / f"store{number}")]
            servers.append(stack.enter_context(running_server(flags, Path(scratch) / f"{number}.log")))
        requests = _load(servers)
        stack.close()
        engines = [_compare(recording) for recording in recordings]
    return {"engines": engines, "requests": requests}


def _model_folder(folder: Path) -> Path:
    """Llama-2-7B as far as a paced engine looks at it, with the default model's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(default_model() / name, folder)
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def _load(servers: list[RunningServer]) -> int:
    """Keep all servers busy for a while and return how many answers came."""
    until_s = time.monotonic() + LOAD_S
    answers: list[int] = []
    failures: list[Exception] = []

    def ask(server: RunningServer, seed: int) -> None:
        generator = np.random.default_rng(seed)
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < until_s:
                body = {
                    "model": "llama-2-7b",
                    "prompt": generator.integers(300, 10_000, PROMPT_TOKENS).tolist(),
                    "max_tokens": OUTPUT_TOKENS,
                    "ignore_eos": True,
                    "stream": True,
                }
                try:
                    with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                        response.raise_for_status()
                        answers.append(sum(line.startswith("data: {") for line in response.iter_lines()))
                except httpx.HTTPError as error:
                    failures.append(error)
                    return

    threads = [
        threading.Thread(target=ask, args=(server, ENGINES * client + number))
        for number, server in enumerate(servers)
        for client in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{len(failures)} clients failed: {failures[0]!r}")
    return len(answers)


def _compare(recording: Path) -> dict[str, Any]:
    ratios, steps_s = [], []
    for measured_s, modelled_s, steps in _periods(recording):
        ratios.append(measured_s / modelled_s)
        steps_s.append(measured_s / steps)
    if len(ratios) < 100:
        raise RuntimeError(f"{recording.name}: only {len(ratios)} plans follow one another")
    p5, median, p95 = np.quantile(ratios, [0.05, 0.5, 0.95]).tolist()
    return {
        "median": median,
        "p5": p5,
        "p95": p95,
        "median_step_ms": statistics.median(steps_s) * 1e3,
        "steps": len(ratios),
        "quantiles": np.quantile(ratios, np.linspace(0, 1, 41)).tolist(),
    }


def _periods(recording: Path) -> Iterator[tuple[float, float, int]]:
    """Yield (measured seconds, modelled seconds, steps) of plans that follow one another without a pause."""
    times = ModelledTimes(transfer_model(EngineSettings(), load_profile(PROFILE)), Row(), loop_each_step=False)
    timed: list[tuple[Turn, float]] = []
    for turn in turns(Recording(recording)):
        if turn.ran is None or turn.planned.plan.is_empty:
            continue
        plan = turn.planned.plan
        modelled = times.steps_s(plan, plan.max_duration_s, lambda _: ())
        timed.append((turn, modelled.seconds + modelled.loop_s))
    for (before, _), (turn, modelled_s) in pairwise(timed):
        assert before.ran is not None
        assert turn.ran is not None
        ran_both = before.planned.plan.sequences and turn.planned.plan.sequences
        if ran_both and turn.planned.at_s - before.ran.at_s < BUSY_S:
            yield turn.ran.at_s - before.ran.at_s, modelled_s, turn.ran.result.steps_run
