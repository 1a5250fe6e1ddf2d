"""serve.1: a fresh clone without caches: install, first chat, then the whole test suite."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns, revision
from benchmarks.accept.server import free_port, running_server
from benchmarks.pip_bytes import sizes_bytes

FIRST_CHAT_S = 90.0
TEST_S = 15 * 60.0
_DROPPED = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKE", "MFLAGS", "LINE", "LORIKEET_", "HF_", "XDG_")
"""Beginnings of variables that a newcomer would not have, or that point to caches."""


@line(
    "serve.1",
    title="Fresh clone: first chat after installation, and the test suite",
    bound=f"first chat ≤ {FIRST_CHAT_S:.0f} s, make test passes in ≤ {TEST_S / 60:.0f} min",
)
def run(runs: StoredRuns) -> Result:
    """Clone the present commit into an empty folder and use it as a newcomer would."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-fresh-") as scratch:
        figures = _measure(Path(scratch))
    met = figures["first_chat_s"] <= FIRST_CHAT_S and figures["test_s"] <= TEST_S and figures["test_exit_code"] == 0
    fetched = f"{figures['downloaded_bytes']:,} bytes downloaded, {figures['local_bytes']:,} read from local wheels"
    return Result(
        figure=figures,
        passed=met,
        cause="" if met else f"first chat {figures['first_chat_s']:.0f} s, tests {figures['test_summary']}",
        notes=f"home, XDG folders and pip cache empty, pip's configuration kept; installation: {fetched}; "
        f"tests: {figures['test_summary']}",
    )


def _measure(scratch: Path) -> dict[str, Any]:
    clone = scratch / "lorikeet"
    subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(clone)], check=True)
    environment = newcomer_environment(scratch)
    start_s = time.monotonic()
    subprocess.run(["make", "setup"], cwd=clone, env=environment, check=True)
    install_s = time.monotonic() - start_s
    sizes = sizes_bytes((clone / ".venv" / "pip.log").read_text())

    port = free_port()
    start_s = time.monotonic()
    with running_server(
        [],
        scratch / "serve.log",
        command=("make", "serve", f"PORT={port}"),
        cwd=clone,
        environment=environment,
        port=port,
    ) as server:
        answer = server.chat("SmolLM2-135M-Instruct", "What is a lorikeet?", max_tokens=32, temperature=0)
        first_chat_s = time.monotonic() - start_s
    start_s = time.monotonic()
    tests = subprocess.run(
        ["make", "test"],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(tests.stdout[-3000:])
    return {
        "first_chat_s": first_chat_s,
        "test_s": time.monotonic() - start_s,
        "test_exit_code": tests.returncode,
        "test_summary": tests.stdout.strip().splitlines()[-1].strip("= ") if tests.stdout.strip() else "no output",
        "install_s": install_s,
        "downloaded_bytes": sum(sizes["downloaded"].values()),
        "local_bytes": sum(sizes["local"].values()),
        "answer": answer,
        "clone_of": revision(),
    }


def newcomer_environment(scratch: Path) -> Mapping[str, str]:
    """The environment of somebody whose home is empty, and no trace of the virtual environment that runs this.

    Kept of the user's settings is where pip finds packages, without which some networks cannot install anything,
    and the interpreter, which may lie in the home that is left.
    """
    home = scratch / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    if "PIP_CONFIG_FILE" not in kept and (configuration := _pip_configuration()) is not None:
        kept["PIP_CONFIG_FILE"] = str(configuration)
    own_programs = str(Path(sys.prefix) / "bin")
    return kept | {
        "HOME": str(home),
        "PATH": os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if part != own_programs),
        "PIP_CACHE_DIR": f"{home}/.cache/pip",
        "PYTHON": os.path.realpath(sys.executable),
        "XDG_CACHE_HOME": f"{home}/.cache",
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_STATE_HOME": f"{home}/.local/state",
    }


def _pip_configuration() -> Path | None:
    """The user's pip.conf (https://pip.pypa.io/en/stable/topics/configuration/)."""
    home = Path.home()
    places = (Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf", home / ".pip/pip.conf")
    return next((place for place in places if place.is_file()), None)
