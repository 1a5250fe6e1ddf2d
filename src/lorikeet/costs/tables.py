"""The measured tables that the package carries: medians from Vidur (``data/README.md`` says what they are)."""

import csv
import statistics
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

OPERATORS_OF_A_LAYER = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
"""Operators that each token passes on every layer, attention and collectives apart."""

EMBEDDING = "emb"
"""The operator that each token passes once."""

SOURCE = "Vidur's profiling tables (MIT), medians"

_TABLE_NAMES = {"a40": "a40", "a100-80": "a100", "h100": "h100"}


class OperatorRow(NamedTuple):
    """One measurement.

    Attributes:
        tensor_parallel: ranks that share the operators.
        tokens: that they worked on.
        seconds: median by operator.
    """

    tensor_parallel: int
    tokens: int
    seconds: Mapping[str, float]


@cache
def operator_rows(device: str, model: str) -> tuple[OperatorRow, ...]:
    """Return all measurements of a device and a model, ascending; token counts may repeat."""
    rows = _read(f"{_TABLE_NAMES[device]}_{model}.csv")
    operators = (EMBEDDING, *OPERATORS_OF_A_LAYER)
    return tuple(
        OperatorRow(
            int(row["tensor_parallel"]),
            int(row["tokens"]),
            {operator: float(row[operator]) * 1e-6 for operator in operators},
        )
        for row in rows
    )


@cache
def operator_medians(device: str, model: str, tensor_parallel: int) -> Mapping[int, Mapping[str, float]]:
    """Return seconds by token count and operator; of a count measured twice the middle of both."""
    by_tokens: dict[int, list[Mapping[str, float]]] = {}
    for row in operator_rows(device, model):
        if row.tensor_parallel == tensor_parallel:
            by_tokens.setdefault(row.tokens, []).append(row.seconds)
    return {
        tokens: {operator: statistics.median(row[operator] for row in rows) for operator in rows[0]}
        for tokens, rows in sorted(by_tokens.items())
    }


@cache
def all_reduce_medians(device: str, workers: int) -> Mapping[int, float] | None:
    """Return seconds of an all-reduce inside one node by bytes, ascending; None where it was not measured."""
    name = f"{_TABLE_NAMES[device]}_all_reduce.csv"
    if not _path(name).is_file():
        return None
    by_bytes: dict[int, list[float]] = {}
    for row in _read(name):
        if int(row["workers"]) == workers:
            by_bytes.setdefault(int(row["bytes"]), []).append(float(row["all_reduce"]) * 1e-6)
    return {size: statistics.median(seconds) for size, seconds in sorted(by_bytes.items())}


def _path(name: str) -> Traversable:
    return files("lorikeet.costs") / "data" / name


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(_path(name).read_text(encoding="utf-8").splitlines()))
