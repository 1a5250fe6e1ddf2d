"""``docs/dlora.md``, made from what modes.4 has modelled."""

from collections.abc import Mapping
from typing import Any

from benchmarks.accept import dlora_cases as cases
from benchmarks.accept import dlora_figures as paper
from benchmarks.accept.modes_phases import WORDS
from benchmarks.accept.pages import page, table
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile

Figures = Mapping[str, Any]

_HEAD = """\
# dLoRA's setting

Made by `make accept LINE=modes.4`, at the revision in [status.md](status.md); do not edit.
Everything here is **modelled**: the engine's own loop, memory and
policies on a virtual clock, by a [profile](profiles.md). What was measured live is in [status.md](status.md)."""

_SETTING = """\
Profile {profile} stands for an A800 of 80 GB (the same chip with slower links to others). Adapters of rank {rank} on q,
k, v and o. Their computation takes {share:.1%} of the base's, as printed, and the operations of each row with each
adapter. A switch takes {merge:.1f} ms, which is the time of reading and writing the weights; the paper prints none.
Prompts and answers are log-normal with ShareGPT's printed means of {input} and {output} tokens. All latencies are
dLoRA's: the sum over requests ÷ the sum of output tokens. The limit of {slo:.3f} s is ten decode steps of one sequence,
as the paper's {printed:g} s is on its own engine."""

_SKEW = """\
{adapters} adapters called like Azure's functions, {requests:,} requests in bursts (gaps with a variation of
{variation:g}), at the highest rate at which `dlora` keeps the limit, as the paper sets it.
Skew is its chunk: so many functions in turn belong to one adapter. The paper prints neither its rates nor its skews,
and of the ratios only the largest."""

_PHASES = """\
{words}. Each phase lasts {phase:.0f} s, at {load:.0%} of the highest rate at which `unmerged-only` keeps the limit
({rate:.2f}/s)."""


def dlora_page(found: Mapping[str, Any]) -> str:
    """Return the page; ``found`` is what ``dlora_cases.measure`` returned."""
    profile = load_profile(cases.PROFILE)
    assert profile.switching is not None
    assert KernelForm.EINSUM in profile.lora
    merge_s = profile.switching.merge.value + cases.RANK * profile.switching.merge_rank.value
    return page(
        _HEAD,
        "## Setting",
        _SETTING.format(
            profile=cases.PROFILE,
            rank=cases.RANK,
            share=paper.ADAPTER_SHARE,
            merge=1e3 * merge_s,
            input=cases.MEAN_TOKENS[0],
            output=cases.MEAN_TOKENS[1],
            slo=cases.slo_s(),
            printed=paper.SLO_S,
        ),
        "## Skew",
        _SKEW.format(adapters=cases.ADAPTERS, requests=cases.REQUESTS, variation=cases.VARIATION),
        _skews(found),
        "The largest ratios over all skews:",
        _largest(found["skews"]),
        f"Switches take at most {_switching(found):.1%} of the time under `dlora`; the paper prints that inference has "
        f"{paper.INFERENCE_SHARE:.1%} of the latency at least, the placement over replicas being the rest, too.",
        "## Phases",
        _PHASES.format(
            words=WORDS, phase=cases.PHASES.phase_s, load=cases.PHASE_LOAD, rate=found["peaks"]["phases"]["rate"]
        ),
        table(
            (*_HEADINGS, "first third", "second", "last"),
            (
                (
                    *_cells(row, made, found["phases"][cases.OURS]),
                    *(f"{latency_s:.3f}" for latency_s in made["thirds_latency_per_token_s"]),
                )
                for row, made in found["phases"].items()
            ),
        ),
        "## Not modelled",
        "Printed, and not made here:",
        "\n".join(f"* {text}" for text in paper.NOT_MODELLED),
    )


_HEADINGS = ("row", "latency, s/token", "÷ dlora", "P90", "÷ dlora", "TTFT, s", "merged", "switches", "switching")


def _cells(row: str, made: Figures, ours: Figures) -> list[str]:
    return [
        row,
        f"{made['latency_per_token_s']:.3f}",
        f"{made['latency_per_token_s'] / ours['latency_per_token_s']:.2f}",
        f"{made['tpt_p90_s']:.3f}",
        f"{made['tpt_p90_s'] / ours['tpt_p90_s']:.2f}",
        f"{made['ttft_mean_s']:.2f}",
        f"{made['merged_steps'] / made['steps']:.0%}",
        str(made["switches"]),
        f"{made['switch_s'] / made['drained_s']:.1%}",
    ]


def _skews(found: Mapping[str, Any]) -> str:
    lines = []
    for skew, made in found["skews"].items():
        about = f"{skew} ({cases.largest_share(int(skew)):.0%})"
        rate = f"{found['peaks'][skew]['rate']:.2f}"
        lines += [[about, rate, *_cells(row, each, made[cases.OURS])] for row, each in made.items()]
    return table(("skew (largest share)", "requests/s", *_HEADINGS), lines)


def _largest(skews: Mapping[str, Mapping[str, Figures]]) -> str:
    rows = []
    for row, printed in paper.RIVALS.items():
        mean, p90 = (
            max(made[row][key] / made[cases.OURS][key] for made in skews.values())
            for key in ("latency_per_token_s", "tpt_p90_s")
        )
        theirs = "" if printed.p90 is None else f"{printed.p90:g}"
        rows.append((row, f"{mean:.2f}", f"{printed.mean:g}", f"{p90:.2f}", theirs, printed.where))
    return table(("row", "latency ÷ dlora's", "paper", "P90 ÷ dlora's", "paper", "where"), rows)


def _switching(found: Mapping[str, Any]) -> float:
    runs = [made[cases.OURS] for made in (*found["skews"].values(), found["phases"])]
    return max(made["switch_s"] / made["drained_s"] for made in runs)
