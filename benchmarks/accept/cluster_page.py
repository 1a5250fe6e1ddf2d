"""``docs/cluster-figures.md``, made from what cluster.3 has modelled."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from benchmarks.accept import cluster_dlora as dlora
from benchmarks.accept import cluster_figures as paper
from benchmarks.accept import cluster_loraserve as loraserve
from benchmarks.accept import cluster_toppings as toppings
from benchmarks.accept import dlora_cases
from benchmarks.accept.cluster_runs import mean_of
from benchmarks.accept.pages import page, table

Found = Mapping[str, Any]

_HEAD = """\
# Clusters of three papers

Made by `make accept LINE=cluster.3`, at the revision in [status.md](status.md); do not edit.
Everything here is **modelled**: the dispatcher and the policies of a
live [cluster](cluster.md) over engines on a virtual clock, by a [profile](profiles.md). What was measured live is in
[status.md](status.md). Rows of one table have the same requests, and differ in the axes of the cluster alone, except
for dLoRA's last two. Where a paper prints *up to*, the largest of ours stands beside it."""

_LORASERVE = """\
{replicas} replicas by profile {profile}, which is scaled from the A100 of 80 GB: the paper has four servers of A100
with Llama-7B over four devices each, and prints neither which A100 nor the cost of ranks there (ours is
[carried over](profiles.md#adapters)). Requests are as long as Azure's conversations of 2023, for the paper's of 2024.
Operating points under a P95 TTFT of {limit:g} s are {points} tokens/s. Placements follow one another every 10 s, for
which the paper prints no value, and sooner at first. Runs take {duration:g} s, of which the first {since:g} do not
count.

*Uniform* and *shifting* (half of the requests of rank 128 at first, of rank 8 at last) have 25 adapters and Poisson
arrivals. *Production* stands for a trace that is not public: 100 adapters, each rank with as many requests (the paper's
mix is on a figure only), popularity within a rank by Zipf's law, arrivals as in Azure's trace, stretched."""

_RATES = """\
The highest rate at which the P95 TTFT is within {limit:g} s, to 7 %, and means of {seeds} workloads at that of
`loraserve`. `held` is the largest number of adapters on a replica, of the replica with the fewest and of that with the
most."""

_TRIED = "P95 TTFT at the rates that were tried on the way, in seconds by requests/s:"

_TOPPINGS = """\
The servers of [TOPPINGS' own setting](toppings.md), steps as long as it prints them, all with its assisted cold starts.
{servers} of them under Poisson arrivals for {duration:g} s, of which the first {since:g} do not count; 200 adapters
asked for alike, of ranks 8, 16, 32 and 64 (neither is printed). At most {running} requests in a step, since the paper
prints no bound for servers; first fit fills them up to {packed}, the most that it counts with. *Simulation* is a
quarter of its simulated cluster: 15 of 60 servers, 10,000 of 40,000 functions, 85 of 340 requests/s. The limit on TPT
(latency ÷ output tokens) is 1.5 × what the base model reaches without LoRA under the same load, or on an idle server:
the paper's words allow both. Policies are told the first.

`toppings:empty-free` is another reading of its equation 2, judged by nobody: a prefill of nobody takes no time, so the
first request of a queue is charged for a whole prefill and the second for its rank alone, and requests go where others
wait already. Our row takes the equation's fixed part for a prefill of nobody, and charges neither."""

_DLORA = """\
{replicas} replicas by profile {profile} (A800 in the paper: the same chip with slower links to others) and {adapters}
adapters of rank 8, half of its cluster for Llama-2-70B. {duration:g} s of requests as long as ShareGPT's on average,
called like Azure's functions in bursts (gaps with a variation of {variation:g}); the most popular adapter has
{share:.0%}. The limit of {slo:.3f} s per output token is ten decode steps of one sequence. Rates are good to 20 %. TTFT
stands for the queueing delay: a prefill is short beside it."""


