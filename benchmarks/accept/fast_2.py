"""fast.2: 32 requests under eight adapters, against PEFT with the same adapters and vLLM without any."""

from typing import Any

from benchmarks.accept.lines import Result, line
from benchmarks.accept.offline import (
    PAIRS,
    describe_limits,
    describe_peft_here,
    describe_versions,
    interval_words,
    run_offline_command,
    throughput_row,
)
from benchmarks.accept.runs import StoredRuns
from benchmarks.vllm_environment import vllm_python

PEFT, VLLM = 3.5, 1.9
OPTIONS = (
    f"--requests 32 --prompt-tokens 128 --output-tokens 64 --adapters 8 --peer peft --peer vllm-base --pairs {PAIRS}"
)


@line(
    "fast.2",
    title="32 × (128 + 64) tokens, eight adapters of ranks 8 to 128",
    bound=f"≥ {PEFT:g} × PEFT with the same adapters, ≥ {VLLM:g} × vLLM CPU without adapters",
)
def run(runs: StoredRuns) -> Result:
    """All three sides run in turns."""
    report = runs.get("offline", _measure)
    peft, vllm = report["peers"]["peft"], report["peers"]["vllm-base"]
    failures = [
        *([f"{peft['ratio']:.2f} × PEFT"] if peft["ratio"] < PEFT else []),
        *([_behind_vllm(report)] if vllm["ratio"] < VLLM else []),
    ]
    return Result(
        figure={
            "output_tok_s": report["output_tok_s"],
            "peft_output_tok_s": peft["output_tok_s"],
            "vllm_base_output_tok_s": vllm["output_tok_s"],
            "peft_ratio": peft["ratio"],
            "vllm_base_ratio": vllm["ratio"],
            "vllm_base_ratio_interval": interval_words(vllm["ratio_interval"]),
            "share_of_limit": report["share_of_limit"]["output"]["share"],
        },
        interval=(peft["ratio_interval"][0], peft["ratio_interval"][1]),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"`lorikeet bench offline {OPTIONS}`; ranks {report['ranks']}; {describe_limits(report['limits'])}; "
        f"{describe_versions(report['versions'])}; first tokens equal to PEFT's: {peft['first_tokens_equal']:.0%}; "
        f"interval of the ratio to PEFT{describe_peft_here()}",
        details={"throughput": [throughput_row("32 × (128 + 64), 8 adapters of ranks 8 to 128", OPTIONS, report)]},
    )


def _behind_vllm(report: dict[str, Any]) -> str:
    """Say how far the bound is, and how much of what the machine allows it would take."""
    vllm = report["peers"]["vllm-base"]
    needed = VLLM * vllm["output_tok_s"]
    return (
        f"{vllm['ratio']:.2f} × vLLM without adapters: it reaches {vllm['output_tok_s']:.0f} tokens/s, {VLLM:g} × that "
        f"is {needed / report['limit_output_tok_s']:.0%} of this machine's limit for the work with adapters"
    )


def _measure() -> dict[str, Any]:
    vllm_python()
    return run_offline_command(OPTIONS)
