"""``docs/memory-rows.md``, made from what memory.5 has modelled."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.accept import elora_figures as paper
from benchmarks.accept import memory_large as large
from benchmarks.accept.memory_common import LOAD, OURS, S_LORA, STATIC
from benchmarks.accept.status import table_row

_HEAD = """\
# Rows of the memory

Made by `make accept LINE=memory.5`, at the revision in [status.md](status.md); do not edit.
Everything here is **modelled**: the engine's own loop, memory and
policies on a virtual clock, by a [profile](profiles.md). What was measured live is in [status.md](status.md), memory.3,
memory.4, memory.6 and memory.8."""

AS_FAST = (
    "each live run of memory.4 is modelled on a machine as fast as it was during that run, the profile with all times "
    "longer by as much as its recorded steps were on the whole"
)

_OFF = """\
Both sides: {words}. Machines drift, and near a row's peak a little drift is much TTFT: {as_fast}. One column has the
ratios by the profiles as they were."""

_ROWS = """\
At {low:.2f} requests/s ({load:.0%} of {s_lora}'s peak) and, where a column says so, at {high:.2f} ({load:.0%} of
elora's, above the peaks of some). Hit rates are of adapters, and of the KV that a cache which forgets nothing would
have found, on the device on arrival. The adapters change o, too, so that no row of TOPPINGS assists a prefill here:
these rows wait for adapters like others. The paper's ratios are means over its own workloads, models and loads; they
stand there for their order."""

_SPLIT = """\
{static} with another share of the device for adapters. The paper's oracle, the best of these for each of its cases, has
{oracle.ttft:.2f} × ELORA's TTFT and {oracle.tpot:.2f} × its TPOT ({oracle.where})."""

_LARGE = """\
Profile `{profile}` for the paper's Llama3-70B on eight H800; adapters of ranks {ranks} on all seven modules, a host
tier of {host:.0f} GB, {duration:.0f} s of requests made like the paper's three services ([workloads.md](workloads.md):
its texts are not used, and lengths are ours). Peak: the highest rate with a mean TTFT below {slo:g} s. Reductions: mean
over {loads} of elora's peak, where the paper has ten rates and three models."""


def memory_page(
    words: str,
    rates: tuple[float, float],
    checks: Sequence[Mapping[str, Any]],
    rows: Mapping[str, Mapping[str, Any]],
    splits: Mapping[float, Mapping[str, Any]],
    cases: Sequence[Mapping[str, Any]],
) -> str:
    """Return the page.

    Args:
        words: what was run on what.
        rates: the lower and the higher load.
        checks: modelled beside live ratios.
        rows: figures by row, ``low`` and ``high``.
        splits: the same by the share of a static split.
        cases: of the large setting.
    """
    ours = rows[OURS]
    low, high = rates
    ranks = " and ".join(map(str, large.RANKS))
    loads = " and ".join(f"{load:.0%}" for load in large.LOADS)
    parts = (
        _HEAD,
        "## How far the model is off",
        _OFF.format(words=words, as_fast=AS_FAST),
        _checks(checks),
        "## All rows on that workload",
        _ROWS.format(low=low, high=high, load=LOAD, s_lora=S_LORA),
        _rows(rows, ours),
        "## The best static split",
        _SPLIT.format(static=STATIC, oracle=paper.ORACLE),
        _splits(splits, ours),
        "## ELORA's 70B setting",
        _LARGE.format(
            profile=large.PROFILE,
            ranks=ranks,
            host=large.HOST_BYTES / 1e9,
            duration=large.DURATION_S,
            slo=large.SLO_S,
            loads=loads,
        ),
        _cases(cases),
    )
    return "\n\n".join(parts) + "\n"


def reduction(case: Mapping[str, Any], rival: str, name: str) -> float:
    """Return (rival - elora) / rival, averaged over the loads as the paper does."""
    pairs = zip(case["loads"][OURS], case["loads"][rival], strict=True)
    return fmean(1 - ours[name] / theirs[name] for ours, theirs in pairs)


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    return _table(
        ("ratio of elora to", "live", "modelled", "error", "as profiled", "live → modelled, ms"),
        (
            (
                check["what"],
                f"{check['live']:.3f}",
                f"{check['modelled']:.3f}",
                f"{check['error']:+.1%}",
                f"{check['as_profiled']:.3f}",
                ", ".join(
                    f"{row} {live * 1e3:.1f} → {model * 1e3:.1f}" for row, (live, model) in check["seconds"].items()
                ),
            )
            for check in checks
        ),
    )


def _rows(rows: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Any]) -> str:
    headings = (
        *("row", "TTFT, ms", "P95", "÷ elora", "÷ elora, high load", "paper", "TPOT, ms", "÷ elora", "paper"),
        *("adapter hits", "KV hits", "invalid KV", "to device, MiB", "to host, MiB"),
    )
    return _table(headings, (_row_cells(row, found, ours) for row, found in rows.items()))


