"""Condense Vidur's profiling tables into the medians that ``lorikeet.costs`` carries.

``python -m benchmarks.vidur_tables OUT vidur_a40_Llama-2-7b-hf_mlp.csv … vidur_a100_dgx_all_reduce.csv …``

The source's times are milliseconds; the carried ones are microseconds, with every digit of the source. Rows keep
their number: a token count that was measured twice stays twice.
"""

import argparse
import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lorikeet.costs.operators import EMBEDDING, OPERATORS_OF_A_LAYER

OPERATORS = (EMBEDDING, *OPERATORS_OF_A_LAYER)
Row = Mapping[str, str]


def condense(path: Path) -> tuple[str, list[str]]:
    """Return the name of the carried file and its lines for one of the source's.

    Raises:
        ValueError: the file is of neither kind.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if match := re.fullmatch(r"vidur_(\w+?)_(Llama-2-\w+)-hf_mlp", path.stem):
        gpu, model = match.groups()
        return f"{gpu}_{model.lower()}.csv", _operator_lines(rows)
    if match := re.fullmatch(r"vidur_(\w+?)_dgx_all_reduce", path.stem):
        return f"{match[1]}_all_reduce.csv", _all_reduce_lines(rows)
    raise ValueError(f"{path.name} is neither an mlp nor an all_reduce table")


def _operator_lines(rows: Iterable[Row]) -> list[str]:
    keys = ("num_tensor_parallel_workers", "num_tokens")
    body = _table(rows, keys, [f"time_stats.{operator}.median" for operator in OPERATORS])
    return [",".join(("tensor_parallel", "tokens", *OPERATORS)), *body]


def _all_reduce_lines(rows: Iterable[Row]) -> list[str]:
    """Return collectives inside one node: those whose workers all share it."""
    inside = (row for row in rows if row["num_workers"] == row["devices_per_node"])
    return ["workers,bytes,all_reduce", *_table(inside, ("num_workers", "size"), ["time_stats.all_reduce.median"])]


def _table(rows: Iterable[Row], keys: tuple[str, str], columns: list[str]) -> Iterator[str]:
    ordered = sorted(rows, key=lambda row: tuple(int(row[key]) for key in keys))
    for row in ordered:
        times_us = (f"{round(float(row[column]) * 1e3, 3):g}" for column in columns)
        yield ",".join((*(row[key] for key in keys), *times_us))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder of the condensed files")
    parser.add_argument("tables", type=Path, nargs="+", help="CSV files of the source")
    options = parser.parse_args()
    for path in options.tables:
        name, lines = condense(path)
        (options.out / name).write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines) - 1} rows")


if __name__ == "__main__":
    main()
