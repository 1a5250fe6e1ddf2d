"""What ``deploy/`` holds: alerts that fire for their faults only, and names of metrics that the server has."""

import re
import shutil
import subprocess

import msgspec
import pytest

from lorikeet.core.messages import AssistCounters
from tests.api.conftest import Running, sources, start  # noqa: F401 - fixtures
from tests.api.conftest import server as a_server
from tests.api.test_metrics import STATS, page
from tests.test_docs import ROOT, headings, script

DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
server = a_server


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    done = subprocess.run(["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_alert_fires_for_its_fault_and_none_in_a_good_hour() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "rules_test.yml")
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    tests = re.findall(r"- name: (\w+)$", (RULES.parent / "rules_test.yml").read_text(), re.MULTILINE)
    assert len(alerts) >= 10
    assert tests == alerts, "each has a test of its own"


def test_each_alert_has_a_heading_in_the_runbook() -> None:
    runbook = headings(ROOT / "docs" / "runbook.md")
    assert {name.lower() for name in re.findall(r"- alert: (\w+)", RULES.read_text())} <= runbook
    for link in re.findall(r"runbook: runbook.md#(\S+)", RULES.read_text()):
        assert link in runbook


def test_the_dashboard_is_what_its_script_writes() -> None:
    made = script("deploy/grafana/make_dashboard.py")
    assert made.FILE.read_text() == made.content()


async def test_alerts_and_dashboard_use_metrics_that_the_server_has(server: Running) -> None:
    server.engine.stats = msgspec.structs.replace(STATS, assist=AssistCounters(0, 0, 0, 0, 0))
    known = set(await page(server))
    for file in (RULES, DEPLOY / "grafana" / "dashboards" / "lorikeet.json"):
        used = set(re.findall(r"\b(?:vllm|lorikeet):\w+", file.read_text()))
        assert len(used) > 10
        assert used <= known, file.name
