"""What an engine keeps of its speed beside processes that always compute.

``python -m benchmarks.busy_cores [--rounds N] [--sequences 1,8] [--dtype bfloat16]``. An engine with the default number
of threads, which leaves the cores that others take, and one with a thread for each core answer the same requests in
turns, alone and beside one and two processes that count. A fair share of two cores would be 2/3 and 1/2 of the speed
alone for two threads, and more for a decode, which waits for the memory. Run it alone on the machine.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.harness import (
    THREADS,
    default_model,
    in_turns,
    make_requests,
    print_setup,
    print_table,
    replica,
    run_all,
)

PROMPT_TOKENS = 32
TOKENS = 96
OTHERS = (0, 1, 2)
"""Processes that compute beside the engine."""
ENGINES = {"default": 0, "a thread for each core": THREADS}
"""Number of threads by name; 0 leaves the cores that others take."""


def main() -> None:
    """Print a table for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    print_setup()
    for sequences in map(int, options.sequences.split(",")):
        sides = {
            _side(name, others): partial(_tokens_per_s, threads, others, sequences, options.dtype)
            for others in OTHERS
            for name, threads in ENGINES.items()
        }
        found = {side: statistics.median(values) for side, values in in_turns(sides, options.rounds).items()}
        rows = []
        for name in ENGINES:
            rates = [found[_side(name, others)] for others in OTHERS]
            rows.append((name, *(f"{rate:.0f} ({rate / rates[0]:.2f})" for rate in rates)))
        print_table(
            f"tokens/s at {sequences} sequences, and the part of the speed alone",
            ("engine", *(f"beside {others}" for others in OTHERS)),
            rows,
        )


def _side(engine: str, others: int) -> str:
    return f"{engine}, beside {others}"


def _tokens_per_s(threads: int, others: int, sequences: int, dtype: str, number: int) -> float:
    """Return the rate of one batch, after a first one in which the engine finds its number of threads."""
    with replica(default_model(), dtype, threads=threads) as built, _busy_processes(others):
        run_all(built, make_requests(f"first-{number}", sequences, PROMPT_TOKENS, TOKENS))
        start_s = time.perf_counter()
        run_all(built, make_requests(f"kept-{number}", sequences, PROMPT_TOKENS, TOKENS, seed=number + 1))
        return sequences * TOKENS / (time.perf_counter() - start_s)


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Run processes that count until the context ends."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
