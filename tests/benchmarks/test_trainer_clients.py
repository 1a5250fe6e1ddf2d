"""The clients of SkyRL, prime-rl's renderers and ART's launcher, unchanged, against the base and an adapter."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.clients import trainers
from benchmarks.clients.__main__ import run
from benchmarks.harness import ROOT, RunningServer, running_server
from lorikeet.models.default import NAME

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    scratch = tmp_path_factory.mktemp("server")
    flags = ["--dtype", "float32", "--adapter-dir", str(ROOT / "examples" / "adapters"), "--max-model-len", "2048"]
    flags += ["--memory", "300MiB", "--store-dir", str(scratch / "store")]
    with running_server(flags, Path(scratch, "log")) as running:
        yield running


@pytest.mark.parametrize("model", [NAME, "pirate"])
@pytest.mark.parametrize("client", ["skyrl", "renderers", "art"])
def test_client_of_a_trainer_passes_its_checks(server: RunningServer, client: str, model: str) -> None:
    if trainers.python(client, install=os.environ.get("REQUIRE_ALL") == "1") is None:
        pytest.skip(f"{client} is not installed: run python -m benchmarks.clients {client} once")
    outcomes = run(client, server.url, model)
    assert outcomes
    assert not [f"{check}: {error}" for check, error in outcomes.items() if error]
