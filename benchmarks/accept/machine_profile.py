"""This machine's profile, measured by the product's own command."""

import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accept.disturbance import undisturbed
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import LORIKEET
from lorikeet.costs.profile import CostProfile, decode_profile


def machine_profile(
    runs: StoredRuns, part: str = "profile", *, quick: bool = False, flags: Sequence[str] = ()
) -> CostProfile:
    """Return the profile, measured once and kept as a part of the line; see ``profile_part``."""
    return decode_profile(profile_part(runs, part, quick=quick, flags=flags)["toml"], part)


def profile_part(
    runs: StoredRuns, part: str = "profile", *, quick: bool = False, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the profile as ``toml``, and ``stolen``, see ``undisturbed``.

    Args:
        runs: the parts.
        part: which it is.
        quick: the command's quick one.
        flags: further ones of the command.
    """
    flags = (*(["--quick"] if quick else []), *flags)
    return runs.get(part, partial(undisturbed, partial(_measure, flags)))


def _measure(flags: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-profile-") as scratch:
        file = Path(scratch) / "profile.toml"
        command = [str(LORIKEET), "profile", "--output", str(file), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return {"toml": file.read_text(encoding="utf-8")}
