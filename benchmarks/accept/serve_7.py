"""serve.7: clients of others, unchanged and at pinned versions, over the base and adapters.

Recipes: the clients' own documentation; the tokenizer comes from the model's folder, so no hub is needed.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accept.environments import environment
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import RunningServer, running_server

# The exact torch first: without it guidellm's installation would bring a build for CUDA.
ENVIRONMENTS = {
    "openai": [["openai==3.51.0"]],
    "guidellm": [["torch==2.13.0"], ["guidellm==0.8.1"]],
    "aiperf": [["aiperf==0.13.0"]],
}

# aiperf takes "offline" to mean "from the hub's cache alone" and then refuses local folders.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_SECONDS = 15
_REQUESTS = 12


@line("serve.7", title="openai, guidellm and aiperf, unchanged, over base and adapters", bound="every client succeeds")
def run(runs: StoredRuns) -> Result:
    """Run each client against a fresh server with the sample adapters."""
    clients = {"openai": _openai, "guidellm": _guidellm, "aiperf": _aiperf}
    figures: dict[str, Any] = {}
    causes = []
    for name, use in clients.items():
        result = runs.get(name, lambda use=use, name=name: _with_server(name, use))  # type: ignore[misc]
        figures[name] = result["figure"]
        causes += [f"{name}: {problem}" for problem in result["problems"]]
    pins = ", ".join(step[-1] for steps in ENVIRONMENTS.values() for step in steps)
    return Result(figures, passed=not causes, cause="; ".join(causes), notes=f"{pins}; tokenizer from the local folder")


def _with_server(name: str, use: Any) -> dict[str, Any]:
    binaries = environment(name, ENVIRONMENTS[name])
    adapters = sorted(file.parent.name for file in (ROOT / SAMPLES).glob("*/adapter_config.json"))
    flags = [flag for adapter in adapters for flag in ("--lora-modules", f"{adapter}={SAMPLES / adapter}")]
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-serve7-") as text,
        running_server([*flags, "--store-dir", f"{text}/store"], Path(text) / "serve.log") as server,
    ):
        result: dict[str, Any] = use(binaries, server, [default_model().name, *adapters[:2]], Path(text))
        return result


def _run(command: Sequence[str], cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a client in an empty home, so that it finds no cache of anybody's."""
    variables = {**os.environ, "HOME": str(cwd), "COLUMNS": "200", **variables}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=900)


def _openai(binaries: Path, server: RunningServer, models: list[str], scratch: Path) -> dict[str, Any]:
    script = Path(__file__).parent / "clients" / "use_openai.py"
    done = _run([str(binaries / "python"), str(script), server.url, *models], scratch)
    if done.returncode:
        return {"figure": "failed", "problems": [done.stderr[-1500:]]}
    return {"figure": f"{len(models)} models", "problems": []}


def _guidellm(binaries: Path, server: RunningServer, models: list[str], scratch: Path) -> dict[str, Any]:
    """One run for each model: guidellm sends one model name per run."""
    figures, problems = {}, []
    for model in models:
        command = [
            str(binaries / "guidellm"),
            "run",
            *("--backend", f"kind=openai_http,target={server.url},model={model}"),
            *("--tokenizer", f"kind=hf_auto,model={default_model()}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_duration,seconds={_SECONDS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            "--disable-progress",
            *("--output", "kind=json,path=report.json"),
        ]
        done = _run(command, scratch, **_OFFLINE)
        report = scratch / "report.json"
        if done.returncode or not report.is_file():
            problems.append(f"{model}: {done.stdout[-700:]} {done.stderr[-700:]}")
            continue
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        report.unlink()
        figures[model] = totals
        if totals["errored"] or not totals["successful"]:
            problems.append(f"{model}: {totals}")
    return {"figure": figures, "problems": problems}


def _aiperf(binaries: Path, server: RunningServer, models: list[str], scratch: Path) -> dict[str, Any]:
    """One run over all models in turns; it also reads the server's /metrics by itself."""
    command = [
        str(binaries / "aiperf"),
        "profile",
        *("--url", server.url, "--endpoint-type", "chat", "--streaming"),
        *("--model-names", ",".join(models), "--model-selection-strategy", "round_robin"),
        *("--tokenizer", str(default_model())),
        *("--request-count", str(_REQUESTS), "--concurrency", "4"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(scratch / "aiperf"), "--ui", "none"),
    ]
    done = _run(command, scratch)
    reports = [*scratch.glob("aiperf/**/profile_export_aiperf.json")]
    if done.returncode or not reports:
        return {"figure": "failed", "problems": [f"{done.stdout[-1000:]} {done.stderr[-1000:]}"]}
    report = json.loads(reports[0].read_text())
    completed = int(report["request_count"]["avg"])
    errors = report.get("error_summary") or "no errors named"
    problems = [] if completed == _REQUESTS else [f"{completed} of {_REQUESTS} requests, {errors}"]
    return {"figure": {"requests": completed}, "problems": problems}
