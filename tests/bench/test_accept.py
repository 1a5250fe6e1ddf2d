import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accept.lines import Line, Result, UnknownLineError, find_line
from benchmarks.accept.machine import revision
from benchmarks.accept.runs import StoredRuns, code_digest
from benchmarks.accept.serve_1 import newcomer_environment
from benchmarks.accept.server import ServerError, free_port, running_server
from benchmarks.accept.status import format_figure, write_result, write_status
from benchmarks.pip_bytes import sizes_bytes


def test_a_finished_part_is_not_measured_again(tmp_path: Path) -> None:
    calls = []

    def measure() -> dict[str, Any]:
        calls.append(1)
        return {"value": len(calls)}

    assert StoredRuns("t.1", tmp_path, "code").get("part", measure) == {"value": 1}
    assert StoredRuns("t.1", tmp_path, "code").get("part", measure) == {"value": 1}
    assert StoredRuns("t.2", tmp_path, "code").get("part", measure) == {"value": 2}


def test_a_part_measured_on_other_code_or_cleared_is_measured_again(tmp_path: Path) -> None:
    results = iter([{"v": 1}, {"v": 2}, {"v": 3}])
    assert StoredRuns("t.1", tmp_path, "old").get("part", lambda: next(results)) == {"v": 1}
    runs = StoredRuns("t.1", tmp_path, "new")
    assert runs.get("part", lambda: next(results)) == {"v": 2}
    runs.clear()
    assert runs.get("part", lambda: next(results)) == {"v": 3}


def test_the_code_digest_follows_sources_and_nothing_that_running_leaves_behind(tmp_path: Path) -> None:
    source = tmp_path / "src" / "a.py"
    source.parent.mkdir()
    source.write_text("x = 1")
    before = code_digest(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "status.md").write_text("t")
    (source.parent / "__pycache__").mkdir()
    (source.parent / "__pycache__" / "a.pyc").write_text("t")
    assert code_digest(tmp_path) == before
    source.write_text("x = 2")
    assert code_digest(tmp_path) != before


def test_a_revision_is_dirty_only_where_something_else_than_the_status_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True)

    status, source = tmp_path / "docs" / "status" / "t.1.json", tmp_path / "a.py"
    status.parent.mkdir(parents=True)
    status.write_text("1")
    source.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    status.write_text("2")
    assert not revision(tmp_path).endswith("-dirty")
    source.write_text("2")
    assert revision(tmp_path).endswith("-dirty")


def test_the_table_shows_each_line_in_order_with_its_cause(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    for number, passed in ((10, True), (2, False)):
        line = Line(f"t.{number}", f"title {number}", "≥ 1", lambda runs: Result(0, passed=True))
        result = Result({"ratio": 1.23456}, passed=passed, interval=(1.1, 1.4), cause="" if passed else "too slow")
        write_result(line, result, folder)
    text = write_status(folder).read_text()
    rows = [row for row in text.splitlines() if row.startswith("| [t.")]
    assert rows[0].startswith("| [t.2](status/t.2.json) | title 2 | ratio 1.235 (95 %: 1.1 to 1.4) | ≥ 1 | **no** |")
    assert rows[1].startswith("| [t.10]")
    assert "- **t.2**: too slow" in text
    record = json.loads((folder / "t.2.json").read_text())
    assert record["command"] == "make accept LINE=t.2"
    assert not record["pass"]
    assert {"cpu", "cores", "memory_gib", "os", "python", "torch"} == record["machine"].keys()


def test_figures_are_shown_to_four_digits_or_whole() -> None:
    assert format_figure({"a": 123456.789, "b": 0.00123456, "c": {"d": True}}) == "a 123,457, b 0.001235, c d True"


@pytest.mark.parametrize("name", ["serve", "serve.99", "serve/../x.1", "SERVE.1"])
def test_a_line_without_a_runner_is_named(name: str) -> None:
    with pytest.raises(UnknownLineError, match=name):
        find_line(name)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "benchmarks" / "accept").glob("serve_*.py")))
def test_every_runner_is_found_under_its_name(path: Path) -> None:
    name = path.stem.replace("_", ".")
    assert find_line(name).name == name


def test_pips_log_is_added_up_by_where_files_came_from(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"x" * 7)
    log = (
        f"Processing {wheel} (from b==1)\n  Downloading b-1-py3-none-any.whl.metadata (1.5 kB)\n"
        "Downloading b-1-py3-none-any.whl (2.0 MB)\n  Using cached c-1.whl (30 kB)\nProcessing ./.\n"
    )
    sizes = sizes_bytes(log)
    assert sum(sizes["downloaded"].values()) == 2_001_500
    assert sum(sizes["cached"].values()) == 30_000
    assert sum(sizes["local"].values()) == 7


def test_a_fresh_clone_sees_an_empty_home_and_nothing_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = tmp_path / "user" / ".config" / "pip" / "pip.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for name in ("PIP_CONFIG_FILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    dropped = {"VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "LINE", "HF_HOME", "XDG_RUNTIME_DIR"}
    for name in dropped:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}:/usr/bin")
    found = newcomer_environment(tmp_path)
    assert not dropped & found.keys()
    assert found["PATH"] == "/usr/bin"
    assert found["PIP_CONFIG_FILE"] == str(configuration)
    folders = ["HOME", "PIP_CACHE_DIR", *(name for name in found if name.startswith("XDG_"))]
    assert all(found[name].startswith(f"{tmp_path}/home") for name in folders)


def test_the_environment_of_a_server_is_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THIS_PROCESS", "x")
    log = tmp_path / "log"
    command = ("/usr/bin/env",)
    with pytest.raises(ServerError), running_server([], log, command=command, environment={"A": "b"}, port=free_port()):
        pass
    assert log.read_text() == "A=b\n"
