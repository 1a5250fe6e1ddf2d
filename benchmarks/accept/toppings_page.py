"""``docs/toppings.md``, made from what modes.6 has modelled."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.accept import toppings_cases as cases
from benchmarks.accept import toppings_figures as paper
from benchmarks.accept.pages import page, table

Found = Mapping[str, Mapping[str, Any]]

_HEAD = """\
# TOPPINGS' setting

Made by `make accept LINE=modes.6`, at the revision in [status.md](status.md); do not edit.
Everything here is **modelled**: the engine's own loop, memory and
policies on a virtual clock, by a [profile](profiles.md). What was measured live is in [status.md](status.md):
there host workers assist beside an x86-64 CPU; beside a GPU they have run, but not been timed."""

_SETTING = """\
Profiles {composed} and {seventy}: adapters as TOPPINGS prints them where it does, and a host that adds what it prints
({cores} cores, {core_tokens} tokens for each). A step of the 7B model takes {once:.0f} ms and {token:.0f} µs for each
token, which is the line through the paper's prefills of 256 and 1,000 tokens (44 and 90 ms, Fig. 4): on its engine a
step takes about three times what the device needs. *S3 composed* is with the profile's own steps. {requests:,} requests
of Poisson arrivals, prompts of the log-normal distribution whose 90th and 99th percentiles are the printed 256 and
1,000 tokens, answers of exponential length with a mean of {answer} tokens (none is printed), adapters on q, k and v. In
S1 to S6 each request has the next adapter in turn, so that few are asked for while they are there; in the MAF settings
they are as popular as Azure's functions. Device memory is unlimited, as CACHED's is.

The paper prints neither its link nor how long a load takes. Cold starts take {share:.0%} of its serving time at
{rate} requests/s of rank 64 (2.3): if every request had one, a load would take {load:.0f} ms, and that is
{link:.1f} GB/s. With PCI Express 4.0 by its data sheet it would take {sheet:.1f} ms."""

_TABLE = """\
Means over requests, from arrival; increases are over `cached`, the paper's beside them. TPT is latency ÷ output tokens.
`dlora` has all adapters loaded before it begins; the paper's runs out of memory with 512 adapters, and in S6."""

_SHEET = """\
S3 over PCI Express 4.0 by its data sheet. A load is short then beside a prefill, and there is little to hide."""

_ABLATIONS = """\
S3 with one thing changed: `auto` waits where that is sooner; `one-group` loads without pipelining; `static` waits for
all layers but the first group's; `fewer-cores` gives each core four times the tokens (the paper's reduced CPU)."""

_RATIOS = "S-LoRA's means over TOPPINGS', where the paper prints these:"


def toppings_page(found: Found) -> str:
    """Return the page; ``found`` are the figures of all cases by their names."""
    seven = cases.printed_steps()
    (few, few_s), *_, (many, many_s) = seven.step.tokens.points
    host = seven.host_lora
    assert host is not None
    assert seven.transfers.host_to_device is not None
    return page(
        _HEAD,
        "## Setting",
        _SETTING.format(
            composed=cases.COMPOSED,
            once=1e3 * few_s,
            token=1e6 * (many_s - few_s) / (many - few),
            seventy=cases.SEVENTY_B,
            cores=host.cores,
            core_tokens=host.core_tokens,
            requests=cases.REQUESTS,
            answer=cases.ANSWER_MEAN,
            share=paper.INTERRUPTED_SHARE,
            rate=paper.INTERRUPTED_PER_S,
            load=1e3 * paper.INTERRUPTED_SHARE / paper.INTERRUPTED_PER_S,
            link=cases.LINK_BYTES_PER_S / 1e9,
            sheet=1e3 * paper.INTERRUPTED_BYTES / seven.transfers.host_to_device.bandwidth.value,
        ),
        "## All settings",
        _TABLE,
        _comparison(found, cases.SETTINGS, "printed"),
        _RATIOS,
        _ratios(found),
        "## The data sheet's link",
        _SHEET,
        _comparison(found, ["S3"], "data sheet", (*cases.ROWS, *cases.ABLATIONS)),
        _comparison(found, [cases.COMPOSED_S3], "data sheet"),
        "## Ablations",
        _ABLATIONS,
        _comparison(found, ["S3"], "printed", (cases.CACHED, cases.OURS, *cases.ABLATIONS, cases.ON_DEMAND)),
        f"The strawman's TTFT is printed as up to {paper.STRAWMAN.ttft:g} × CACHED's and its TPT as up to "
        f"{paper.STRAWMAN.tpt:g} ×, in a setting that is not. A prefill without pipelining is printed as "
        + " and ".join(f"{ratio:g} × as long at rank {rank}" for rank, ratio in paper.PIPELINE.items())
        + ", at a length that is not.",
        "## Not modelled",
        "Printed, and not made here:",
        "\n".join(f"* {text}" for text in paper.NOT_MODELLED),
    )


def _comparison(found: Found, settings: Iterable[str], link: str, rows: tuple[str, ...] = cases.ROWS) -> str:
    lines = []
    for setting in settings:
        for row in rows:
            made = found[cases.Case(setting, link, row).name]
            ours = cases.increases(found, setting, row, link)
            printed = paper.INCREASES.get(setting, {}).get(row, paper.Increase(None, None, None))
            cells = [setting, row]
            for key, mine, theirs in zip(("ttft_mean_s", "tpt_mean_s", "e2e_mean_s"), ours, printed, strict=True):
                unit = 1 if key == "e2e_mean_s" else 1e3
                cells += [
                    f"{made[key] * unit:.1f}",
                    "" if row == cases.CACHED else f"{mine:+.0%}",
                    "" if theirs is None else f"{theirs:+.0%}",
                ]
            lines.append([*cells, f"{made['assisted_steps'] / made['requests']:.0%}"])
    heads = ("TTFT, ms", "more", "paper", "TPT, ms", "more", "paper", "latency, s", "more", "paper")
    return table(("setting", "row", *heads, "assisted steps ÷ requests"), lines)


def _ratios(found: Found) -> str:
    rows = []
    for setting, printed in paper.SPEEDUPS.items():
        s_lora, ours = (found[cases.Case(setting, "printed", row).name] for row in ("toppings:s-lora", cases.OURS))
        for key, theirs in zip(("ttft_mean_s", "tpt_mean_s", "e2e_mean_s"), printed, strict=True):
            rows.append((setting, key.split("_")[0], f"{s_lora[key] / ours[key]:.2f}", f"{theirs:g}"))
    return table(("setting", "mean", "here", "paper"), rows)
