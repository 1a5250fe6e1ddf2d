"""How fast the machine is, by the steps that engines take on it."""

import pytest

from benchmarks.accept.machine_speed import MachineSpeed
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.clock import VirtualClock
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.stretch import stretched
from lorikeet.engine.build import assemble
from lorikeet.engine.driver import InOrder, drive
from lorikeet.engine.modelled_build import build_modelled_executor
from lorikeet.rows import Row
from tests.support.scripted import request


def test_a_machine_whose_steps_take_longer_than_its_profile_says_is_as_much_slower() -> None:
    profile = load_profile("a40-llama-2-7b")
    settings = Settings(ModelSettings(), EngineSettings())
    speed = MachineSpeed(profile)
    assert (speed.rate(), speed.slower) == (1.0, 0.0)
    clock, row = VirtualClock(), Row()
    executor, sizes = build_modelled_executor(settings, stretched(profile, 1.25), row, clock, coalesced=False)
    engine = assemble(settings, executor, sizes, clock, speed.watch(settings.engine)).engine
    for _ in drive(engine, clock, InOrder([request("r", [1] * 300, max_tokens=50)])):
        pass
    assert speed.slower == pytest.approx(0.25, rel=0.02)
    assert speed.rate() == pytest.approx(0.8, rel=0.02)
