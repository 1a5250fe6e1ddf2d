"""serve.10: offline throughput against transformers + PEFT, one interleaved run."""

import json
import shlex
import subprocess
from typing import Any

from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import LORIKEET

BOUND = 1.3
SAME_FIRST_TOKENS = 0.8
"""Sides that compute the same differ in ties of bfloat16 only; one without adapters would fall far below."""
COMMAND = "bench offline --requests 32 --prompt-tokens 128 --output-tokens 64 --adapters 8 --peer peft --json"


@line(
    "serve.10",
    title="Offline throughput as a multiple of transformers + PEFT's",
    bound=f"ratio ≥ {BOUND}; first token equal on both sides for ≥ {SAME_FIRST_TOKENS:.0%} of the requests",
)
def run(runs: StoredRuns) -> Result:
    """Run the command of the line and read its JSON."""
    report = runs.get("offline", _measure)
    keys = ("output_tok_s", "total_tok_s", "peer_output_tok_s", "ratio", "first_tokens_equal")
    passed = report["ratio"] >= BOUND and report["first_tokens_equal"] >= SAME_FIRST_TOKENS
    cause = f"the ratio is {report['ratio']:.2f}, first tokens are equal for {report['first_tokens_equal']:.0%}"
    low, high = report["ratio_interval"]
    return Result(
        figure={key: report[key] for key in keys},
        interval=(low, high),
        passed=passed,
        cause="" if passed else cause,
        notes=f"`lorikeet {COMMAND}`; {len(report['ratios'])} pairs in turns, {report['setup']['threads']} threads, "
        f"{report['setup']['dtype']}; ranks {report['ranks']}; transformers {report['versions']['transformers']}, "
        f"PEFT {report['versions']['peft']} with mixed batches by adapter_names; interval of the median ratio",
    )


def _measure() -> dict[str, Any]:
    done = subprocess.run([str(LORIKEET), *shlex.split(COMMAND)], stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout))
