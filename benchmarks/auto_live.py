"""Compares the default preset with five systems, live: ``python -m benchmarks.auto_live``.

SmolLM2 runs on this machine behind a declared link. It has 100 adapters of mixed ranks, and the device holds few of
them. The workloads are conversations of several turns, single requests whose popular adapters change, and conversations
whose popular adapters change. ``--workload`` selects workloads by a text in their names. In each round, which has its
own seed, every system gets the same requests. The order of the systems rotates from round to round. Each run builds a
new engine in this process, with its adapters in the host tier. A turn waits for the earlier answer. The rate is found
once for a workload, as a share of the rate at which ``lorikeet:plain`` answers when all requests arrive at the same
time.

Five rounds of a workload take about a quarter of an hour on an idle machine. A round that would end after ``--minutes``
is not started, and an interrupt (Ctrl-C) also ends the program. The tables contain the complete rounds.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.auto import AUTO, FIGURES, Results, figures_of, ratio, ratio_and_interval
from benchmarks.harness import THREADS, default_model, print_setup, print_table
from benchmarks.memory_bench import MemoryRig, MemorySetting, live_rig, settle, warm_replica
from benchmarks.memory_work import MemoryWork, WorkOptions
from benchmarks.papers.measure import Answer
from benchmarks.papers.runs import Figures
from lorikeet.bench.in_process import WorkloadRun, run_workload
from lorikeet.core.request import Slo
from lorikeet.workloads.adapter_choice import choose_adapters
from lorikeet.workloads.arrivals import Rates, arrivals_until
from lorikeet.workloads.function_trace import Invocation
from lorikeet.workloads.predictors import make_predictor
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.shapes import SHAPES, Dialogues, LengthRange
from lorikeet.workloads.synthetic import adapter_names, spread
from lorikeet.workloads.workload import MADE_BLOCK_TOKENS, Range, WorkloadRequest, block_tokens_of

RIVALS = ("elora", "chameleon", "dlora", "toppings", "lorikeet:plain")
CALIBRATED = "lorikeet:plain"
"""The system whose throughput sets the rate of all."""
SYSTEMS = (AUTO, *RIVALS)
BOUND = 1.05
"""Most that a figure may be over the best single system's; it is missed only if the whole interval is above."""

ADAPTERS = 100
RANKS = (8, 16, 32, 64)
DEVICE_BYTES = 192 * 2**20
HOST_BYTES = 2**30
LINK_BYTES_PER_S = 0.15e9
"""The adapters take 0.7 GB; a load of rank 32 takes 49 ms, one of rank 64 98 ms, the KV of 100 tokens 15 ms."""
KERNEL_FORM = "unpadded"
"""Of the LoRA kernels of every system: they are compared by what they decide."""
_MODEL_LEN = 2048
"""Longer than any dialogue; a sequence of that length fits beside its adapter."""
SECONDS = 20.0
ROUNDS = 5
LOAD = 0.6
MINUTES = 60.0
"""Of arrivals in a run; rounds; the rate as a share of what is answered when all requests come at once; of all runs."""
QUICK_SECONDS = 4.0


# --- the workloads -----------------------------------------------------------------------------------

_CONVERSATIONS = SHAPES["conversations"]
assert isinstance(_CONVERSATIONS, Dialogues)
_DIALOGUES = msgspec.structs.replace(
    _CONVERSATIONS,
    turns=4.0,
    least_turns=2,
    utterance=LengthRange(48, 0.8, 192),
    answer=LengthRange(24, 0.7, 96),
    pause_s=4.0,
)
"""Shorter than the shape ``conversations``, with pauses that let most dialogues go on within a run."""
_BEFORE_S = 40.0
"""Dialogues begin so long before a run, whose first second then has as many later turns as its last."""
_SHIFT_REQUESTS = 6.0
"""Requests from one shift of the popularity by one adapter to the next."""

NAMES = tuple(adapter_names(ADAPTERS))


def conversations(rate: float, seconds: float, seed: int, adapter_choice: str = "zipf:1") -> list[WorkloadRequest]:
    """Return turns of dialogues that arrive in a window.

    Prompts contain the earlier turns, including those before the window.
    """
    of_arrivals, of_adapters, of_lengths = np.random.default_rng(seed).spawn(3)
    until_s = _BEFORE_S + seconds
    times_s = arrivals_until("poisson", until_s, Rates.constant(rate / _DIALOGUES.turns), of_arrivals)
    places = choose_adapters(adapter_choice, range(ADAPTERS), times_s, of_adapters)
    calls = [Invocation(at_s, place) for at_s, place in zip(times_s, places, strict=True)]
    turns = _DIALOGUES.requests(calls, NAMES, MADE_BLOCK_TOKENS, of_lengths)
    return [
        msgspec.structs.replace(turn, arrival_s=turn.arrival_s - _BEFORE_S)
        for turn in turns
        if _BEFORE_S <= turn.arrival_s < until_s
    ]


