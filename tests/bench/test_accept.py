import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.accept.fast_9 import ROWS, common_window
from benchmarks.accept.lines import NOT_RUN, Line, Result, UnknownLineError, find_line
from benchmarks.accept.performance import write_performance
from benchmarks.accept.runs import ROOT, STATUS, StoredRuns, code_digest, revision
from benchmarks.accept.serve_1 import newcomer_environment
from benchmarks.accept.server import ServerError, free_port, running_server
from benchmarks.accept.status import format_figure, write_result, write_status
from benchmarks.accept.stopwatch import AT_ONCE, Stopwatch
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


def test_a_part_of_another_machine_counts_only_where_that_is_said(tmp_path: Path) -> None:
    there = StoredRuns("t.1", tmp_path, "code", "another machine")
    assert StoredRuns("t.1", tmp_path, "code").get("part", lambda: {"v": 1}) == {"v": 1}
    assert there.stored("part") is None
    assert there.of_any_machine().stored("part") == {"v": 1}
    there.clear()
    assert there.of_any_machine().stored("part") == {"v": 1}, "it is not this machine's to forget"


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


def test_a_cause_is_one_line_that_does_not_tell_where_the_machine_keeps_its_files(tmp_path: Path) -> None:
    text = (
        f'RuntimeError: child died:\n  File "{torch.__file__}"\n  File "{ROOT}/src/a.py"\n  {tempfile.gettempdir()}/x'
    )
    path = write_result(
        Line("t.1", "t", "b", lambda runs: Result(1, passed=True)), Result(1, False, cause=text), tmp_path
    )
    cause = json.loads(path.read_text())["cause"]
    assert cause == ('RuntimeError: child died: File "<packages>/torch/__init__.py" File "./src/a.py" <temporary>/x')


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
    told = {"cpu", "instructions", "python_additions_per_us", "cores", "memory_gib", "os", "python", "torch"}
    assert told == record["machine"].keys()
    assert record["machine"]["python_additions_per_us"] > 0


def test_the_performance_page_has_a_row_for_each_work_with_peers_limit_and_conditions(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    limits = {"threads": 2, "read_gb_s": 33.6, "gemm_gflops": {"32": 319.0}}
    peers = {
        "peft": {"tok_s": 86.0, "ratio": 4.0, "interval": [3.5, 4.25]},
        "vllm-base": {"tok_s": 155.0, "ratio": 2.0, "interval": [1.9, 2.1]},
    }
    both = {"work": "32 × 64", "unit": "output tokens/s", "lorikeet": 310.4, "limit": 460.0, "share": 0.675}
    both |= {"peers": peers, "limits": limits, "versions": {"peft": "1.2"}, "command": "lorikeet bench offline"}
    alone = both | {"work": "decode", "peers": {}, "versions": {}}
    lora = {"adapters": 8, "rows": 8, "lora_ms": 2.5, "limit_ms": 2.0, "times_limit": 1.25, "step_ms": 20.0}
    overhead = {"adapters": 8, "work": "32 × 64", "base_tok_s": 330.0, "tok_s": 310.0, "lost": 0.06}
    details = {
        "fast.10": {"throughput": [alone]},
        "fast.2": {"throughput": [both]},
        "fast.4": {"lora": [lora | {"interval": "1.2 to 1.3"}], "overhead": [overhead | {"interval": [0.05, 0.07]}]},
        "other.1": {"throughput": [both]},
    }
    for name, data in details.items():
        write_result(
            Line(name, "t", "≥ 1", lambda runs: Result(0, passed=True)), Result(0, passed=True, details=data), folder
        )
    page = write_performance(folder).read_text()
    rows = [row for row in page.splitlines() if row.startswith("|")]
    assert rows[0] == (
        "| work | unit | Lorikeet | transformers + PEFT | vLLM CPU without adapters | limit "
        "| Lorikeet's share of the limit |"
    )
    assert rows[2:4] == [
        "| 32 × 64 | output tokens/s | **310** | 86 (4.00 ×; 3.5 to 4.25) | 155 (2.00 ×; 1.9 to 2.1) | 460 | 68% |",
        "| decode | output tokens/s | **310** |  |  | 460 | 68% |",
    ]
    assert "| 8 | 32 × 64 | 330 | 310 | 6.0% (5.0% to 7.0%) |" in rows
    assert "| 8 | 8 | 2.50 ms | 2.00 ms | 1.25 (1.2 to 1.3) | 20.0 ms |" in rows
    assert "* [fast.2](status/fast.2.json), `make accept LINE=fast.2`: " in page
    assert (
        "  * 32 × 64: `lorikeet bench offline`; 33.6 GB/s read, GFLOP/s 319 at 32 rows, 2 threads; peft 1.2\n" in page
    )
    assert "other.1" not in page


def test_the_performance_page_can_be_made_before_anything_is_measured(tmp_path: Path) -> None:
    page = write_performance(tmp_path / "status").read_text()
    assert page.startswith("# Performance\n")
    assert "|" not in page


def test_the_performance_page_has_what_a_gpu_did_once_there_was_one(tmp_path: Path) -> None:
    folder, cuda = tmp_path / "status", Line("cuda.3", "t", "≥ 1", lambda runs: Result(0, passed=True))
    write_result(cuda, Result("not run", passed=False, cause="no GPU"), folder)
    assert "GPU\n" not in write_performance(folder).read_text()
    measured = Result({"a load": "81% of the link"}, passed=True, notes="H100, driver 1.2")
    write_result(cuda, measured, folder)
    page = write_performance(folder).read_text()
    assert "## On a GPU\n\nH100, driver 1.2. Versions of torch and Triton were not kept. `make accept LINE=" in page
    assert "| a load | 81% of the link |" in page
    write_result(cuda, replace(measured, details={"limits": {"software": "torch 3"}}), folder)
    assert "not kept" not in write_performance(folder).read_text()


def test_the_table_is_made_of_the_records_that_there_are(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    shutil.copytree(STATUS, folder, ignore=shutil.ignore_patterns("runs"))
    assert write_status(folder).read_text() == STATUS.with_suffix(".md").read_text()


def test_what_a_gpu_did_stays_where_there_is_none_and_is_told_to_be_earlier(tmp_path: Path) -> None:
    folder, cuda = tmp_path / "status", Line("cuda.3", "t", "≥ 1", lambda runs: Result(0, passed=True))
    not_run = Result(NOT_RUN, passed=False, cause="no GPU here")
    write_result(cuda, not_run, folder)
    assert "| not run |" in write_status(folder).read_text()
    details = {"limits": {"device": "H100"}}
    path = write_result(cuda, Result({"a load": "60%"}, False, cause="too slow", details=details), folder)
    measured = json.loads(path.read_text())
    for _ in range(2):
        write_result(cuda, not_run, folder)
    text = write_status(folder).read_text()
    assert "| a load 60% |" in text
    assert f"- **cuda.3**: not run at `{revision()}` (no GPU here); at `{measured['revision']}`: too slow\n" in text
    assert "cuda.3 (judged there, measured on H100)" in text
    write_result(cuda, Result({"a load": "90%"}, passed=True), folder)
    assert "not run" not in write_status(folder).read_text()


def test_what_was_judged_by_a_bound_that_has_changed_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    for name, bound in (("fast.8", find_line("fast.8").bound), ("fast.9", "an easier one")):
        write_result(Line(name, "t", bound, lambda runs: Result(0, True)), Result(0, True), folder)
    eight, nine = (row for row in write_status(folder).read_text().splitlines() if row.startswith("| [fast."))
    assert "| yes |" in eight
    assert "| yes, by an earlier bound |" in nine


def test_figures_are_shown_to_four_digits_or_whole() -> None:
    assert format_figure({"a": 123456.789, "b": 0.00123456, "c": {"d": True}}) == "a 123,457, b 0.001235, c d True"


@pytest.mark.parametrize("name", ["serve", "serve.99", "serve/../x.1", "SERVE.1"])
def test_a_line_without_a_runner_is_named(name: str) -> None:
    with pytest.raises(UnknownLineError, match=name):
        find_line(name)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "benchmarks" / "accept").glob("*_[0-9]*.py")))
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