def cluster_page(found: Found) -> str:
    """Return the page; ``found`` has what each part's ``measure`` returned, by its paper."""
    made, schedulers, replicas = found["loraserve"], found["toppings"], found["dlora"]
    return page(
        _HEAD,
        "## LoRAServe",
        _LORASERVE.format(
            replicas=loraserve.REPLICAS,
            profile=loraserve.PROFILE,
            limit=loraserve.LIMIT_S,
            points=", ".join(f"{load:,.0f} (rank {rank})" for rank, load in sorted(made["points"].items())),
            duration=loraserve.DURATION_S,
            since=loraserve.SINCE_S,
        ),
        _RATES.format(limit=loraserve.LIMIT_S, seeds=len(loraserve.SEEDS)),
        _loraserve(made),
        _loraserve_ratios(made),
        _TRIED,
        _tried(made),
        _scales(made),
        "## TOPPINGS' scheduler",
        _TOPPINGS.format(
            servers=toppings.PLACES["40/s"].servers,
            duration=toppings.DURATION_S,
            since=toppings.SINCE_S,
            running=toppings.MAX_RUNNING,
            packed=toppings.MAX_PACKED,
        ),
        _toppings(schedulers),
        _toppings_ratios(schedulers),
        "## dLoRA",
        _DLORA.format(
            replicas=dlora.REPLICAS,
            profile=dlora.PROFILE,
            adapters=dlora.ADAPTERS,
            duration=dlora.DURATION_S,
            variation=dlora_cases.VARIATION,
            share=dlora.largest_share(),
            slo=dlora.slo_s(),
        ),
        _dlora(replicas),
        _dlora_ratios(replicas),
        "## Not made",
        "\n".join(f"* {text}" for text in paper.NOT_MADE),
    )


def _loraserve(found: Found) -> str:
    lines = []
    for mix, row in product(loraserve.MIXES, loraserve.ROWS):
        runs = found["runs"][mix][row]
        held = [min(min(each["held_most"]) for each in runs), max(max(each["held_most"]) for each in runs)]
        lines.append(
            (
                f"{mix}, `{row}`",
                f"{loraserve.bears(found, mix, row):.1f}",
                f"{loraserve.tail_s(found, mix, row):.1f}",
                f"{1e3 * mean_of(runs, 'tbt_mean_s'):.1f}",
                f"{held[0]} to {held[1]}",
                f"{mean_of(runs, 'held_share'):.0%}",
                f"{mean_of(runs, 'fetches'):.0f}",
                f"{mean_of(runs, 'placements'):.0f}",
            )
        )
    heads = ("rate within the SLO, 1/s", "P95 TTFT, s", "TBT, ms", "held", "of full replication", "fetches")
    return table(("requests, row", *heads, "placements"), lines)


def _loraserve_ratios(found: Found) -> str:
    lines = []
    for row in loraserve.ROWS[1:]:
        rates = [ratio(found, mix, row) for mix in loraserve.MIXES]
        tails = [tail_ratio(found, mix, row) for mix in loraserve.MIXES]
        gaps = [_less(found["runs"][mix], loraserve.OURS, row, "tbt_mean_s") for mix in loraserve.MIXES]
        printed = f"up to {paper.LORASERVE_RATE[row]:g}"
        lines.append(
            (f"`{row}`", _span(rates), printed, _span(tails), f"up to {paper.LORASERVE_TTFT:g}", _percents(gaps))
        )
    heads = ("÷ its rate", "paper", "its P95 TTFT ÷ ours", "paper")
    return table(("over", *heads, f"TBT less by (paper up to {paper.LORASERVE_TBT:.0%})"), lines) + (
        f"\n\nA server of `{loraserve.TOPPINGS}` has up to {storage(found):.1f} times the adapters of one of "
        f"`{loraserve.OURS}` (production; paper up to {paper.LORASERVE_STORAGE:g})."
    )


def ratio(found: Found, mix: str, row: str) -> float:
    """Return LoRAServe's highest rate over that of a row; the row's counts as the lowest one tried if it has none."""
    return loraserve.bears(found, mix, loraserve.OURS) / (loraserve.bears(found, mix, row) or loraserve.RATES[0])


def tail_ratio(found: Found, mix: str, row: str) -> float:
    """Return a row's P95 TTFT over LoRAServe's, at LoRAServe's highest rate."""
    return loraserve.tail_s(found, mix, row) / loraserve.tail_s(found, mix, loraserve.OURS)


def storage(found: Found) -> float:
    """Return the adapters of a server under TOPPINGS over those of LoRAServe's server with the fewest."""
    rows = found["runs"][loraserve.PRODUCTION]
    fewest = min(min(each["held_most"]) for each in rows[loraserve.OURS])
    return float(max(max(each["held_most"]) for each in rows[loraserve.TOPPINGS]) / fewest)


def _tried(found: Found) -> str:
    lines = []
    for mix, row in product(loraserve.MIXES, loraserve.ROWS):
        tried = sorted(found["peaks"][mix][row]["tried"].items(), key=lambda each: float(each[0]))
        lines.append((f"{mix}, `{row}`", ", ".join(f"{rate}: {tail_s:.2f}" for rate, tail_s in tried)))
    return table(("requests, row", "P95 TTFT"), lines)


