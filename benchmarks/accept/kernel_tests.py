"""Tests of kernels with more examples than the suite has, and the worst error that each kernel came to."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accept.runs import ROOT

BOUND = 2.0
"""Times torch's error in the same dtype."""


def run_kernel_tests(pattern: str, times: int) -> dict[str, Any]:
    """Run the test files of ``tests/kernels`` with so many times their examples, drawn anew.

    Returns:
        ``worst``: kernel → ratio. ``exit_code`` and ``summary``: pytest's.
    """
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "kernels").glob(pattern))
    with tempfile.TemporaryDirectory(prefix="lorikeet-kernels-") as scratch:
        errors = Path(scratch) / "errors.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.accept.kernel_errors", "--timeout=900", *tests],
            cwd=ROOT,
            env={**os.environ, "EXAMPLES_TIMES": str(times), "ERRORS_FILE": str(errors), "REQUIRE_ALL": "1"},
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
    }


def failures_of(found: dict[str, Any], kernels: Sequence[str]) -> list[str]:
    """Return what is wrong: errors above the bound, kernels that were not measured, tests that failed."""
    worst = found["worst"]
    missing = [kernel for kernel in kernels if kernel not in worst]
    above = [f"{kernel} {ratio:.2f}" for kernel, ratio in worst.items() if ratio > BOUND]
    return [
        *([f"above the bound: {', '.join(above)}"] if above else []),
        *([f"not measured: {', '.join(missing)}"] if missing else []),
        *([f"tests: {found['summary']}"] if found["exit_code"] else []),
    ]
