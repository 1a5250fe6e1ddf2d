"""modes.4: dLoRA's server-level setting by the modelled executor, beside what its paper prints."""

from benchmarks.accept import dlora_cases as cases
from benchmarks.accept import dlora_figures as paper
from benchmarks.accept.dlora_page import dlora_page
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns

BOUND = 1.15
PAGE = ROOT / "docs" / "dlora.md"


@line(
    "modes.4",
    title="dLoRA's setting by the modelled executor: latency per output token of its rows by skew, and on phases",
    bound="every table beside the printed figures, in docs/dlora.md; on the phases of modes.3 at "
    f"{cases.PHASE_LOAD:.0%} of {cases.UNMERGED}'s peak the better of {cases.MERGED} and {cases.UNMERGED} has ≥ "
    f"{BOUND:g} × {cases.OURS}'s latency per output token",
)
def run(runs: StoredRuns) -> Result:
    """Run all cases and write the page."""
    found = cases.measure(runs)
    PAGE.write_text(dlora_page(found))
    phases = {row: made["latency_per_token_s"] for row, made in found["phases"].items()}
    better = min((cases.MERGED, cases.UNMERGED), key=lambda row: phases[row])
    ratio = phases[better] / phases[cases.OURS]
    passed = ratio >= BOUND
    return Result(
        figure={
            f"{better} ÷ {cases.OURS} on the phases": ratio,
            **{
                f"{row} ÷ {cases.OURS}, largest over skews": (
                    f"{max(_ratio(made, row) for made in found['skews'].values()):.2f} (paper {printed.mean:g})"
                )
                for row, printed in paper.RIVALS.items()
            },
        },
        passed=passed,
        cause="" if passed else f"{better} has {phases[better]:.3f} s, {cases.OURS} {phases[cases.OURS]:.3f} s",
        notes=f"profile {cases.PROFILE}; page: docs/dlora.md",
        details=found,
    )


def _ratio(made: dict[str, dict[str, float]], row: str) -> float:
    return made[row]["latency_per_token_s"] / made[cases.OURS]["latency_per_token_s"]
