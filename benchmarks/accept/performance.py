"""``docs/performance.md``, made from the files of the lines ``fast.*``, and of ``cuda.3`` where there was a GPU."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accept.machine import machine_words
from benchmarks.accept.offline import describe_limits, describe_versions, interval_words
from benchmarks.accept.runs import STATUS
from benchmarks.accept.status import table_row

_HEAD = """\
# Performance

Made by `make status` from the files of the lines `fast.*` and `cuda.3` in `docs/status/`; do not edit. Each figure is
what one run measured; all lines with their bounds, met or not, are in [status.md](status.md).

## How it is measured

* All sides of a comparison run in turns (A B C, C B A, …), at least five times each after a warm-up, on the same
  prompts, dtype and cores, one at a time. Ratios are medians of the ratios of the turns, with the 95 % bootstrap
  interval of that median; speeds are medians. How peers are run at their best:
  [the decision](decisions/offline-comparison.md).
* The limit is what this machine could do at most, measured in the same minutes: one stream reads base and adapter once
  per token at the memory's bandwidth; a batch multiplies at the rate that torch reaches with as many rows; a prompt at
  the rate of 512 rows. Attention, norms, sampling and caches are free in it
  ([bench/ceilings.py](../src/lorikeet/bench/ceilings.py)). Bandwidth, too, is what torch reads with, from more memory
  than a cache holds: who finds weights in a cache, or is faster than torch, can pass the limit.
* The model is SmolLM2-135M-Instruct in bfloat16; adapters are on q, k, v and o; answers are greedy and of fixed length.
"""

_PEERS = {"peft": "transformers + PEFT", "vllm": "vLLM CPU", "vllm-base": "vLLM CPU without adapters"}


def write_performance(folder: Path = STATUS) -> Path:
    """Make the page beside ``folder`` from the files in it and return its path."""
    paths = sorted(folder.glob("fast.*.json"), key=lambda path: int(path.stem.split(".")[1]))
    records = [json.loads(path.read_text()) for path in paths]
    throughput = _details(records, "throughput")
    parts = [
        _HEAD,
        *(["## Throughput", _throughput(throughput)] if throughput else []),
        *_adapters(_details(records, "lora"), _details(records, "overhead")),
        *_gpu(folder / "cuda.3.json"),
        *(["## Where and when", _conditions(records)] if records else []),
    ]
    path = folder.parent / "performance.md"
    path.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n")
    return path


def _details(records: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for record in records for row in record.get("details", {}).get(kind, [])]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = "|---|" + "---:|" * (len(headings) - 1) + "\n"
    return table_row(headings) + ruler + "".join(map(table_row, rows))


def _throughput(rows: Sequence[dict[str, Any]]) -> str:
    peers = [name for name in _PEERS if any(name in row["peers"] for row in rows)]
    headings = ["work", "unit", "Lorikeet", *(_PEERS[name] for name in peers), "limit", "Lorikeet's share of the limit"]
    table = _table(
        headings,
        (
            [
                row["work"],
                row["unit"],
                f"**{row['lorikeet']:.0f}**",
                *(_peer(row["peers"].get(name)) for name in peers),
                f"{row['limit']:.0f}",
                f"{row['share']:.0%}",
            ]
            for row in rows
        ),
    )
    return f"{table}\nBeside each peer: how many times as fast Lorikeet is, with the interval.\n"


def _peer(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ""
    return f"{figures['tok_s']:.0f} ({figures['ratio']:.2f} ×; {interval_words(figures['interval'])})"


def _adapters(kernel: Sequence[dict[str, Any]], overhead: Sequence[dict[str, Any]]) -> list[str]:
    """The two tables of fast.4, if it has been measured."""
    if not kernel:
        return []
    return [
        "## What adapters cost",
        "Output tokens per second beside the base model's, in the same engine and in turns:",
        _table(
            ["distinct adapters", "work", "base", "with adapters", "lost"],
            (
                [
                    str(row["adapters"]),
                    row["work"],
                    f"{row['base_tok_s']:.0f}",
                    f"{row['tok_s']:.0f}",
                    f"{row['lost']:.1%} ({row['interval'][0]:.1%} to {row['interval'][1]:.1%})",
                ]
                for row in overhead
            ),
        ),
        "What adapters add to the time of a decode step, beside the least that the machine allows: the longer of "
        "reading each\nadapter once and multiplying its rows.",
        _table(
            ["distinct adapters", "rows", "added", "the least", "ratio", "whole step"],
            (
                [
                    str(row["adapters"]),
                    str(row["rows"]),
                    f"{row['lora_ms']:.2f} ms",
                    f"{row['limit_ms']:.2f} ms",
                    f"{row['times_limit']:.2f} ({row['interval']})",
                    f"{row['step_ms']:.1f} ms",
                ]
                for row in kernel
            ),
        ),
    ]


def _gpu(path: Path) -> list[str]:
    """The figures of cuda.3, if they have been measured."""
    record = json.loads(path.read_text()) if path.is_file() else {}
    if not isinstance(figures := record.get("figure"), dict):
        return []
    is_known = "software" in record["details"].get("limits", {})
    versions = "" if is_known else "Versions of torch and Triton were not kept. "
    return [
        "## On a GPU",
        f"{record['notes']}. {versions}`{record['command']}`, {record['date']}, revision `{record['revision']}`; what "
        "is not met stands in [status.md](status.md).",
        _table(["what", "figure"], ([name, str(words)] for name, words in figures.items())),
    ]


def _conditions(records: Sequence[dict[str, Any]]) -> str:
    """One item for each line: machine, revision, date, and for each of its measurements command, versions and rates."""
    items = []
    for record in records:
        items.append(
            f"* [{record['line']}](status/{record['line']}.json), `{record['command']}`: {record['date']}, revision "
            f"`{record['revision']}`, {machine_words(record['machine'])}\n"
        )
        for row in record.get("details", {}).get("throughput", []):
            versions = f"; {describe_versions(row['versions'])}" if row["versions"] else ""
            items.append(f"  * {row['work']}: `{row['command']}`; {describe_limits(row['limits'])}{versions}\n")
    return "".join(items)
