"""fast.1: one stream under one adapter, against the memory's bandwidth and transformers + PEFT."""

from benchmarks.accept.lines import Result, line
from benchmarks.accept.offline import (
    describe_limits,
    describe_peft_here,
    describe_versions,
    interval_words,
    run_offline_command,
    throughput_row,
)
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.step_profile import profile_words, step_profile

SHARE = 0.60
RATIO = 4.0
PAIRS = 9  # runs of seconds, against a bandwidth that drifts
OPTIONS = (
    f"--requests 1 --prompt-tokens 32 --output-tokens 64 --adapters 1 --adapter-rank 32 --peer peft --pairs {PAIRS}"
)


@line(
    "fast.1",
    title="One stream, 32 + 64 tokens, one adapter of rank 32",
    bound=f"tokens after the first at ≥ {SHARE:.0%} of the bandwidth limit, end to end ≥ {RATIO:g} × PEFT",
)
def run(runs: StoredRuns) -> Result:
    """Both figures come from one run, in turns."""
    report = runs.get("offline", lambda: run_offline_command(OPTIONS))
    profile = runs.get("profile", lambda: step_profile(1, 32, 64, rank=32))
    decode = report["share_of_limit"]["decode"]
    share, ratio = decode["share"], report["ratio"]
    failures = [
        *([f"{share:.1%} of the bandwidth limit after the first token"] if share < SHARE else []),
        *([f"{ratio:.2f} × PEFT"] if ratio < RATIO else []),
    ]
    return Result(
        figure={
            "decode_tok_s": report["decode_tok_s"],
            "limit_decode_tok_s": report["limit_decode_tok_s"],
            "share_of_limit": share,
            "share_interval": interval_words(decode["interval"]),
            "output_tok_s": report["output_tok_s"],
            "peft_output_tok_s": report["peer_output_tok_s"],
            "ratio": ratio,
            "first_tokens_equal": report["first_tokens_equal"],
        },
        interval=(report["ratio_interval"][0], report["ratio_interval"][1]),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"`lorikeet bench offline {OPTIONS}`; {describe_limits(report['limits'])}; "
        f"{describe_versions(report['versions'])}; the limit reads base and adapter once per token; "
        f"{profile_words(profile)}; interval of the ratio to PEFT{describe_peft_here()}",
        details={"throughput": [throughput_row("1 stream, 32 + 64, one adapter of rank 32", OPTIONS, report)]},
    )