def test_only_what_all_engines_did_at_the_same_time_counts() -> None:
    early = [(0.0, ROWS), (1.0, ROWS), (2.0, ROWS), (3.0, ROWS)]
    late = [(0.5, 1), (1.0, ROWS), (1.5, ROWS), (2.5, ROWS), (4.0, 5)]
    assert common_window([early, late]) == (ROWS / 1.0 + ROWS * 2 / 1.5, [1.0, 0.5, 1.0])


class OneByOne:
    """Kernels of which only two are called here."""

    threads = 1

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def choose(self, logits: torch.Tensor, parameters: object) -> torch.Tensor:
        return logits

    def layers_in_one_call(self, weights: object, shape: object) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.linear


def test_a_stopwatch_tells_decode_steps_from_those_that_finish_a_prompt() -> None:
    watch = Stopwatch(cast(Any, OneByOne()), timed=("linear", "choose"))
    for rows in (1, 2, 2, 2, 1):
        watch.linear(torch.zeros(1))
        watch.choose(torch.zeros(rows, 3), cast(Any, None))
    decoded = watch.decode_steps(2)
    assert [times for _, times in decoded] == watch.steps[2:4]
    assert all(times.in_kernels_s.keys() == {"linear", "choose"} for _, times in decoded)
    watch.threads = 3
    assert watch.threads == 3


def test_a_stopwatch_calls_all_layers_at_once_unless_single_kernels_are_timed() -> None:
    nothing = cast(Any, None)
    assert Stopwatch(cast(Any, OneByOne()), timed=("linear", "choose")).layers_in_one_call(nothing, nothing) is None
    assert Stopwatch(cast(Any, OneByOne())).layers_in_one_call(nothing, nothing) is not None
    watch = Stopwatch(cast(Any, OneByOne()), timed=AT_ONCE[:1])
    layers = cast(Any, watch.layers_in_one_call(nothing, nothing))
    layers(torch.zeros(1))
    watch.choose(torch.zeros(1, 3), nothing)
    assert watch.steps[0].in_kernels_s.keys() == {"layers"}
