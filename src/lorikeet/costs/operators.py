"""Computes the times of a layer's operators, from the package's measured tables, the all-reduce and the roofline.

The tables hold medians from Vidur; see ``data/README.md``. The roofline is the larger of bytes over bandwidth and
operations over peak.
"""

import csv
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

import numpy as np

from lorikeet.core.geometry import ModuleShape
from lorikeet.costs.devices import DEVICES, MODELS, Device, Model

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
"""Operators that run for each token on every layer, without attention and collectives."""

EMBEDDING = "emb"
"""Operator that runs once for each token."""

SOURCE = "Vidur's profiling tables (MIT), medians"

_TABLE_NAMES = {"a40": "a40", "a100-80": "a100", "h100": "h100"}


class OperatorRow(NamedTuple):
    """One measurement.

    Attributes:
        tensor_parallel: ranks that share the operators.
        tokens: number of tokens.
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
    """Return the seconds by token count and operator. If a count was measured twice, the median is returned."""
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
    """Return the seconds of an all-reduce inside a node by bytes, ascending; None if it was not measured."""
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


def all_reduce(device: Device, workers: int) -> tuple[Callable[[int], float], str]:
    """Return the seconds of an all-reduce as a function of bytes, and their source.

    A measured table is interpolated linearly. On another device with the same kind of links, a message takes longer by
    the extra time of a ring's bytes, 2 (w - 1) / w of the message over each link, at the links' full rate. Without a
    table, the time is that of the ring alone.
    """
    medians = all_reduce_medians(device.measured, workers)
    if workers == 1:
        return lambda _: 0.0, "none"
    ring = 2 * (workers - 1) / workers
    if medians is None:
        ring_s = ring / device.peer_bytes_per_s
        return lambda size: ring_s * size, "all-reduce as a ring over PCI Express by data sheet, not measured"
    sizes = np.array(list(medians))
    seconds = np.array(list(medians.values()))
    slower_s = ring * (1 / device.peer_bytes_per_s - 1 / DEVICES[device.measured].peer_bytes_per_s)
    source = SOURCE if slower_s == 0 else f"{SOURCE} of {device.measured}, slower by what a ring on these links adds"
    return lambda size: float(np.interp(size, sizes, seconds)) + slower_s * size, f"all-reduce from {source}"


class RooflineShares(NamedTuple):
    """Holds the shares of the device's limits that a measured GEMM reaches.

    Attributes:
        bandwidth: share of memory bandwidth, at one token.
        flops: share of the peak, at the largest measured number of tokens.
    """

    bandwidth: float
    flops: float


LIMITS = RooflineShares(1.0, 1.0)
"""The full rates of the data sheets."""


def gemms(model: Model, tensor_parallel: int) -> Mapping[str, ModuleShape]:
    """Return the products of a layer as one rank computes them, by operator of the tables."""
    shapes = model.geometry.modules
    qkv = sum(shapes[name].out_features for name in ("q", "k", "v"))
    gate_up = shapes["gate"].out_features + shapes["up"].out_features
    return {
        "attn_pre_proj": ModuleShape(model.hidden, qkv // tensor_parallel),
        "attn_post_proj": ModuleShape(shapes["o"].in_features // tensor_parallel, model.hidden),
        "mlp_up_proj": ModuleShape(model.hidden, gate_up // tensor_parallel),
        "mlp_down_proj": ModuleShape(shapes["down"].in_features // tensor_parallel, model.hidden),
    }


def gemm_bytes(shape: ModuleShape, tokens: int) -> float:
    """Return the minimum number of bytes that a bf16 product moves: weights, input and output once."""
    elements = shape.in_features * shape.out_features + tokens * (shape.in_features + shape.out_features)
    return 2.0 * elements


def gemm_operations(shape: ModuleShape, tokens: int) -> float:
    """Return the number of multiplications and additions of a product."""
    return 2.0 * tokens * shape.in_features * shape.out_features


def gemm_s(device: Device, shape: ModuleShape, tokens: int, shares: RooflineShares) -> float:
    """Return the time of a product at ``shares`` of the device's limits."""
    return max(
        gemm_bytes(shape, tokens) / (device.bandwidth_bytes_per_s * shares.bandwidth),
        gemm_operations(shape, tokens) / (device.flops * shares.flops),
    )


def measured_shares(device: Device, model: Model, tensor_parallel: int) -> RooflineShares:
    """Return the shares that a layer's largest product reaches on a measured device.

    The product is that of a measured model.
    """
    measured = MODELS[model.measured]
    shape = gemms(measured, tensor_parallel)["mlp_up_proj"]
    medians = operator_medians(device.name, measured.name, tensor_parallel)
    fewest = min(medians)
    most = max(medians)
    return RooflineShares(
        gemm_bytes(shape, fewest) / medians[fewest]["mlp_up_proj"] / device.bandwidth_bytes_per_s,
        gemm_operations(shape, most) / medians[most]["mlp_up_proj"] / device.flops,
    )


def operator_ratio(device: Device, model: Model, tensor_parallel: int, operator: str, tokens: int) -> float:
    """Return the slowdown of an operator compared with the measured device, from the rooflines of both.

    Args:
        device: on which it runs.
        model: model of the operator.
        tensor_parallel: number of ranks.
        operator: name of the operator in the tables. An operator without a product moves the features of ``_MOVED``.
        tokens: number of tokens.
    """
    measured = DEVICES[device.measured]
    tables = MODELS[model.measured]
    shapes = gemms(model, tensor_parallel)
    known = gemms(tables, tensor_parallel)
    if operator in shapes:
        return gemm_s(device, shapes[operator], tokens, LIMITS) / gemm_s(measured, known[operator], tokens, LIMITS)
    bandwidths = measured.bandwidth_bytes_per_s / device.bandwidth_bytes_per_s
    product = _MOVED.get(operator)
    if product is None:
        return bandwidths * model.hidden / tables.hidden
    return bandwidths * shapes[product].out_features / known[product].out_features


_MOVED = {"attn_rope": "attn_pre_proj", "mlp_act": "mlp_up_proj"}
"""Products whose outputs an operator moves. The other operators move the residual stream."""
