"""costs.4: an hour of a public trace, simulated."""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from heapq import nlargest
from pathlib import Path
from typing import Any

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import LORIKEET
from benchmarks.accept.traces import AZURE_CONVERSATION, unpacked

REQUESTS, SECONDS, MEMORY = 19_366, 60.0, 1.1
PROFILE = "a100-80-llama-2-7b"
SCENARIO = f"""\
profile = "{PROFILE}"
preset = "lorikeet:plain"
trace = "TRACE"
max_model_tokens = 16384  # the trace has prompts of 14,050 tokens; no time depends on the model's own limit
engine = {{ max_running = 256, max_step_tokens = 2048 }}
"""


@line(
    "costs.4",
    title="The Azure conversation trace at its native rate, simulated",
    bound=f"{REQUESTS:,} requests in ≤ {SECONDS:g} s; two passes peak at ≤ {MEMORY:g} × the memory of one; two runs "
    "write the same bytes",
)
def run(runs: StoredRuns) -> Result:
    """Time the command twice, then count memory in processes of one and of two passes; see where the time goes."""
    found = runs.get("simulate", _measure)
    shares: dict[str, float] = runs.get("shares", _shares)
    packages: defaultdict[str, float] = defaultdict(float)
    for module, share in shares.items():
        packages[".".join(module.split(".")[:2])] += share
    most = ", ".join(
        f"{package} {packages[package]:.0%}" for package in nlargest(5, packages, key=packages.__getitem__)
    )
    seconds, digests = found["seconds"], found["digests"]
    memory = found["two_passes_bytes"] / found["one_pass_bytes"]
    failures = [
        *([f"{found['completed']} of {REQUESTS} requests completed"] if found["completed"] != REQUESTS else []),
        *([f"a run takes {max(seconds):.0f} s: {most}"] if max(seconds) > SECONDS else []),
        *([f"two passes peak at {memory:.2f} × one"] if memory > MEMORY else []),
        *(["two runs differ"] if len(set(digests)) > 1 else []),
    ]
    return Result(
        figure={
            "slower_run_s": max(seconds),
            "requests": found["completed"],
            "simulated_s": found["simulated_s"],
            "memory_ratio": memory,
            "one_pass_mib": found["one_pass_bytes"] / 2**20,
            "identical_bytes": len(set(digests)) == 1,
            "report_bytes": found["report_bytes"],
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"`lorikeet simulate` with max_running 256 and max_step_tokens 2048, modelled by {PROFILE}, FIFO, base "
        "model, from the start of the command to its end; report: --json with every request; memory: peak resident "
        "set of processes of their own; trace: Azure LLM inference dataset 2023 (CC-BY 4.0)",
        details={"shares of a run's processor time by module": shares},
    )


def _shares() -> dict[str, Any]:
    with unpacked(AZURE_CONVERSATION) as trace, tempfile.TemporaryDirectory(prefix="lorikeet-costs4-") as scratch:
        return _in_a_process("simulate_shares", _scenario(Path(scratch), trace))


def _measure() -> dict[str, Any]:
    with unpacked(AZURE_CONVERSATION) as trace, tempfile.TemporaryDirectory(prefix="lorikeet-costs4-") as scratch:
        scenario = _scenario(Path(scratch), trace)
        seconds, digests = [], []
        for number in range(2):
            report = Path(scratch) / f"report{number}.json"
            start_s = time.monotonic()
            command = [str(LORIKEET), "simulate", str(scenario), "--json", str(report)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.monotonic() - start_s)
            written = report.read_bytes()
            digests.append(hashlib.sha256(written).hexdigest())
        figures = json.loads(written)["figures"]
        one, two = (_in_a_process("simulate_passes", scenario, passes) for passes in (1, 2))
    return {
        "seconds": seconds,
        "digests": digests,
        "report_bytes": len(written),
        "completed": figures["completed"],
        "simulated_s": figures["duration_s"],
        "one_pass_bytes": one["peak_bytes"],
        "two_passes_bytes": two["peak_bytes"],
    }


def _scenario(folder: Path, trace: Path) -> Path:
    file = folder / "azure.toml"
    file.write_text(SCENARIO.replace("TRACE", str(trace)))
    return file


def _in_a_process(module: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.accept.{module}", *map(str, arguments)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
    return found
