"""``docs/chameleon.md``, made from what admission.4 has modelled."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np

from benchmarks.accept import admission_cases as cases
from benchmarks.accept import chameleon_figures as paper
from benchmarks.accept.admission_common import FIFO, OURS, PROFILE, WORDS_OF_KNEE, azure_lengths
from benchmarks.accept.status import table_row
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.devices import DEVICES

Runs = Mapping[str, Mapping[str, Any]]

_HEAD = """\
# Chameleon's setting

Made by `make accept LINE=admission.4`, at the revision in [status.md](status.md); do not edit.
Everything here is **modelled**: the engine's own loop, memory and
policies on a virtual clock, by a [profile](profiles.md). What was measured live is in [status.md](status.md),
admission.3."""

_SETTING = """\
{words}.

The knee lies at **{knee:.2f} requests/s**: {knee_words}. The paper's S-LoRA begins to miss its limit at about {printed}
requests/s. With the trace's lengths no A40 comes near: the products with the layers' weights alone are
{needed:.0f} TFLOP/s then, and the card's data sheet has {flops:.0f}. The paper does not say whether it
shortened them. So loads here are shares of our knee, as its {loads} requests/s are of its own."""

_LATENCY = """\
At high load the queue grows for as long as the run goes on, so the reduction depends on its length: {minutes:.0f}
minutes of two workloads, {high:,} requests; at the others {requests:,} requests. "Less" is beside {fifo}."""

_THROUGHPUT = """\
The highest rate at which P99 TTFT of {requests:,} requests is within {slo:.2f} s, {times} × the mean of {fifo} at
{unloaded:.0%} of the knee. The paper does not print its limit."""

_RANKS = """\
P99 TTFT in seconds at medium load, by rank; "less" is of all requests together, beside {fifo}. The cache is
{no_scheduler} with Chameleon's eviction, and the two rows after it with others; `-full` and {ours} have the queues,
too. The paper does not say which it means. At rank 128 Chameleon's eviction is printed as {largest:.0%} below equal
weights; here it is {found:.0%} below with FIFO, {found_full:.0%} with the queues. Prefetching by a histogram of
arrivals takes {prefetch:.1%} off {ours} (paper {printed:.1%}); {accuracy} of what it brought was used (paper: above
{printed_accuracy:.0%})."""

_ACCURACY = """\
At high load, by how often the predictor is right; P99 TTFT of those who arrived in each five minutes shows where it
matters. The paper prints no numbers: no loss from 100 % to 80 %, and 60 % hurts under a spike, more so where the
predicted output is all that counts."""

_SCHEDULERS = """\
At high load. `sjf` is µServe's order, shortest predicted answer first, with adapters as S-LoRA has them; the paper
prints no numbers of it."""

_ORDER = """\
At high load the four systems serve as much per second: the last answer ends {first:,.0f} to {last:,.0f} s after the
first arrival, with arrivals over {arrivals:,.0f} s. Adapters are copied beside the steps, and a copy takes little of
TTFT (below, one by one), so the cache does not make the steps fewer; the paper's S-LoRA gains {cache:g} × from it.
With as much served per second the backlog is the same, and an order only chooses whom it delays. Were no first token
later than some time, all that is left when arrivals end would have arrived within that time: nobody's longest wait can
be much below FIFO's, and P99 can only where less than 1 % of the requests carry most of the backlog. Shortest first
shows it: P95 is {sjf[95]} s beside FIFO's {fifo[95]} s, P99 {sjf[99]} s beside {fifo[99]} s. Chameleon's queues all
admit at every step, and each has its part of the backlog: P95 {ours[95]} s, P99 {ours[99]} s."""

_READINGS = """\
The same with what the paper leaves open taken otherwise ([why](decisions/chameleon-queues.md)). "Sent back" is the
share of requests that were squashed (paper: at most {squashed:.0%}), "bypassed" of those that passed another one,
"joined" of those that came before others since their adapter was in use."""

_UNLOADED = """\
The median request of the trace alone ({input} + {output} tokens), TTFT in ms: of the base model, with its adapter on
the device, and with its adapter on the host. The paper prints for rank 128 that loading and computing take about
{share:.0%} of TTFT, and that loading takes at most {load:.1%}."""

_PCIE = """\
Under {fifo} at {load:.0%} of the knee, {most} adapters of rank {rank} move {times:,.0f} × as many bytes to the device
as one does (paper: {printed} ×, at a load that it does not print)."""


def admission_page(words: str, knee: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        words: what was run on what.
        knee: its rate, and the growth at every rate that was tried.
        found: all parts; see ``admission_4.measure``.
    """
    runs, slo, unloaded = found["runs"], found["slo"], found["unloaded"]
    high = sum(each["requests"] for each in cases.of(runs, cases.part(FIFO, "high")))
    loads = ", ".join(f"{load.per_s:g}" for load in paper.LOADS.values())
    pcie = [runs[f"pcie-{adapters}"]["to_device_bytes"] for adapters in cases.PCIE_ADAPTERS]
    prefetch = cases.of(runs, cases.part(cases.PREFETCH, "medium"))[0]["prefetch_accuracy"]
    parts = (
        _HEAD,
        "## Setting",
        _SETTING.format(
            words=words[0].upper() + words[1:],
            knee=knee["rate"],
            knee_words=WORDS_OF_KNEE,
            printed=paper.KNEE_RPS,
            needed=_needed_flops(paper.KNEE_RPS) / 1e12,
            flops=DEVICES["a40"].flops / 1e12,
            loads=loads,
        ),
        _table(("requests/s", "growth"), ((rate, f"{each:+.1%}") for rate, each in knee["growth"].items())),
        "## Latency",
        _LATENCY.format(minutes=cases.HIGH_S / 60, high=high, requests=cases.REQUESTS, fifo=FIFO),
        _latency(runs),
        f"P99 TBT is printed as below {paper.TBT_S * 1e3:.0f} ms for both systems at all loads.",
        "## Throughput under a limit",
        _THROUGHPUT.format(
            requests=cases.REQUESTS,
            slo=slo["slo_s"],
            times=cases.SLO_TIMES,
            fifo=FIFO,
            unloaded=cases.UNLOADED,
        ),
        _throughput(found["peaks"]),
        "## Ranks, eviction and prefetching",
        _RANKS.format(
            fifo=FIFO,
            ours=OURS,
            no_scheduler=cases.NO_SCHEDULER,
            largest=paper.LARGEST_RANK_REDUCTION,
            found=_largest_rank(runs, cases.NO_SCHEDULER, "chameleon:fairshare"),
            found_full=_largest_rank(runs, OURS, "chameleon:fairshare-full"),
            prefetch=cases.reduction(runs, cases.PREFETCH, "medium", 99, OURS),
            printed=paper.PREFETCH_REDUCTION,
            accuracy="nothing" if prefetch is None else f"{prefetch:.0%}",
            printed_accuracy=paper.PREFETCH_ACCURACY,
        ),
        _ranks(runs),
        "## Accuracy of the predictor",
        _ACCURACY,
        _over_time(runs, {f"{row}, {accuracy:.0%}": (row, accuracy) for row, accuracy in cases.PREDICTED}),
        "## Other schedulers",
        _SCHEDULERS,
        _over_time(runs, {row: (row, cases.ACCURACY) for row in (FIFO, *cases.SCHEDULERS, OURS)}),
        "## Why P99 is as high",
        _order(runs),
        "## Other readings",
        _READINGS.format(squashed=paper.SQUASHED),
        _readings(runs),
        "## One by one",
        _UNLOADED.format(
            input=cases.MEDIAN[0], output=cases.MEDIAN[1], share=paper.ADAPTER_SHARE, load=paper.LOAD_SHARE
        ),
        _alone(unloaded),
        _PCIE.format(
            fifo=FIFO,
            load=cases.PCIE_LOAD,
            most=cases.PCIE_ADAPTERS[1],
            rank=cases.PCIE_RANK,
            times=pcie[1] / pcie[0],
            printed=paper.PCIE_TIMES,
        ),
        "## Not modelled",
        "Printed, and not made here:",
        "\n".join(f"* {text}" for text in paper.NOT_MODELLED),
    )
    return "\n\n".join(map(_wrapped, "\n\n".join(parts).split("\n\n"))) + "\n"