def _row_cells(row: str, found: Mapping[str, Any], ours: Mapping[str, Any]) -> Sequence[str]:
    low, high, printed = found["low"], found["high"], paper.ROWS.get(row)
    transfers = low["transfers"]
    into = sum(each["bytes"] for name, each in transfers.items() if name.endswith("-device"))
    out = transfers.get("device-host", {"bytes": 0})["bytes"]
    return (
        row,
        _ms(low["ttft_mean_s"]),
        _ms(low["ttft_p95_s"]),
        _times(low, ours["low"], "ttft_mean_s"),
        _times(high, ours["high"], "ttft_mean_s"),
        f"{printed.ttft:.2f} ({printed.where})" if printed else "",
        _ms(low["tpot_mean_s"]),
        _times(low, ours["low"], "tpot_mean_s"),
        f"{printed.tpot:.2f}" if printed else "",
        _share(low["adapter_hit_rate"]),
        _share(low["kv_hit_rate"]),
        _share(low["invalid_kv_share"]) + (f" (paper {paper.INVALID_KV[row]:.0%})" if row in paper.INVALID_KV else ""),
        f"{into / 2**20:,.0f}",
        f"{out / 2**20:,.0f}",
    )


def _splits(splits: Mapping[float, Mapping[str, Any]], ours: Mapping[str, Any]) -> str:
    return _table(
        ("share", "TTFT, ms", "÷ elora", "TPOT, ms", "÷ elora", "failed"),
        (
            (
                f"{share:g}",
                _ms(found["low"]["ttft_mean_s"]),
                _times(found["low"], ours["low"], "ttft_mean_s"),
                _ms(found["low"]["tpot_mean_s"]),
                _times(found["low"], ours["low"], "tpot_mean_s"),
                str(found["low"]["requests"] - found["low"]["completed"]),
            )
            for share, found in splits.items()
        ),
    )


def _cases(cases: Sequence[Mapping[str, Any]]) -> str:
    headings = (
        *("service", "adapters", "rival", "TTFT less by", "paper", "TPOT less by", "paper"),
        *("peak, /s", "rival's", "higher by", "paper", "rival's invalid KV"),
    )
    return _table(headings, (_case_cells(case, rival) for case in cases for rival in paper.RIVALS))


def _case_cells(case: Mapping[str, Any], rival: str) -> Sequence[str]:
    printed, scenario = paper.RIVALS[rival], case["scenario"]
    ours, theirs = case["peaks"][OURS], case["peaks"][rival]
    return (
        scenario,
        str(case["adapters"]),
        rival,
        f"{reduction(case, rival, 'ttft_mean_s'):.0%}",
        f"{printed.ttft_reduction[scenario]:.0%}",
        f"{reduction(case, rival, 'tpot_mean_s'):.0%}",
        f"{printed.tpot_reduction:.0%}",
        "none" if ours is None else f"{ours:.1f}",
        "none" if theirs is None else f"{theirs:.1f}",
        "" if ours is None or theirs is None else f"{ours / theirs - 1:.0%}",
        f"{printed.peak_increase:.0%}",
        _share(case["loads"][rival][-1]["invalid_kv_share"]),
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = "|---|" + "---:|" * (len(headings) - 1) + "\n"
    return (table_row(headings) + ruler + "".join(map(table_row, rows))).rstrip("\n")


def _times(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    return "" if ours[name] is None else f"{ours[name] / theirs[name]:.2f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
