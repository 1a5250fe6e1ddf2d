"""Clients and engines under random faults on a virtual clock; see ``tests.support.fault_simulation``."""

import pytest

from tests.support.fault_simulation import describe, run_schedules, simulate

SCHEDULES, ALL_SCHEDULES = 80, 5_000
KINDS = {"kill", "stop", "lose", "repeat", "delay", "stall", "drop", "replace", "move", "fill_disk", "resize"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_is_lost_no_token_repeated_and_no_block_leaked(request: pytest.FixtureRequest) -> None:
    summary = run_schedules(range(ALL_SCHEDULES if request.config.getoption("--all") else SCHEDULES))
    assert not summary.bad, "\n".join(describe(outcome) for outcome in summary.bad)
    assert summary.faults.keys() == KINDS
    assert summary.ends["length"] > summary.requests / 2


@pytest.mark.slow
def test_seed_determines_all_that_happens() -> None:
    assert simulate(0).trace == simulate(0).trace != simulate(1).trace
