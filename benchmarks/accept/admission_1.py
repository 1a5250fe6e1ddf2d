"""admission.1: the spec's unit tests by name, and the token ledger under random traffic."""

import json
import tempfile
import time
from pathlib import Path

from benchmarks.accept.lines import Result, line
from benchmarks.accept.pytest_runs import run_tests
from benchmarks.accept.runs import StoredRuns
from tests.support.step_counts import REPORT_VARIABLE, STEPS_VARIABLE

STEPS = 20_000
_FOLDER = "tests/scheduling"
_PROPERTY = "test_multilevel_queue.py::test_tokens_add_up_after_every_step_and_everybody_is_served"
EXAMPLES = {
    "WRS 0.225": "test_size_classes.py::test_weighted_request_size_is_as_worked_out_by_hand",
    "cut-offs: WCSS, elbow K = 3, literal K = 4": (
        "test_size_classes.py::test_classes_of_nine_sizes_by_the_elbow_and_literally"
    ),
    "quotas 8200, 9600, 6400": "test_size_classes.py::test_quotas_of_three_classes_are_as_worked_out_by_hand",
    "quotas by priority 10150, 8833, 5217": ("test_size_classes.py::test_quotas_with_the_most_for_the_smallest_class"),
    "quotas with floors 7691, 9005, 7504": (
        "test_size_classes.py::test_quotas_that_hold_the_largest_request_of_each_class"
    ),
    "quotas in an overload 2050, 2400, 1600": "test_size_classes.py::test_quotas_in_an_overload_are_scaled",
    "case a": "test_multilevel_queue.py::test_case_a_every_class_by_its_own_quota",
    "case b": "test_multilevel_queue.py::test_case_b_what_an_empty_class_has_left_goes_to_the_smallest_that_fit",
    "case c": "test_multilevel_queue.py::test_case_c_a_class_with_waiters_donates_no_fragment",
    "bypass, W_head = 25": (
        "test_multilevel_queue.py::test_bypass_by_those_that_will_have_ended_when_the_head_can_start"
    ),
    "lazy squash": "test_multilevel_queue.py::test_lazily_it_is_sent_back_only_if_the_head_could_start_then",
    "one class and all tokens: FIFO": "test_multilevel_queue.py::test_with_one_class_and_all_tokens_it_is_fifo",
}


@line(
    "admission.1",
    title="Chameleon's worked examples, and its tokens under random traffic",
    bound=f"every example passes; available + held tokens = the total after each of ≥ {STEPS:,} steps with random "
    "requests, mispredictions, squashes and refreshes",
)
def run(runs: StoredRuns) -> Result:
    """Run each by its name, then the property at length."""
    done = run_tests([f"{_FOLDER}/{test}" for test in EXAMPLES.values()])
    missing = [name for name, test in EXAMPLES.items() if not done.passed.get(test.replace(".py", ""), 0)]
    with tempfile.TemporaryDirectory(prefix="lorikeet-admission1-") as scratch:
        report = Path(scratch) / "counts.json"
        started_s = time.monotonic()
        variables = {STEPS_VARIABLE: str(STEPS), REPORT_VARIABLE: str(report)}
        traffic = run_tests([f"{_FOLDER}/{_PROPERTY}"], variables)
        seconds = time.monotonic() - started_s
        counts: dict[str, int] = json.loads(report.read_text())
    steps = counts.pop("step: step")
    failures = [
        *(f"{name} failed" for name in (*done.failed, *traffic.failed)),
        *(f"“{name}” did not pass" for name in missing),
        *([f"only {steps} steps were run"] if steps < STEPS else []),
        *(f"nothing was {name}" for name in ("bypassed", "squashed", "joined") if not counts[name]),
    ]
    return Result(
        figure={"examples": len(EXAMPLES) - len(missing), "steps": steps, **counts},
        passed=not failures,
        cause="; ".join(failures),
        notes="; ".join(f"{name} ({test.partition('::')[2]})" for name, test in EXAMPLES.items())
        + f"; {_PROPERTY.partition('::')[2]}: {seconds:.0f} s, in which requests were admitted, passed others, were "
        "sent back, and classes were found anew, as often as the figure says",
        details={"output": (done.output + traffic.output)[-4000:]} if failures else {},
    )
