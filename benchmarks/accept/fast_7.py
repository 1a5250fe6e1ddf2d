"""fast.7: errors of the native kernels, in units of torch's error in the same dtype."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns
from lorikeet.kernels.library import supported_instruction_sets

BOUND = 2.0
TIMES = 3
KERNELS = {"linear", "linear_lora", "add_norm", "rotary", "store_kv", "attention", "silu_mul"}


@line(
    "fast.7",
    title="Native kernels against fp64 over random shapes",
    bound=f"error ≤ {BOUND:g} × torch's in the same dtype, for every kernel, shape and instruction set",
)
def run(runs: StoredRuns) -> Result:
    """Run the tests of the native kernels with more examples, and read the worst ratio that each kernel came to."""
    found = runs.get("tests", _measure)
    worst = found["worst"]
    missing = KERNELS - worst.keys()
    above = [f"{kernel} {ratio:.2f}" for kernel, ratio in worst.items() if ratio > BOUND]
    failures = [
        *([f"above the bound: {', '.join(above)}"] if above else []),
        *([f"not measured: {', '.join(sorted(missing))}"] if missing else []),
        *([f"tests: {found['summary']}"] if found["exit_code"] else []),
    ]
    return Result(
        figure={"worst_ratio": max(worst.values(), default=0.0), **worst},
        passed=not failures,
        cause="; ".join(failures),
        notes=f"bfloat16 and fp32, {', '.join(found['instruction_sets'])}; tests/kernels/test_native_*.py with {TIMES} "
        f"times as many examples, drawn anew: {found['summary']}; where torch is right by luck, its error counts as "
        "the rounding of the result (tests/kernels/exactness.py); chosen tokens are compared one by one with the "
        "reference's instead",
    )


def _measure() -> dict[str, Any]:
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "kernels").glob("test_native_*.py"))
    with tempfile.TemporaryDirectory(prefix="lorikeet-fast7-") as scratch:
        errors = Path(scratch) / "errors.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.accept.kernel_errors", "--timeout=900", *tests],
            cwd=ROOT,
            env={**os.environ, "EXAMPLES_TIMES": str(TIMES), "ERRORS_FILE": str(errors), "REQUIRE_ALL": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout[-3000:])
        worst = json.loads(errors.read_text()) if errors.is_file() else {}
    lines = done.stdout.strip().splitlines()
    return {
        "worst": dict(sorted(worst.items())),
        "exit_code": done.returncode,
        "summary": lines[-1].strip("= ") if lines else "no output",
        "instruction_sets": supported_instruction_sets(),
    }