def moving_conversations(rate: float, seconds: float, seed: int) -> list[WorkloadRequest]:
    """Return turns of dialogues. The set of popular adapters changes over the dialogues."""
    return conversations(rate, seconds, seed, f"drifting:1:{_SHIFT_REQUESTS / rate}")


def moving_skew(rate: float, seconds: float, seed: int) -> list[WorkloadRequest]:
    """Return single requests. The set of popular adapters changes over the requests."""
    return Recipe(
        rates=Rates.constant(rate),
        duration_s=seconds,
        adapters=NAMES,
        ranks=tuple(spread(RANKS, ADAPTERS)),
        adapter_choice=f"drifting:1:{_SHIFT_REQUESTS / rate}",
        prompt_tokens=Range(32, 320),
        output_tokens=Range(8, 48),
        seed=seed,
    ).requests()


WORKLOADS: dict[str, Callable[[float, float, int], list[WorkloadRequest]]] = {
    "conversations over 100 adapters": conversations,
    "a moving skew over 100 adapters": moving_skew,
    "moving conversations over 100 adapters": moving_conversations,
}
_CALIBRATION_RATE = 12.0
_CALIBRATION_SEED = 0


# --- runs --------------------------------------------------------------------------------------------


class Bench(NamedTuple):
    """Holds the adapters' files and the model, which all runs share."""

    rig: MemoryRig
    setting: MemorySetting

    def run(self, preset: str, requests: Sequence[WorkloadRequest], seed: int) -> WorkloadRun:
        """Run a system on a new engine.

        Raises:
            RuntimeError: a request got no complete answer.
        """
        work = MemoryWork(list(requests), NAMES, block_tokens_of(requests), seed)
        settings = self.setting.settings(f"{preset},kernel_form={KERNEL_FORM}")
        with warm_replica(self.rig, settings, work) as ((engine, *_), clock, coalesced):
            settle(engine)
            prompts = work.prompts_of(self.rig.vocabulary)
            predictor = make_predictor("history", requests, seed)
            run = run_workload(
                engine, clock, requests, self.rig.adapters, prompts, coalesced=coalesced, predictor=predictor
            )
        gc.collect()  # frees the engine's arenas before the next engine is built
        if failed := [each for each in run.exchanges if each.error is not None]:
            raise RuntimeError(f"{preset}: {len(failed)} requests failed, the first with {failed[0].error}")
        return run


def make_bench(folder: Path) -> Bench:
    """Write the adapters below a folder, and return the bench."""
    model = default_model()
    options = WorkOptions(source="", adapters=ADAPTERS, ranks=RANKS)
    rig = live_rig(model, "bfloat16", MemoryWork([], NAMES, MADE_BLOCK_TOKENS, 0), options, folder)
    setting = MemorySetting(
        memory_bytes=DEVICE_BYTES,
        host_memory_bytes=HOST_BYTES,
        link_bytes_per_s=LINK_BYTES_PER_S,
        model=str(model),
        dtype="bfloat16",
        max_model_len=_MODEL_LEN,
        threads=THREADS,
    )
    return Bench(rig, setting)


def capacity(bench: Bench, workload: str, seconds: float) -> float:
    """Return the requests answered per second when all requests arrive at the same time.

    Turns wait for earlier turns.
    """
    made = WORKLOADS[workload](_CALIBRATION_RATE, seconds, _CALIBRATION_SEED)
    requests = [msgspec.structs.replace(each, arrival_s=0.0) for each in made]
    run = bench.run(CALIBRATED, requests, _CALIBRATION_SEED)
    return len(requests) / max(each.ended_s for each in run.exchanges)


# --- the comparison ----------------------------------------------------------------------------------


class Compared(NamedTuple):
    """Holds a figure of ``auto`` relative to the best single system's, and relative to the lowest of any rival."""

    name: str
    over_best: Answer
    least: str
    over_least: Answer


def compare(found: dict[str, Results]) -> tuple[str, list[Compared]]:
    """Return the best rival by the geometric mean of the figures, and ``auto`` beside it in each of them."""
    best = min(RIVALS, key=lambda name: found[name].mean("score"))
    figures = []
    for figure in FIGURES:
        least = min(RIVALS, key=lambda name, figure=figure: found[name].mean(figure))  # type: ignore[misc]
        ours = found[AUTO].of(figure)
        figures.append(
            Compared(figure, ratio(ours, found[best].of(figure)), least, ratio(ours, found[least].of(figure)))
        )
    return best, figures


def reaches(answer: Answer) -> bool:
    """Return whether the interval of a ratio, or the ratio itself if it has none, reaches the bound."""
    return (answer.value if answer.low is None else answer.low) <= BOUND


