"""What the host adds to a GPU's time, with a model of two layers."""

from itertools import pairwise

import pytest

from benchmarks import gpu_host
from benchmarks.accept import memory_8
from benchmarks.gpu_host import TimedDevice, measure_idle, measure_load, timed_rig
from lorikeet.bench.model_shapes import MODEL_SHAPES
from tests.bench.test_accept_cuda import LOADS, SMALL


def test_loads_and_idle_times_are_those_of_a_device_that_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_SHAPES, "small", SMALL)
    for name, value in LOADS.items():
        monkeypatch.setattr(memory_8, name, value)
    for name, size in (("RANK", 8), ("_DEVICE_BYTES", 2**24), ("_HOST_BYTES", 2**23)):
        monkeypatch.setattr(gpu_host, name, size)
    link_bytes_per_s = 1e6
    device = TimedDevice(0.001, 0.002, link_bytes_per_s)
    with timed_rig(device, shape="small") as rig:
        load = measure_load(rig, link_bytes_per_s, loads=2)
        idle = measure_idle(rig, device, requests=4)
    assert 1.0 < load["link_ms"] <= load["load_ms"]
    assert 0.0 < idle["idle_share"] < 1.0
    assert 0 < idle["gaps"] < len(device.steps.work)
    assert all(ended_s <= begins_s for (_, ended_s), (begins_s, _) in pairwise(device.steps.work))