def _wrapped(part: str) -> str:
    """Return a paragraph with lines of about one length; others as they are."""
    return part if part[0] in "#|*" else fill(part, 120, break_on_hyphens=False)


def _needed_flops(rate: float) -> float:
    """Operations per second of the products with the weights of all layers: two for a weight and token."""
    geometry = load_profile(PROFILE).geometry
    weights = geometry.layers * sum(shape.in_features * shape.out_features for shape in geometry.modules.values())
    return 2 * weights * rate * fmean(each.input_tokens + each.output_tokens for each in azure_lengths())


def _latency(runs: Runs) -> str:
    headings = ("load", "row", "P50 TTFT, s", "less", "paper", "P99 TTFT, s", "less", "paper", "P99 TBT, ms", "hits")
    rows = []
    for load, printed in paper.LOADS.items():
        for row in cases.SYSTEMS:
            both = {50: printed.p50_reduction, 99: printed.p99_reduction}
            cells = [f"{load} ({cases.LOADS[load]:.2f})", row]
            for percent, reduction in both.items():
                cells.append(_seconds(cases.percentile(runs, cases.part(row, load), percent)))
                cells.append("" if row == FIFO else f"{cases.reduction(runs, row, load, percent):.0%}")
                cells.append(f"{reduction:.1%}" if row == OURS else "")
            made = cases.of(runs, cases.part(row, load))
            tbt_s = max(each["tbt_p99_s"] for each in made)
            hits = np.mean([each["adapter_hit_rate"] for each in made])
            rows.append([*cells, f"{tbt_s * 1e3:.0f}", f"{hits:.0%}"])
    return _table(headings, rows)


