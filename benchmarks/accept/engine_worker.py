"""An engine in a process of its own, for fast.9: ``python -m benchmarks.accept.engine_worker MODEL THREADS``.

One JSON object a line on standard input, one answer a line on standard output:

    {"requests": 32, "prompt_tokens": 128, "output_tokens": 128, "seed": 1}
    {"steps": [[monotonic time of a step's end, sequences that got a token], …]}

The first line that it writes, before it is asked anything, says which kernels compute.
"""

import json
import sys
from pathlib import Path

from benchmarks.accept.inprocess import default_kernels, kernels_as, make_requests, replica, run_all
from benchmarks.accept.stopwatch import Stopwatch


def main() -> None:
    """Load, then run one batch a line until standard input ends; THREADS of 0 are the engine's default."""
    model, threads = Path(sys.argv[1]), int(sys.argv[2])
    watch = Stopwatch(default_kernels())
    with kernels_as(watch), replica(model, "auto", threads=threads) as built:
        print(json.dumps({"kernels": built.sizes.kernels}), flush=True)
        for line in sys.stdin:
            work = json.loads(line)
            watch.steps.clear()
            sizes = (work["requests"], work["prompt_tokens"], work["output_tokens"])
            run_all(built, make_requests(f"{work['seed']}", *sizes, seed=work["seed"]))
            print(json.dumps({"steps": [(step.end_s, step.rows) for step in watch.steps]}), flush=True)


if __name__ == "__main__":
    main()