# --- the program -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run the rounds, and print the tables."""
    given = _parser().parse_args(arguments)
    seconds = QUICK_SECONDS if given.quick else given.seconds
    rounds = 1 if given.quick else given.rounds
    print_setup()
    began_s = time.monotonic()
    load_before = os.getloadavg()
    workloads = [name for name in WORKLOADS if given.workload in name]
    found: dict[str, dict[str, list[Figures]]] = {name: {each: [] for each in SYSTEMS} for name in workloads}
    with tempfile.TemporaryDirectory(prefix="lorikeet-auto-") as folder:
        bench = make_bench(Path(folder))
        rates = {}
        for workload in workloads:
            most = capacity(bench, workload, seconds)
            rates[workload] = LOAD * most
            _progress(began_s, f"{workload}: {most:.1f} requests/s at once; from here {rates[workload]:.1f}")
        rounds_from_s = time.monotonic() - began_s
        try:
            for number in range(rounds):
                passed_s = time.monotonic() - began_s
                if number and passed_s + (passed_s - rounds_from_s) / number > 60 * given.minutes:
                    _progress(began_s, f"round {number + 1} would end after {given.minutes:g} minutes")
                    break
                for workload, of_systems in _round(bench, number, rates, seconds, began_s).items():
                    for system, figures in of_systems.items():
                        found[workload][system].append(figures)
        except KeyboardInterrupt:
            _progress(began_s, "interrupted")
    for workload, made in found.items():
        if made[AUTO]:
            _show(workload, rates[workload], seconds, {name: Results(each, np.nan) for name, each in made.items()})
    loads = " and ".join(f"{each[0]:.1f}" for each in (load_before, os.getloadavg()))
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes; load average before and after: {loads}")


def _round(
    bench: Bench, number: int, rates: dict[str, float], seconds: float, began_s: float
) -> dict[str, dict[str, Figures]]:
    """Run all systems once in each workload, with a rotated order in each round."""
    seed = number + 1
    first = number % len(SYSTEMS)
    made: dict[str, dict[str, Figures]] = {}
    for workload, rate in rates.items():
        requests = WORKLOADS[workload](rate, seconds, seed)
        made[workload] = {}
        for system in (*SYSTEMS[first:], *SYSTEMS[:first]):
            run = bench.run(system, requests, seed)
            figures = made[workload][system] = figures_of(run, Slo())
            words = ", ".join(f"{1e3 * figures[name]:.0f}" for name in FIGURES)
            took_s = max(each.ended_s for each in run.exchanges)
            _progress(began_s, f"round {seed}, {workload}, {system}: {len(requests)} in {took_s:.0f} s: {words} ms")
    return made


def _progress(began_s: float, line: str) -> None:
    print(f"{time.monotonic() - began_s:6.0f} s  {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_live", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all systems in each workload (%(default)s)")
    parser.add_argument("--workload", default="", help="take the workloads with this text in their names")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of arrivals in a run (%(default)g)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all runs together (%(default)g)")
    parser.add_argument("--quick", action="store_true", help="one round of short runs, in two minutes, for a try")
    return parser


def _show(workload: str, rate: float, seconds: float, found: dict[str, Results]) -> None:
    """Print a workload's tables."""
    count = len(found[AUTO].figures)
    rounds = "1 round" if count == 1 else f"{count} rounds"
    about = (
        f"{workload}: {rounds} of {seconds:g} s at {rate:.1f} requests/s; geometric means over the rounds\n"
        f"  SmolLM2, ranks {', '.join(map(str, RANKS))}; device {DEVICE_BYTES / 2**20:g} MiB, host "
        f"{HOST_BYTES / 2**20:g} MiB, link {LINK_BYTES_PER_S / 1e9:g} GB/s, {KERNEL_FORM} kernels"
    )
    headings = ["", "TTFT, ms", "P99, ms", "E2E/token, ms", "score", "auto / it", "95 %"]
    rows = []
    for name, results in sorted(found.items(), key=lambda item: item[1].mean("score")):
        values = [f"{1e3 * results.mean(each):,.1f}" for each in (*FIGURES, "score")]
        rows.append([name, *values, *ratio_and_interval(ratio(found[AUTO].of("score"), results.of("score")))])
    print_table(about, headings, rows)
    best, figures = compare(found)
    shown = f"not shown above {BOUND:g}"
    headings = ["", f"auto / {best}", "95 %", shown, "least", "auto / it", "95 %", shown]
    rows = []
    for each in figures:
        judged = [
            (*ratio_and_interval(answer), "yes" if reaches(answer) else "NO")
            for answer in (each.over_best, each.over_least)
        ]
        rows.append([each.name, *judged[0], each.least, *judged[1]])
    print_table("auto over the best single system, and over the least of any rival in each figure", headings, rows)


if __name__ == "__main__":
    main()
