import msgspec
import pytest

from benchmarks.accept import costs_6
from benchmarks.accept.costs_6 import run
from benchmarks.accept.runs import StoredRuns
from lorikeet.costs.devices import Device, Model
from lorikeet.costs.hardware import token_curve
from lorikeet.costs.profile import Curve


def test_the_line_covers_every_measured_device_model_and_degree() -> None:
    result = run(StoredRuns("costs.6", code="t"))
    assert len(result.details["tables"]) == 3 * 2 * 4
    assert result.passed, result.cause


def test_the_line_fails_where_a_profile_strays_from_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def strayed(device: Device, model: Model, degree: int) -> Curve:
        curve = token_curve(device, model, degree)
        return msgspec.structs.replace(curve, points=tuple((tokens, s * 1.04) for tokens, s in curve.points))

    monkeypatch.setattr(costs_6, "token_curve", strayed)
    result = run(StoredRuns("costs.6", code="t"))
    assert not result.passed
    assert result.cause.startswith("returned")
