"""Virtual environments of their own for programs of others, below ``.venvs/``."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accept.runs import ROOT


def environment(
    name: str, steps: Sequence[Sequence[str]], remove: Sequence[str] = (), root: Path = ROOT / ".venvs"
) -> Path:
    """Return the ``bin`` folder of an environment, made at the first call.

    Args:
        name: of its folder.
        steps: arguments of ``pip install``, one call each, versions pinned.
        remove: packages uninstalled after the last step.
        root: where environments lie.
    """
    folder = root / name
    stamp = folder / ".steps"
    wanted = repr([list(step) for step in steps] + ([["remove", *remove]] if remove else []))
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip"]
        for step in steps:
            subprocess.run([*pip, "install", "--quiet", *step], check=True)
        if remove:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *remove], check=True)
        stamp.write_text(wanted)
    return folder / "bin"
