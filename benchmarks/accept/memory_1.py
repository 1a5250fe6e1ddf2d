"""memory.1: pool, tree, swapper, suspend and resume under random events, with everything checked after each."""

import json
import tempfile
import time
from pathlib import Path

from benchmarks.accept.lines import Result, line
from benchmarks.accept.pytest_runs import run_tests
from benchmarks.accept.runs import StoredRuns
from tests.support.step_counts import REPORT_VARIABLE, STEPS_VARIABLE

STEPS = 20_000
TEST = "tests/memory/test_memory_properties.py"


@line(
    "memory.1",
    title="Random arrivals, finishes, aborts, deletes, reloads and failing copies on tiers of random sizes",
    bound=f"≥ {STEPS:,} steps without a violation: exact accounts on both tiers, no block with two owners, no pinned "
    "block moved, nothing read under another adapter, version or generation, no waiter forgotten",
)
def run(runs: StoredRuns) -> Result:
    """Run the property test at length and read its counts."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-memory1-") as scratch:
        report = Path(scratch) / "counts.json"
        started_s = time.monotonic()
        done = run_tests([TEST], {STEPS_VARIABLE: str(STEPS), REPORT_VARIABLE: str(report)})
        seconds = time.monotonic() - started_s
        counts: dict[str, int] = json.loads(report.read_text())
    steps = sum(count for name, count in counts.items() if name.startswith("step: "))
    failures = [
        *(f"{name} failed" for name in done.failed),
        *(["nothing passed"] if not done.passed else []),
        *([f"only {steps} steps were run"] if steps < STEPS else []),
    ]
    return Result(
        figure={"steps": steps, **{name.removeprefix("step: "): count for name, count in counts.items()}},
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{TEST}, a state machine of hypothesis, {seconds:.0f} s; how often each rule ran",
        details={"output": done.output[-4000:]} if failures else {},
    )
