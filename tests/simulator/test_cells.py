"""Clusters in cells: the content of each cell, and a cell simulated like a cluster of its own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.costs.profile import write_profile
from lorikeet.simulator.cells import cut_into_cells
from lorikeet.simulator.scenario import ScenarioError, make_scenario
from lorikeet.simulator.study import run_scenario
from lorikeet.workloads.workload import WorkloadRequest
from tests.support.profiles import round_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The round profile as a file."""
    file = tmp_path / "round.toml"
    write_profile(round_profile(), file)
    return str(file)


def asks(*adapters: str | None, conversation: str | None = None) -> list[WorkloadRequest]:
    return [WorkloadRequest(at / 10, name, 8, 2, conversation=conversation) for at, name in enumerate(adapters)]


def test_adapters_are_placed_by_their_demand() -> None:
    cells = cut_into_cells(asks("a", "a", "a", "b", "b", "c", "c", "d"), ["a", "b", "c", "d"], 2)
    assert cells.adapters == [["a", "d"], ["b", "c"]]
    assert cells.requests == [[0, 1, 2, 7], [3, 4, 5, 6]]


def test_adapters_without_requests_are_spread_by_number() -> None:
    cells = cut_into_cells(asks("a", "b"), [*"abcdef"], 2)
    assert [len(names) for names in cells.adapters] == [3, 3]


def test_a_popular_adapter_is_in_several_cells_and_the_base_in_all() -> None:
    cells = cut_into_cells(asks("a", "a", "a", "a", "b", None, None, None), ["a", "b"], 3)
    assert ["a" in names for names in cells.adapters].count(True) == 2
    served = [{place for place, of in enumerate(cells.requests) if at in of} for at in range(8)]
    assert all(len(each) == 1 for each in served)
    assert len(served[0] | served[1]) == 2
    assert len(served[5] | served[6] | served[7]) == 3


def test_a_conversation_stays_in_its_cell() -> None:
    workload = [*asks(*[None] * 6, conversation="x"), *asks(None)]
    assert cut_into_cells(workload, [], 2).requests == [[0, 1, 2, 3, 4, 5], [6]]


def test_every_cell_is_simulated_as_a_cluster_of_its_own(profile: str, tmp_path: Path) -> None:
    flags = ["simulate", "--profile", profile, "--replicas", "4", "--count", "40", "--rate", "30", "--adapters", "6"]
    report = tmp_path / "report.json"
    result = CliRunner().invoke(app, [*flags, "--ranks", "1,2", "--cells", "2", "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "2 cells, of" in result.output
    told = json.loads(report.read_bytes())
    assert told["figures"]["completed"] == 40
    assert told["figures"]["itl_s"]["count"] == sum(each["output_tokens"] - 1 for each in told["requests"])
    sent = [each["due_s"] for each in told["requests"]]
    assert sent == sorted(sent)
    replicas = told["cluster"]["replicas"]
    assert [each["replica"] for each in replicas] == [f"cell-{n}/replica-{m}" for n in range(2) for m in range(2)]
    assert sum(each["requests"] for each in replicas) == 40
    assert (told["cluster"]["adapters"], told["engine"]["total_blocks"]) == (6, 4 * 400)


def test_invalid_cells_are_refused(profile: str) -> None:
    asked = make_scenario(None, {"profile": profile, "count": 1, "replicas": 3, "cells": 2})
    with pytest.raises(ScenarioError, match="3 replicas cannot be cut into 2 equal cells"):
        run_scenario(asked, lambda stage, done, total: None)
    with pytest.raises(ScenarioError, match="not every cell would get a request"):
        cut_into_cells(asks("a"), ["a"], 2)
