"""Rules for the whole suite."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.default_model import default_model_cache  # noqa: F401 - a fixture, for every folder
from tests.support.postgres import postgres_url  # noqa: F401 - a fixture, for every folder

# One OpenMP team per process: tests start several processes on few cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Triton's kernels run in its interpreter where there is no GPU. Set before any of them is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every run, and no time limits: other work may share the machine.
hypothesis.settings.register_profile("lorikeet", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lorikeet")


def _must_fail(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return os.environ.get("REQUIRE_ALL") == "1" and report.skipped and not hasattr(report, "wasxfail")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """With ``REQUIRE_ALL=1`` a skipped test is a failed one; only GPU tests may be skipped."""
    report = yield
    if _must_fail(report) and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_ALL=1, but this test was skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """With ``REQUIRE_ALL=1`` no module may be skipped as a whole."""
    report = yield
    if _must_fail(report):
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_ALL=1, but this module was skipped: {report.longrepr}"
    return report