def _throughput(peaks: Mapping[str, Mapping[str, Any]]) -> str:
    return _table(
        ("row", "requests/s", f"÷ {FIFO}", "paper"),
        (
            (
                row,
                f"{peaks[row]['rate']:.2f}",
                f"{peaks[row]['rate'] / peaks[FIFO]['rate']:.2f}",
                f"{paper.THROUGHPUT[row]:g}" if row in paper.THROUGHPUT else "",
            )
            for row in cases.SYSTEMS
        ),
    )


def _ranks(runs: Runs) -> str:
    rows = (FIFO, cases.NO_SCHEDULER, *cases.CACHES[:2], OURS, *cases.CACHES[2:], cases.PREFETCH, cases.NO_CACHE)
    made = {row: cases.of(runs, cases.part(row, "medium"))[0] for row in rows}
    ranks = list(made[FIFO]["rank_p99_s"])
    return _table(
        ("row", *(f"rank {rank}" for rank in ranks), "all", "less", "paper", "hits"),
        (
            (
                row,
                *(_seconds(found["rank_p99_s"][rank]) for rank in ranks),
                _seconds(found["ttft_p99_s"]),
                "" if row == FIFO else f"{cases.reduction(runs, row, 'medium', 99):.0%}",
                f"{paper.EVICTION[row]:.0%}" if row in paper.EVICTION else "",
                f"{found['adapter_hit_rate']:.0%}",
            )
            for row, found in made.items()
        ),
    )


