"""Time by the limits of a device: the larger of bytes over bandwidth and operations over peak.

It carries measured operators from one device to another, and stands in where nothing was measured.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lorikeet.core.geometry import ModuleShape
from lorikeet.costs.devices import Device, Model
from lorikeet.costs.tables import operator_medians


class Shares(NamedTuple):
    """What a measured GEMM reaches of its device's limits.

    Attributes:
        bandwidth: of memory bandwidth, at one token.
        flops: of the peak, at the most tokens measured.
    """

    bandwidth: float
    flops: float


LIMITS = Shares(1.0, 1.0)
"""All that the data sheets promise."""


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
    """Return bytes that a bf16 product moves at least: weights, input and output once."""
    elements = shape.in_features * shape.out_features + tokens * (shape.in_features + shape.out_features)
    return 2.0 * elements


def gemm_operations(shape: ModuleShape, tokens: int) -> float:
    """Return multiplications and additions of a product."""
    return 2.0 * tokens * shape.in_features * shape.out_features


def gemm_s(device: Device, shape: ModuleShape, tokens: int, shares: Shares) -> float:
    """Return the time of a product at ``shares`` of the device's limits."""
    return max(
        gemm_bytes(shape, tokens) / (device.bandwidth_bytes_per_s * shares.bandwidth),
        gemm_operations(shape, tokens) / (device.flops * shares.flops),
    )


def measured_shares(device: Device, model: Model, tensor_parallel: int) -> Shares:
    """Return what the largest product of a layer reaches on a device with tables of its own."""
    shape = gemms(model, tensor_parallel)["mlp_up_proj"]
    medians = operator_medians(device.name, model.name, tensor_parallel)
    fewest, most = min(medians), max(medians)
    return Shares(
        gemm_bytes(shape, fewest) / medians[fewest]["mlp_up_proj"] / device.bandwidth_bytes_per_s,
        gemm_operations(shape, most) / medians[most]["mlp_up_proj"] / device.flops,
    )


def operator_ratio(device: Device, measured: Device, shape: ModuleShape | None, tokens: int) -> float:
    """Return by how much an operator is slower on ``device`` than on ``measured``.

    Args:
        device: where nobody measured.
        measured: where the operator was measured.
        shape: of a product; None for operators that only move their data.
        tokens: that it works on.
    """
    if shape is None:
        return measured.bandwidth_bytes_per_s / device.bandwidth_bytes_per_s
    return gemm_s(device, shape, tokens, LIMITS) / gemm_s(measured, shape, tokens, LIMITS)
