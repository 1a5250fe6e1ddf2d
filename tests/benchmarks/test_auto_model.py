"""How often the model ``auto`` is the right one on forty tasks."""

import numpy as np
import pytest

from benchmarks import auto_model
from benchmarks.auto_model import TASKS, read_tasks, shares, similarities_by_words


def test_the_choice_is_right_for_at_least_85_of_100_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = read_tasks()
    assert (len(tasks.examples), len(tasks.near)) == (40, 20)
    examples = {text for each in tasks.examples.values() for text in each}
    assert not examples & {prompt for prompt, _ in tasks.prompts}
    development = read_tasks(TASKS.with_name("auto_model_dev.toml"))
    assert not development.examples.keys() & tasks.examples.keys()
    monkeypatch.setattr("sys.argv", ["auto_model"])
    auto_model.main()
    printed = capsys.readouterr().out
    assert "oracle" in printed
    nearest = auto_model.NearestExamples(tasks.examples)
    found = shares(tasks, [nearest.nearest(prompt).name for prompt, _ in tasks.prompts])
    assert found["all"] >= 0.85
    assert f"all {found['all']:6.1%}" in printed


def test_the_comparison_chooses_like_the_server() -> None:
    tasks = read_tasks(TASKS.with_name("auto_model_dev.toml"))
    nearest = auto_model.NearestExamples(tasks.examples)
    chosen = auto_model.choices(tasks, similarities_by_words(tasks))
    same = np.mean([nearest.nearest(p).name == each for (p, _), each in zip(tasks.prompts, chosen, strict=True)])
    assert same >= 0.97  # The server's thresholds count examples without a right choice, too.
