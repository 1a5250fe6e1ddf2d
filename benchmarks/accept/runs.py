"""Finished parts of a line, kept as small JSON files so that a second call resumes."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from benchmarks.accept.machine import this_machine

ROOT = Path(__file__).resolve().parents[2]
STATUS = ROOT / "docs" / "status"

_CODE = (
    "src",
    "benchmarks",
    "examples",
    "native",
    "tests/kernels",
    "tests/models",
    "setup.py",
    "pyproject.toml",
    "constraints.txt",
)


def code_digest(root: Path = ROOT) -> str:
    """Return a short digest of everything that a measurement depends on, committed or not, but of nothing built."""
    digest = hashlib.sha256()
    for top in _CODE:
        path = root / top
        files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
        for file in files:
            hidden = any(
                part.startswith(".") or part == "__pycache__" or part.endswith(".egg-info")
                for part in file.parts[len(root.parts) :]
            )
            if file.is_file() and not hidden and file.suffix != ".so":
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def revision(root: Path = ROOT) -> str:
    """Return the commit, with ``-dirty`` if tracked files other than those made by measuring differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    pages = ("status", "performance", "memory-rows", "chameleon", "cluster-figures", "dlora", "toppings")
    made = (":!docs/status", *(f":!docs/{page}.md" for page in pages))
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *made)
    return git("rev-parse", "--short=12", "HEAD").strip() + ("-dirty" if changed.strip() else "")


class StoredRuns:
    """The parts of one line. A stored part counts only for the code that made it, and on the machine that it ran on.

    Args:
        line: whose parts.
        folder: with a folder for each line.
        code: digest of the code.
        machine: in words.
    """

    def __init__(
        self, line: str, folder: Path = STATUS / "runs", code: str | None = None, machine: str | None = None
    ) -> None:
        self._folder = folder / line
        self._code = code if code is not None else code_digest()
        self._machine = machine if machine is not None else this_machine()
        self._counts_anywhere = False

    def of_any_machine(self) -> "StoredRuns":
        """Return the same, where what another machine has made counts as well."""
        runs = copy(self)
        runs._counts_anywhere = True
        return runs

    def get(self, part: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the stored result of ``part``, or measure and store it.

        Args:
            part: name of the part, unique in its line; becomes a file name.
            measure: returns plain data for JSON.
        """
        if (stored := self.stored(part)) is not None:
            return stored
        result = measure()
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"code": self._code, "machine": self._machine, "result": result}, indent=1) + "\n"
        (self._folder / f"{part}.json").write_text(text)
        return result

    def stored(self, part: str) -> dict[str, Any] | None:
        """Return the stored result of ``part``, None if there is none that counts."""
        path = self._folder / f"{part}.json"
        if not path.is_file():
            return None
        stored = json.loads(path.read_text())
        is_from_here = self._counts_anywhere or stored.get("machine") == self._machine
        return dict(stored["result"]) if stored["code"] == self._code and is_from_here else None

    def clear(self) -> None:
        """Forget all parts that this machine has made. Those of others, of a GPU perhaps, it may not make again."""
        for path in self._folder.glob("*.json"):
            if json.loads(path.read_text()).get("machine") == self._machine:
                path.unlink()
