"""cuda.1: errors of the Triton kernels in Triton's interpreter, in units of torch's error in the same dtype."""

from importlib.metadata import version
from typing import Any

from benchmarks.accept.kernel_tests import BOUND, failures_of, run_kernel_tests
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns

TIMES = 3
KERNELS = tuple(
    f"triton {kernel}" for kernel in ("add_norm", "attention", "linear_lora", "rotary", "silu_mul", "store_kv")
)


@line(
    "cuda.1",
    title="Triton kernels in the interpreter against fp64 over random shapes",
    bound=f"error ≤ {BOUND:g} × torch's in the same dtype, for every kernel and shape",
)
def run(runs: StoredRuns) -> Result:
    """Run the tests of the Triton kernels with more examples, and read the worst ratio that each kernel came to."""
    found = runs.get("tests", _measure)
    failures = failures_of(found, KERNELS)
    return Result(
        figure={"worst_ratio": max(found["worst"].values(), default=0.0), **found["worst"]},
        passed=not failures,
        cause="; ".join(failures),
        notes=f"Triton {found['triton']}, interpreted on a CPU, bfloat16 and fp32; tests/kernels/test_triton.py with "
        f"{TIMES} times as many examples, drawn anew: {found['summary']}; errors count as in fast.7; chosen tokens are "
        "compared one by one with the reference's instead; on a machine with a GPU the same tests run there",
    )


def _measure() -> dict[str, Any]:
    return run_kernel_tests("test_triton.py", TIMES) | {"triton": version("triton")}
