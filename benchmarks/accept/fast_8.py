"""fast.8: start to first token without a compiler, and how long the native module takes to build."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import LORIKEET, running_server
from lorikeet.bench.statistics import median_interval

STARTS = 5
START_S, BUILD_S = 8.0, 60.0
_COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ninja", "make", "ld", "as")


@line(
    "fast.8",
    title="Start to first token with the model cached; building the native module",
    bound=f"start ≤ {START_S:g} s with no compiler at hand, build ≤ {BUILD_S:g} s",
)
def run(runs: StoredRuns) -> Result:
    """Start as `make serve` does, several times, and build as it does, once."""
    starts, build = runs.get("starts", _starts), runs.get("build", _build)
    first_token_s = statistics.median(starts["first_token_s"])
    native = all(kernels.startswith("native") for kernels in starts["kernels"])
    failures = [
        *([f"the first token comes after {first_token_s:.1f} s"] if first_token_s > START_S else []),
        *([f"the server computed with {starts['kernels']}"] if not native else []),
        *([f"the build takes {build['seconds']:.0f} s"] if build["seconds"] > BUILD_S else []),
        *([f"only {build['libraries']} were built"] if len(build["libraries"]) < 3 else []),
    ]
    return Result(
        figure={
            "first_token_s": first_token_s,
            "slowest_s": max(starts["first_token_s"]),
            "build_s": build["seconds"],
            "libraries": len(build["libraries"]),
        },
        interval=median_interval(starts["first_token_s"]),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"median of {STARTS} starts of `lorikeet serve` with the sample adapters and an empty store, from the "
        "start of the process to the first streamed token of a chat; CC and CXX are /bin/false and PATH has none of "
        f"{', '.join(_COMPILERS)}; kernels: {starts['kernels'][0]}; build: every instruction set, forced, into an "
        "empty folder; interval of the start",
    )


def _starts() -> dict[str, Any]:
    default_model()
    first_token_s, kernels = [], []
    for _ in range(STARTS):
        with tempfile.TemporaryDirectory(prefix="lorikeet-fast8-") as scratch:
            seconds, name = _start(Path(scratch))
        first_token_s.append(seconds)
        kernels.append(name)
    return {"first_token_s": first_token_s, "kernels": kernels}


def _start(scratch: Path) -> tuple[float, str]:
    """Return the seconds from the start of the process to the first token, and who computed it."""
    path = str(LORIKEET.parent)
    found = [name for name in _COMPILERS if shutil.which(name, path=path)]
    if found:
        raise RuntimeError(f"{path} has {', '.join(found)}")
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "PATH": path, "XDG_DATA_HOME": str(scratch)}
    samples = sorted(config.parent for config in (ROOT / SAMPLES).glob("*/adapter_config.json"))
    flags = [f"--lora-modules={folder.name}={folder.relative_to(ROOT)}" for folder in samples]
    start_s = time.monotonic()
    with running_server(
        ["--host", "127.0.0.1", "--adapter-dir", str(SAMPLES), *flags],
        scratch / "serve.log",
        environment=environment,
    ) as server:
        _first_token(server.url)
        seconds = time.monotonic() - start_s
        return seconds, str(httpx.get(f"{server.url}/health").json()["kernels"])


def _first_token(url: str) -> None:
    """Return when the first text of a chat has arrived."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "What is a lorikeet?"}],
        "stream": True,
        "max_tokens": 16,
        "temperature": 0,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        for text in response.iter_lines():
            data = text.removeprefix("data: ")
            if data.startswith("{") and (json.loads(data)["choices"] or [{}])[0].get("delta", {}).get("content"):
                return
    raise RuntimeError("the answer has no text")


def _build() -> dict[str, Any]:
    """Build the extension as pip does for `make serve`, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-build-") as scratch:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--force"]
        start_s = time.monotonic()
        subprocess.run([*command, f"--build-lib={scratch}/lib", f"--build-temp={scratch}/temp"], cwd=ROOT, check=True)
        seconds = time.monotonic() - start_s
        libraries = sorted(path.name for path in Path(scratch, "lib").rglob("*.so"))
    return {"seconds": seconds, "libraries": libraries}
