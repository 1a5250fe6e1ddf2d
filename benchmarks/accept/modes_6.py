"""modes.6: TOPPINGS' server-level setting by the modelled executor, beside what its paper prints."""

from collections.abc import Mapping
from typing import Any

from benchmarks.accept import toppings_cases as cases
from benchmarks.accept import toppings_figures as paper
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.toppings_page import toppings_page

BOUND = 0.12
PAGE = ROOT / "docs" / "toppings.md"


@line(
    "modes.6",
    title="TOPPINGS' setting by the modelled executor: TTFT, TPT and latency of its rows, ablations, two links",
    bound="every table beside the printed figures, in docs/toppings.md; in S1 to S3, S5 and S6 mean TTFT and TPT of "
    f"{cases.CACHED} ≤ {cases.OURS} ≤ {cases.ON_DEMAND} and TTFT of {cases.OURS} ≤ {cases.STRAWMAN}; in S3 "
    f"{cases.OURS} within {BOUND:.0%} of {cases.CACHED} in both",
)
def run(runs: StoredRuns) -> Result:
    """Run all cases and write the page."""
    found = cases.measure(runs)
    PAGE.write_text(toppings_page(found))
    mine, wrong = cases.increases(found, "S3", cases.OURS), out_of_order(found)
    assert mine.ttft is not None
    assert mine.tpt is not None
    passed = not wrong and max(mine.ttft, mine.tpt) <= BOUND
    printed = paper.INCREASES["S3"][cases.OURS]
    causes = [*wrong] if max(mine.ttft, mine.tpt) <= BOUND else [*wrong, f"{mine.ttft:+.1%}, {mine.tpt:+.1%} in S3"]
    return Result(
        figure={
            "S3 TTFT over cached": f"{mine.ttft:+.1%} (paper {printed.ttft:+.0%})",
            "S3 TPT over cached": f"{mine.tpt:+.1%} (paper {printed.tpt:+.0%})",
            "out of order": len(wrong),
        },
        passed=passed,
        cause="; ".join(causes),
        notes=f"{cases.REQUESTS} requests each; link {cases.LINK_BYTES_PER_S / 1e9:.1f} GB/s; page: docs/toppings.md",
        details={"runs": found},
    )


def out_of_order(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return where the rows do not come in their order, in words."""
    wrong = []
    for setting in ("S1", "S2", "S3", "S5", "S6"):
        made = {row: found[cases.Case(setting, "printed", row).name] for row in cases.ROWS}
        for key, rows in (
            ("ttft_mean_s", (cases.CACHED, cases.OURS, cases.ON_DEMAND)),
            ("tpt_mean_s", (cases.CACHED, cases.OURS, cases.ON_DEMAND)),
            ("ttft_mean_s", (cases.OURS, cases.STRAWMAN)),
        ):
            values = [made[row][key] for row in rows]
            if values != sorted(values):
                wrong.append(f"{setting}: {key} of {', '.join(rows)} is {', '.join(f'{each:.4f}' for each in values)}")
    return wrong
