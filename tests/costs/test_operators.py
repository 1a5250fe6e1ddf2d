"""Composed profiles return the medians that they were made of, and interpolate between them."""

import statistics
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import pytest

from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile, profile_names, token_curve
from lorikeet.costs.devices import DEVICES, MODELS, Device, Model
from lorikeet.costs.model import CostModel, StepWork
from lorikeet.costs.operators import all_reduce_medians, operator_rows
from lorikeet.costs.profile import Curve

ANYTHING = load_profile(profile_names()[0])
TABLES = [
    (device, model, degree)
    for device in DEVICES.values()
    if device.measured == device.name
    for model in MODELS.values()
    if model.measured == model.name
    for degree in (1, 2, 4, 8)
]


def step_s(curve: Curve, tokens: int) -> float:
    """Return what the cost model says of a step with nothing but the curve in it."""
    profile = msgspec.structs.replace(ANYTHING, step=msgspec.structs.replace(ANYTHING.step, tokens=curve))
    return CostModel(profile, KernelForm.UNPADDED).step_s(StepWork(tokens, 0, 0, 0, 0, 0, None))


def measured(device: Device, model: Model, degree: int) -> Iterator[tuple[int, float]]:
    """Add up each measurement again: every operator once a layer, all-reduce twice, the embedding once."""
    medians = all_reduce_medians(device.name, degree)
    for row in operator_rows(device.name, model.name):
        if row.tensor_parallel == degree:
            layer_s = sum(row.seconds.values()) - row.seconds["emb"]
            if degree > 1:
                layer_s += 2 * reduce_s(medians, row.tokens * model.hidden * 2, degree, device)
            yield row.tokens, model.geometry.layers * layer_s + row.seconds["emb"]


def reduce_s(medians: Mapping[int, float] | None, size: int, workers: int, device: Device) -> float:
    """Return an all-reduce: measured, or where it was not the data sheet's ring."""
    if medians is None:
        return size * 2 * (workers - 1) / workers / device.peer_bytes_per_s
    return float(np.interp(size, list(medians), list(medians.values())))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "model", "degree"), TABLES, ids=lambda each: getattr(each, "name", each))
def test_every_measured_step_is_returned_within_three_percent(device: Device, model: Model, degree: int) -> None:
    curve = token_curve(device, model, degree)
    rows = list(measured(device, model, degree))
    assert rows
    # The largest error of a returned row is half the difference between two measurements of one size.
    assert max(abs(step_s(curve, tokens) / seconds - 1) for tokens, seconds in rows) <= 0.03


@pytest.mark.slow
def test_points_that_are_left_out_are_interpolated() -> None:
    errors = []
    for table in TABLES:
        curve = token_curve(*table)
        for index, (tokens, seconds) in enumerate(curve.points):
            others = msgspec.structs.replace(curve, points=curve.points[:index] + curve.points[index + 1 :])
            errors.append(abs(step_s(others, tokens) / seconds - 1))
    assert statistics.median(errors) <= 0.02
    assert float(np.quantile(errors, 0.95)) <= 0.10
