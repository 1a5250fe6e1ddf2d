"""``lorikeet bench offline`` run as a program, and its report as a line wants it."""

import json
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.accept.server import LORIKEET
from lorikeet.kernels.dtypes import SLOW_HALVES

PAIRS = 5


def run_offline_command(options: str) -> dict[str, Any]:
    """Run ``lorikeet bench offline`` with ``options`` and return its report."""
    command = [str(LORIKEET), "bench", "offline", *shlex.split(options), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout))


def throughput_row(title: str, options: str, report: dict[str, Any], speed: str = "output") -> dict[str, Any]:
    """Return one row of the throughput table in docs/performance.md, as plain data.

    Args:
        title: what the work is.
        options: as given to :func:`run_offline_command`.
        report: what it returned.
        speed: ``output`` or ``total``: which tokens are counted.
    """
    return {
        "work": title,
        "unit": f"{speed} tokens/s",
        "command": f"lorikeet bench offline {options}",
        "lorikeet": report[f"{speed}_tok_s"],
        "limit": report[f"limit_{speed}_tok_s"],
        "share": report["share_of_limit"]["output"]["share"],
        "peers": {
            name: {"tok_s": peer[f"{speed}_tok_s"], "ratio": peer["ratio"], "interval": peer["ratio_interval"]}
            for name, peer in report["peers"].items()
        },
        "limits": report["limits"],
        "versions": report["versions"],
    }


def describe_limits(limits: dict[str, Any]) -> str:
    """Return the machine's rates in a few words."""
    rates = ", ".join(f"{rate:.0f} at {rows} rows" for rows, rate in limits["gemm_gflops"].items())
    return f"{limits['read_gb_s']:.1f} GB/s read, GFLOP/s {rates}, {limits['threads']} threads"


def interval_words(interval: Sequence[float]) -> str:
    """Return an interval that stands inside a figure."""
    low, high = interval
    return f"{low:.3g} to {high:.3g}"


def describe_versions(versions: dict[str, str]) -> str:
    """Return package and version, joined by commas."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def describe_peft_here() -> str:
    """Return what is to be known of PEFT's speed on this machine, with a comma before it."""
    return ", which is many times faster in single precision on this CPU" if SLOW_HALVES else ""
