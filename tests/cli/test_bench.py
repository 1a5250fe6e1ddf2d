import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.models.config import read_model_config
from lorikeet.profiling.machine_limits import LimitMeter, MachineLimits

runner = CliRunner(env={"COLUMNS": "200"})

LIMITS = MachineLimits(2, 10.0, {1: 10.0, 512: 100.0})


def test_the_limits_of_a_model_are_printed_for_people_and_programs(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitMeter, "__init__", lambda self, dtype: None)
    monkeypatch.setattr(LimitMeter, "measure", lambda self: LIMITS)
    arguments = ["bench", "limits", "--model", str(model_folder), "--dtype", "float32", "--threads", "1"]
    report = json.loads(runner.invoke(app, [*arguments, "--json", "-"]).stdout)
    layers, head = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 128 * 32
    assert report["decode_tok_s"]["1"] == pytest.approx(10e9 / (4 * (layers + head)))
    assert report["prefill_tok_s"] == pytest.approx(100e9 / (2 * layers))
    assert "memory read: 10.0 GB/s" in runner.invoke(app, arguments).stdout


def test_published_shape_makes_a_dummy_model_and_overwrites_no_other_model(tmp_path: Path) -> None:
    folder = tmp_path / "shape"
    assert runner.invoke(app, ["bench", "shape", "qwen3-8b", str(folder)]).output.strip() == str(folder)
    assert read_model_config(folder).architecture == "Qwen3ForCausalLM"
    again = runner.invoke(app, ["bench", "shape", "llama-2-7b", str(folder)])
    assert (again.exit_code, "there is a model already" in again.output) == (2, True)
    unknown = runner.invoke(app, ["bench", "shape", "gpt", str(tmp_path)])
    assert (unknown.exit_code, "llama-3-8b" in unknown.output) == (2, True)
