"""fast.7: errors of the native kernels, in units of torch's error in the same dtype."""

from typing import Any

from benchmarks.accept.kernel_tests import BOUND, failures_of, run_kernel_tests
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from lorikeet.kernels.library import supported_instruction_sets

TIMES = 3
KERNELS = ("attention", "add_norm", "linear", "linear_lora", "rotary", "silu_mul", "store_kv")


@line(
    "fast.7",
    title="Native kernels against fp64 over random shapes",
    bound=f"error ≤ {BOUND:g} × torch's in the same dtype, for every kernel, shape and instruction set",
)
def run(runs: StoredRuns) -> Result:
    """Run the tests of the native kernels with more examples, and read the worst ratio that each kernel came to."""
    found = runs.get("tests", _measure)
    failures = failures_of(found, KERNELS)
    return Result(
        figure={"worst_ratio": max(found["worst"].values(), default=0.0), **found["worst"]},
        passed=not failures,
        cause="; ".join(failures),
        notes=f"bfloat16 and fp32, {', '.join(found['instruction_sets'])}; tests/kernels/test_native_*.py with {TIMES} "
        f"times as many examples, drawn anew: {found['summary']}; where torch is right by luck, its error counts as "
        "the rounding of the result, and where a few results exceed the bound, more decide "
        "(tests/kernels/exactness.py); chosen tokens are compared one by one with the reference's instead",
    )


def _measure() -> dict[str, Any]:
    return run_kernel_tests("test_native_*.py", TIMES) | {"instruction_sets": supported_instruction_sets()}
