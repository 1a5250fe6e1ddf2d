"""Rules for the whole suite."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import structlog
import zmq.asyncio

from tests.support import fuzzing, sampling
from tests.support.default_model import default_model_cache  # noqa: F401 - a fixture, for every folder
from tests.support.postgres import postgres_url  # noqa: F401 - a fixture, for every folder

pytest_plugins = ["pytester"]

# One OpenMP team per process: tests start several processes on few cores. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Triton's kernels run in its interpreter where there is no GPU. Set before any of them is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tracebacks as Python prints them: rich ones, with the values of all variables, take seconds to render.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


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


@pytest.fixture
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    """Return a context that is closed even if the test fails: left to Python, it would wait for ever."""
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


# --- samples of large matrices -------------------------------------------------------------------

LEFT_OUT = pytest.StashKey[list[str]]()
"""Ids of cases that samples leave out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all`` and ``--fuzz``."""
    parser.addoption("--all", action="store_true", help="run long tests too, and large matrices in full")
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="run N random cases of every fuzz test")


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Iterator[fuzzing.Fuzzing]:
    """Run the cases of a fuzz test, and measure them."""
    with fuzzing.watched(request.config.getoption("--fuzz")) as cases:
        yield cases


def pytest_configure(config: pytest.Config) -> None:
    """Begin with nothing left out, and set how many examples property tests have."""
    sampling.runs_all = config.getoption("--all")
    # The same examples on every run, and no time limits: other work may share the machine.
    hypothesis.settings.register_profile(
        "lorikeet", deadline=None, derandomize=True, max_examples=100 if sampling.runs_all else 30
    )
    hypothesis.settings.load_profile("lorikeet")
    config.stash[LEFT_OUT] = []
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_WorkersSamples(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, and the cases outside the samples of marked matrices, unless ``--all`` is given."""
    if hasattr(config, "workerinput"):
        sampling.put_longest_files_first(items)
    if config.getoption("--all"):
        return
    items[:], left_out = sampling.sample_items(items)
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] += [item.nodeid for item in left_out]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, which took a fifth of the suite's processor time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this one, if one did, what was left out here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


class _WorkersSamples:
    """Hears from the processes of pytest-xdist what they left out: the same in each."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the tests that were left out, wholly or in part."""
    if lines := sampling.summary(config.stash[LEFT_OUT]):
        terminalreporter.section("left out, run with --all")
        for line in lines:
            terminalreporter.line(line)
