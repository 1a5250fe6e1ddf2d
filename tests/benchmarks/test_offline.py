import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.offline import app
from benchmarks.offline_backends import OfflineResult
from benchmarks.offline_bench import OfflineOptions, PairResult, offline_report
from lorikeet import SPIN_COUNT
from lorikeet.profiling.machine_limits import Ceilings, MachineLimits

runner = CliRunner(env={"COLUMNS": "200", "GOMP_SPINCOUNT": "300000"})


def test_beside_peft_the_process_starts_again_with_libgomps_own_spin_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedAgainError(Exception):
        pass

    def start_again(program: str, arguments: list[str]) -> None:
        assert (program, arguments[:3]) == (sys.executable, [sys.executable, "-m", "benchmarks.offline"])
        raise StartedAgainError(os.environ["GOMP_SPINCOUNT"])

    monkeypatch.setattr(os, "execv", start_again)
    ours = CliRunner(env={"GOMP_SPINCOUNT": SPIN_COUNT})
    result = ours.invoke(app, ["--peer", "vllm,peft"])
    assert isinstance(result.exception, StartedAgainError)
    assert str(result.exception) == "300000"


LIMITS = MachineLimits(2, 10.0, {1: 10.0, 512: 100.0})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[OfflineOptions]:
    """Replace the run by one of two seconds beside peers of four; return what was asked for."""
    seen: list[OfflineOptions] = []

    def run(options: OfflineOptions, progress: object) -> dict[str, Any]:
        seen.append(options)
        names = ["lorikeet", *options.peers]
        outcomes = {name: OfflineResult(2.0 if name == "lorikeet" else 4.0, [[1]], 30.0) for name in names}
        report = offline_report([PairResult(outcomes, LIMITS, Ceilings(60, 60, 50, 100))], names, (40, 120))
        setup = {"model": "m", "requests": 4, "prompt_tokens": 20, "output_tokens": 10, "adapters": options.adapters}
        return report | {"setup": setup | {"dtype": "bfloat16", "pairs": 1}, "versions": {"torch": "2"}}

    monkeypatch.setattr("benchmarks.offline.run_offline", run)
    return seen


def test_the_table_has_a_line_for_each_side_and_the_limit(
    asked: list[OfflineOptions], model_folder: Path, tmp_path: Path
) -> None:
    arguments = f"--model {model_folder} --adapters 0 --peer peft,vllm --plot {tmp_path}/p.svg".split()
    arguments += ["--vllm-python", sys.executable]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert asked[0].peers == ("peft", "vllm")
    assert asked[0].adapters == 0
    rows = [line.replace("│", " ").split() for line in result.stdout.splitlines() if line.startswith("│")]
    assert rows == [
        ["lorikeet", "20.0", "60.0", "40%"],
        ["peft", "10.0", "30.0", "20%", "2.00×"],
        ["vllm", "10.0", "30.0", "20%", "2.00×"],
        ["limit", "50.0", "100.0", "100%"],
    ]
    assert "4 × (20 + 10 tokens), base model" in result.stdout
    assert "decode alone: 30.0 of 60.0 tok/s (50%)" in result.stdout
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_peers_can_be_named_one_by_one_and_the_result_be_json(asked: list[OfflineOptions], model_folder: Path) -> None:
    result = runner.invoke(
        app,
        [
            "--model",
            str(model_folder),
            *f"--peer vllm --peer peft --json - --vllm-python {sys.executable}".split(),
        ],
    )
    assert asked[0].peers == ("vllm", "peft")
    assert json.loads(result.stdout)["peers"].keys() == {"vllm", "peft"}


def test_an_unknown_peer_ends_the_command_before_anything_runs(asked: list[OfflineOptions]) -> None:
    assert runner.invoke(app, ["--peer", "tgi"]).exit_code == 2
    assert not asked


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--model", "/no/such/folder", "no such folder"),
        ("--preset", "x", "unknown preset"),
        ("--dtype", "int4", "int4"),
    ],
)
def test_unknown_model_preset_or_dtype_ends_with_one_line(flag: str, value: str, reason: str) -> None:
    result = runner.invoke(app, [flag, value])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code != 0
    assert reason in result.output
    assert "Traceback" not in result.output