def _scales(found: Found) -> str:
    tails = [f"{each['ttft_p95_s']:.2f} s" for each in found["scales"]]
    rate = loraserve.bears(found, "uniform", loraserve.OURS)
    printed = ", ".join(f"{rate:g}/s on {servers}" for servers, rate in paper.LORASERVE_SCALE.items())
    here = ", ".join(
        f"{rate * scale:.1f}/s on {loraserve.REPLICAS * scale} with {tail}"
        for scale, tail in zip(loraserve.SCALES, tails, strict=True)
    )
    return f"Scaling, uniform, adapters in proportion: {here} (paper: about {printed} within {loraserve.LIMIT_S:g} s)."


def _toppings(found: Found) -> str:
    lines = []
    for place, row in product(toppings.PLACES, (*toppings.ROWS, toppings.OTHER_READING)):
        runs = found["runs"][place][row]
        lines.append(
            (
                f"{place}, `{row}`",
                *(f"{toppings.attained(found, place, row, limit):.1%}" for limit in ("loaded", "idle")),
                f"{1e3 * mean_of(runs, 'tpt_mean_s'):.1f}",
                f"{1e3 * mean_of(runs, 'tbt_mean_s'):.1f}",
                f"{1e3 * mean_of(runs, 'ttft_mean_s'):.0f}",
                f"{min(min(each['busy']) for each in runs):.0%} to {max(max(each['busy']) for each in runs):.0%}",
                f"{mean_of(runs, 'moves'):.0f}",
            )
        )
    limits = ", ".join(
        f"{1e3 * each['loaded']:.1f} ms at {place} ({1e3 * each['idle']:.1f} idle)"
        for place, each in found["limits"].items()
    )
    heads = ("within the limit", "within that of idle servers", "TPT, ms", "TBT, ms", "TTFT, ms", "busy", "moves")
    return f"Limits: {limits}.\n\n" + table(("load, row", *heads), lines)


def _toppings_ratios(found: Found) -> str:
    lines = []
    for row in toppings.ROWS[1:]:
        gains = []
        for place in ("30/s", "40/s", "50/s"):
            mine, theirs = (toppings.attained(found, place, each, "loaded") for each in (toppings.OURS, row))
            printed = paper.TOPPINGS_GAINS.get(place) if row == toppings.DLORA else None
            gains.append(
                f"{100 * (mine - theirs):+.0f}" + ("" if printed is None else f" (paper {100 * printed:+.0f})")
            )
        less = _less(found["runs"][toppings.SIMULATION], toppings.OURS, row, "tpt_mean_s")
        lines.append((f"`{row}`", *gains, f"{less:.0%} (paper {paper.TOPPINGS_TPT[row]:.0%})"))
    heads = ("points at 30/s", "at 40/s", "at 50/s", "mean TPT less by, simulation")
    best = max(toppings.attained(found, place, toppings.OURS, "loaded") for place in toppings.PLACES)
    said = f"`{toppings.OURS}` keeps the limit for up to {best:.0%} (paper up to {paper.TOPPINGS_ATTAINED:.0%})."
    return table(("over", *heads), lines) + f"\n\n{said}"


def _dlora(found: Found) -> str:
    lines = []
    for row in dlora.ROWS:
        runs = found["runs"][row]
        lines.append(
            (
                f"`{row}`",
                f"{found['peaks'][row]:.2f}" if row in dlora.SEARCHED else "",
                f"{mean_of(runs, 'latency_per_token_s'):.3f}",
                f"{mean_of(runs, 'ttft_mean_s'):.2f}",
                f"{min(min(each['busy']) for each in runs):.0%} to {max(max(each['busy']) for each in runs):.0%}",
                f"{mean_of(runs, 'held_share'):.0%}",
                f"{mean_of(runs, 'moves'):.0f}",
            )
        )
    heads = ("rate within the limit, 1/s", "latency at dLoRA's, s/token", "TTFT, s", "busy", "of full replication")
    return table(("row", *heads, "moves"), lines)


def _dlora_ratios(found: Found) -> str:
    peaks, runs = found["peaks"], found["runs"]
    lines = [
        (f"rate ÷ that of `{row}`", f"{peaks[dlora.OURS] / (peaks[row] or dlora.RATES[0]):.1f}", f"up to {printed:g}")
        for row, printed in paper.DLORA_RATE.items()
    ]
    mine = mean_of(runs[dlora.OURS], "ttft_mean_s")
    lines += [
        (f"TTFT of `{row}` ÷ dLoRA's", f"{mean_of(runs[row], 'ttft_mean_s') / mine:.2f}", f"{printed:g}")
        for row, printed in paper.DLORA_QUEUEING.items()
    ]
    return table(("", "here", "paper"), lines)


def _less(rows: Found, ours: str, theirs: str, key: str) -> float:
    return 1 - mean_of(rows[ours], key) / mean_of(rows[theirs], key)


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _percents(values: list[float]) -> str:
    return f"{min(values):.0%} to {max(values):.0%}"
