"""cluster.3: the clusters of LoRAServe, TOPPINGS and dLoRA by the modelled executor, beside what the papers print."""

from typing import Any

from benchmarks.accept import cluster_dlora as dlora
from benchmarks.accept import cluster_figures as paper
from benchmarks.accept import cluster_loraserve as loraserve
from benchmarks.accept import cluster_toppings as toppings
from benchmarks.accept import toppings_cases
from benchmarks.accept.admission_common import two_processes
from benchmarks.accept.cluster_page import cluster_page, ratio, storage, tail_ratio
from benchmarks.accept.cluster_runs import mean_of
from benchmarks.accept.lines import Result, line
from benchmarks.accept.runs import ROOT, StoredRuns

PAGE = ROOT / "docs" / "cluster-figures.md"


@line(
    "cluster.3",
    title="LoRAServe's, TOPPINGS' and dLoRA's clusters by the modelled executor: their systems in order",
    bound="as printed: LoRAServe's rate within the SLO, and its P95 TTFT at that rate, no worse than TOPPINGS' and "
    "S-LoRA's random and contiguous, TOPPINGS' rate in production no less than S-LoRA's; under TOPPINGS' scheduler at "
    "least as many requests within the limit on TPT as under dLoRA's, random and first fit, and mean TPT in the "
    "simulation in that order; dLoRA's rate within the limit no less than PEFT's and vLLM's, and its mean TTFT and "
    "latency per token no more than those of proactive dispatch alone, these no more than round robin's; every ratio "
    "beside the printed one, in docs/cluster-figures.md",
)
def run(runs: StoredRuns) -> Result:
    """Run all cases and write the page."""
    with two_processes() as pool:
        parts = (("loraserve", loraserve), ("toppings", toppings), ("dlora", dlora))
        found = {name: part.measure(runs, pool) for name, part in parts}
    PAGE.write_text(cluster_page(found))
    wrong = out_of_order(found)
    return Result(
        figure=figures(found),
        passed=not any(wrong.values()),
        cause="; ".join(f"{name}: {each}" for name, some in wrong.items() for each in some),
        notes=f"profiles {loraserve.PROFILE}, {toppings_cases.SEVEN_B} (see modes.6) and {dlora.PROFILE}; page: "
        "docs/cluster-figures.md",
        details=found,
    )


def out_of_order(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return by paper where its systems do not come in the order that it prints, in words."""
    return {
        "LoRAServe": loraserve.out_of_order(found["loraserve"]),
        "TOPPINGS": toppings.out_of_order(found["toppings"]),
        "dLoRA": dlora.out_of_order(found["dlora"]),
    }


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios that the papers print, each with the printed one."""
    made, schedulers, replicas = found["loraserve"], found["toppings"], found["dlora"]
    rates = {row: max(ratio(made, mix, row) for mix in loraserve.MIXES) for row in loraserve.ROWS[1:]}
    tail = max(tail_ratio(made, mix, row) for mix in loraserve.MIXES for row in loraserve.ROWS[1:])
    gains = {
        place: toppings.attained(schedulers, place, toppings.OURS, "loaded")
        - toppings.attained(schedulers, place, toppings.DLORA, "loaded")
        for place in paper.TOPPINGS_GAINS
    }
    tpt = {row: mean_of(schedulers["runs"][toppings.SIMULATION][row], "tpt_mean_s") for row in toppings.ROWS}
    peaks, waits = replicas["peaks"], {row: mean_of(made, "ttft_mean_s") for row, made in replicas["runs"].items()}
    return {
        **{
            f"LoRAServe's rate ÷ {row}'s, largest": f"{each:.2f} (paper {paper.LORASERVE_RATE[row]:g})"
            for row, each in rates.items()
        },
        "P95 TTFT ÷ LoRAServe's, largest": f"{tail:.1f} (paper {paper.LORASERVE_TTFT:g})",
        "adapters on a server, TOPPINGS ÷ LoRAServe, largest": (
            f"{storage(made):.1f} (paper {paper.LORASERVE_STORAGE:g})"
        ),
        **{
            f"TOPPINGS' attainment over dLoRA's at {place}": f"{each:+.1%} (paper {paper.TOPPINGS_GAINS[place]:+.0%})"
            for place, each in gains.items()
        },
        **{
            f"TOPPINGS' mean TPT less than {row}'s by": f"{1 - tpt[toppings.OURS] / tpt[row]:.0%} (paper {printed:.0%})"
            for row, printed in paper.TOPPINGS_TPT.items()
        },
        **{
            f"dLoRA's rate ÷ {row}'s": f"{peaks[dlora.OURS] / (peaks[row] or dlora.RATES[0]):.1f} (paper {printed:g})"
            for row, printed in paper.DLORA_RATE.items()
        },
        **{
            f"mean TTFT of {row} ÷ dLoRA's": f"{waits[row] / waits[dlora.OURS]:.2f} (paper {printed:g})"
            for row, printed in paper.DLORA_QUEUEING.items()
        },
    }
