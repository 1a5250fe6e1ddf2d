"""Where and on what a figure was measured."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.accept.runs import ROOT
from lorikeet.bench.machine import cpu_model


def describe_machine() -> dict[str, str | int]:
    """Return the machine in plain words and numbers."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def revision(root: Path = ROOT) -> str:
    """Return the commit, with ``-dirty`` if tracked files other than those made by measuring differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    pages = ("status", "performance", "memory-rows", "chameleon", "cluster-figures", "dlora", "toppings")
    made = (":!docs/status", *(f":!docs/{page}.md" for page in pages))
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *made)
    return git("rev-parse", "--short=12", "HEAD").strip() + ("-dirty" if changed.strip() else "")
