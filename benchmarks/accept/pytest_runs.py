"""Tests run as a user runs them, and what came of each."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.accept.runs import ROOT


class TestRun(NamedTuple):
    """A run of pytest.

    Attributes:
        passed: test → how many cases of it passed, as ``module::function``.
        failed: cases that failed or were skipped.
        output: what pytest printed.
    """

    passed: dict[str, int]
    failed: list[str]
    output: str


def run_tests(tests: Sequence[str], environment: Mapping[str, str] | None = None) -> TestRun:
    """Run tests by their node ids.

    Raises:
        RuntimeError: pytest found no such test, or broke down.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-tests-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True
        )
        if done.returncode not in (0, 1) or not report.is_file():
            raise RuntimeError(f"pytest ended with code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        cases = list(xml.parse(report).iter("testcase"))
    passed: Counter[str] = Counter()
    failed = []
    for case in cases:
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{(case.get('name') or '').partition('[')[0]}"
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
            failed.append(f"{name}{(case.get('name') or '').removeprefix(name.partition('::')[2])}")
        else:
            passed[name] += 1
    return TestRun(dict(passed), failed, done.stdout)