def _largest_rank(runs: Runs, row: str, rival: str) -> float:
    ours, theirs = (cases.of(runs, cases.part(each, "medium"))[0]["rank_p99_s"] for each in (row, rival))
    largest = list(ours)[-1]
    return float(1 - ours[largest] / theirs[largest])


def _over_time(runs: Runs, shown: Mapping[str, tuple[str, float]]) -> str:
    """P50 and P99 over all, and P99 by five minutes of the first workload."""
    series = {
        title: cases.of(runs, cases.part(row, "high", accuracy))[0]["over_time_p99_s"]
        for title, (row, accuracy) in shown.items()
    }
    minutes = [f"from {5 * place} min" for place in range(max(map(len, series.values())))]
    return _table(
        ("row", "P50 TTFT, s", "P99", *minutes),
        (
            (
                title,
                *(_seconds(cases.percentile(runs, cases.part(*_of(shown[title])), percent)) for percent in (50, 99)),
                *(_seconds(each) for each in times),
            )
            for title, times in series.items()
        ),
    )


def _of(shown: tuple[str, float]) -> tuple[str, str, float]:
    row, accuracy = shown
    return row, "high", accuracy


def _order(runs: Runs) -> str:
    parts = {name: cases.part(row, "high") for name, row in (("fifo", FIFO), ("sjf", cases.SJF), ("ours", OURS))}
    first, last = last_answers_s(runs)
    return _ORDER.format(
        first=first,
        last=last,
        arrivals=max(each["duration_s"] for each in cases.of(runs, parts["fifo"])),
        cache=paper.THROUGHPUT[cases.NO_SCHEDULER],
        **{
            name: {percent: _seconds(cases.percentile(runs, each, percent)) for percent in (95, 99)}
            for name, each in parts.items()
        },
    )


def last_answers_s(runs: Runs) -> tuple[float, float]:
    """Return when the last answer has ended at high load: of the system that is first done, and of the last one.

    Seconds from the start of a workload, the longer of them. All serve the same requests, so one that serves more per
    second is done earlier.
    """
    ends = [max(each["drained_s"] for each in cases.of(runs, cases.part(row, "high"))) for row in cases.SYSTEMS]
    return min(ends), max(ends)


def _readings(runs: Runs) -> str:
    rows = []
    for row in (OURS, *cases.READINGS):
        name = cases.part(row, "high")
        made = cases.of(runs, name)
        requests = sum(each["requests"] for each in made)
        counts = {key: sum(each["queue"][key] for each in made) for key in ("squashed", "bypassed", "joined")}
        rows.append(
            (
                row.rpartition("=")[2],
                _seconds(cases.percentile(runs, name, 50)),
                _seconds(cases.percentile(runs, name, 99)),
                f"{cases.reduction(runs, row, 'high', 99):.0%}",
                ", ".join(str(len(each["queue"]["quota_tokens"])) for each in made),
                f"{counts['squashed'] / requests:.2%}",
                f"{counts['bypassed'] / requests:.2%}",
                f"{counts['joined'] / requests:.1%}",
                str(sum(each["preempted"] for each in made) - counts["squashed"]),
            )
        )
    counted = ("sent back", "bypassed", "joined", "preempted")
    return _table(("admission", "P50 TTFT, s", "P99", "less", "classes at the end", *counted), rows)


def _alone(unloaded: Mapping[str, Mapping[str, float]]) -> str:
    return _table(
        ("rank", "base", "adapter there", "adapter on the host", "loading and computing", "loading"),
        (
            (
                rank,
                *(f"{found[name] * 1e3:.1f}" for name in ("base_s", "warm_s", "cold_s")),
                f"{1 - found['base_s'] / found['cold_s']:.1%}",
                f"{1 - found['warm_s'] / found['cold_s']:.1%}",
            )
            for rank, found in unloaded.items()
        ),
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = "|---|" + "---:|" * (len(headings) - 1) + "\n"
    return (table_row(headings) + ruler + "".join(map(table_row, rows))).rstrip("\n")


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
