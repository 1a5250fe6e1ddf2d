"""costs.3: how well the models of ``lorikeet profile`` meet what it measured."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accept.disturbance import disturbance_words, undisturbed
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import LORIKEET
from lorikeet.costs.profile import CostProfile, Fit, read_profile

LEAST_R2 = 0.95


@line(
    "costs.3",
    title="R² and largest error of the models that lorikeet profile fits",
    bound=f"R² of every LoRA form, decodes and prefills, ≥ {LEAST_R2:g}",
)
def run(runs: StoredRuns) -> Result:
    """Run the command as a user does, and read its file."""
    found = runs.get("profile", partial(undisturbed, _measure))
    tables = found["tables"]
    failures = [
        f"{name}: R² {table['r2']:.3f}"
        for name, table in tables.items()
        if name.startswith("lora") and table["r2"] < LEAST_R2
    ]
    return Result(
        figure={
            name: f"R² {table['r2']:.4f}, largest error {table['worst']:.0%} of {table['points']} points"
            for name, table in tables.items()
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"lorikeet profile with its defaults, {found['seconds']:.0f} s; {found['device']}; {found['made']}; "
        f"{disturbance_words(found['stolen'])}",
    )


def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-costs3-") as scratch:
        path = Path(scratch) / "profile.toml"
        started_s = time.monotonic()
        command = [str(LORIKEET), "profile", "--model", str(default_model())]
        subprocess.run([*command, "--output", str(path)], cwd=ROOT, check=True)
        seconds = time.monotonic() - started_s
        profile = read_profile(path)
    tables = {name: {"r2": fit.r2, "worst": fit.worst, "points": fit.points} for name, fit in _fits(profile)}
    return {"tables": tables, "seconds": seconds, "device": profile.device, "made": profile.made}


def _fits(profile: CostProfile) -> Iterator[tuple[str, Fit]]:
    """Yield every fit of a measured profile with its name."""
    links = {name: getattr(profile.transfers, name) for name in profile.transfers.__struct_fields__}
    named = {"steps": profile.step.fit}
    assert profile.switching is not None
    named["merges"] = profile.switching.merge_fit
    named |= {name.replace("_", " "): link.fit if link is not None else None for name, link in links.items()}
    for form, costs in profile.lora.items():
        named[f"lora {form}, decodes"], named[f"lora {form}, prefills"] = costs.decode_fit, costs.prefill_fit
    for name, fit in named.items():
        if fit is None:
            raise ValueError(f"the profile has no fit of {name}")
        yield name, fit
