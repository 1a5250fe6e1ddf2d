"""The frame of the papers' figures: verdicts, runs and their cache, and the table and pages."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.papers import dlora, elora_work, loraserve, table, toppings
from benchmarks.papers.__main__ import main
from benchmarks.papers.cache import Cache, in_order, run_missing
from benchmarks.papers.chameleon import grid as chameleon_grid
from benchmarks.papers.chameleon import judged as chameleon_judged
from benchmarks.papers.claims import PAPERS, Excluded, Form, Notes, Reason, read_claims, read_notes
from benchmarks.papers.measure import (
    Answer,
    Figure,
    Measurement,
    Paper,
    Plot,
    Run,
    Series,
    Table,
    compared,
    increase,
    over_seeds,
    reduction,
)
from benchmarks.papers.pages import unexplained, write_page
from benchmarks.papers.verdicts import Share, Verdict, judge, share_of
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import Constant, Curve

JUDGED = [
    # A printed 1.5 x is an effect of 0.5: 1.4 to 1.625 is the same, up to 1.75 better, and no gain is opposite.
    (Form.GAIN_TIMES, 1.5, 1.4, "same"),
    (Form.GAIN_TIMES, 1.5, 1.3, "same direction"),
    (Form.GAIN_TIMES, 1.5, 1.7, "better"),
    (Form.GAIN_TIMES, 1.5, 1.8, "overshoots"),
    (Form.GAIN_TIMES, 1.2, 1.02, "same direction"),
    (Form.GAIN_TIMES, 1.2, 1.0, "opposite"),
    # A printed 20 % less.
    (Form.GAIN_PERCENT, 20, 16, "same"),
    (Form.GAIN_PERCENT, 20, 15, "same direction"),
    (Form.GAIN_PERCENT, 20, 29, "better"),
    (Form.GAIN_PERCENT, 20, 31, "overshoots"),
    (Form.GAIN_PERCENT, 20, -1, "opposite"),
    # A printed 7 % more than an ideal: 1 % more makes the whole 1.06 times as good; half as long as it overshoots.
    (Form.COST_PERCENT, 7, 8, "same"),
    (Form.COST_PERCENT, 7, 1, "better"),
    (Form.COST_PERCENT, 7, -3, "better"),
    (Form.COST_PERCENT, 7, -40, "overshoots"),
    (Form.COST_PERCENT, 7, 12, "same direction"),
    (Form.COST_PERCENT, 7, 15, "opposite"),
    (Form.HIGHER, 12.9, 12.0, "same"),
    (Form.HIGHER, 12.9, 7.0, "same direction"),
    (Form.HIGHER, 12.9, 6.0, "opposite"),
    (Form.HIGHER, 12.9, 18.0, "better"),
    (Form.HIGHER, 12.9, 20.0, "overshoots"),
    (Form.LOWER, 27, 30, "same"),
    (Form.LOWER, 27, 20, "better"),
    (Form.LOWER, 27, 10, "overshoots"),
    (Form.LOWER, 27, 40, "same direction"),
    (Form.LOWER, 27, 60, "opposite"),
    (Form.LOWER, 27, 0, "overshoots"),
    (Form.AT_MOST, 5, 0, "same"),
    (Form.AT_MOST, 5, 6.5, "opposite"),
    (Form.AT_MOST, 0, 0.4, "same"),
    (Form.AT_MOST, 0, 3, "opposite"),
    (Form.AT_LEAST, 95, 80, "same"),
    (Form.AT_LEAST, 95, 70, "opposite"),
    (Form.BASELINE_PERCENT, 81, 51, "same direction"),
    (Form.BASELINE_PERCENT, 81, 200, "same direction"),
    (Form.BASELINE_PERCENT, 81, 70, "same"),
    (Form.BASELINE_PERCENT, 81, 0, "opposite"),
    (Form.BASELINE_TIMES, 4, 1.0, "opposite"),
    (Form.BASELINE_TIMES, 4, 3.5, "same"),
    (Form.VALUE, 13, 16, "same"),
    (Form.VALUE, 13, 7, "same direction"),
    (Form.VALUE, 13, 27, "opposite"),
    (Form.VALUE, 0, 0.3, "same"),
    (Form.VALUE, 0, -2, "opposite"),
]


@pytest.mark.parametrize(("form", "printed", "ours", "verdict"), JUDGED)
def test_a_figure_is_judged_beside_the_printed_one(form: Form, printed: float, ours: float, verdict: str) -> None:
    judged = judge(form, printed, ours)
    assert judged.verdict == verdict
    if form in (Form.GAIN_TIMES, Form.BASELINE_TIMES):
        assert judged.ratio == pytest.approx((ours - 1) / (printed - 1)), "by its effect"
    else:
        assert judged.ratio == (pytest.approx(ours / printed) if printed else None)


def test_280_claims_have_names_of_their_own() -> None:
    claims = [claim for paper in PAPERS for claim in read_claims(paper).claim]
    assert len(claims) == len({claim.name for claim in claims}) == 280


def test_settings_and_what_is_not_testable_do_not_count() -> None:
    counted, setting = (
        next(claim for claim in read_claims("toppings").claim if claim.excluded is excluded)
        for excluded in (None, Excluded.SETTING)
    )
    verdicts = [
        (counted, Verdict.SAME),
        (counted, Verdict.BETTER),
        (counted, Verdict.OVERSHOOTS),
        (counted, Verdict.NOT_RUN),
        (counted, Verdict.NOT_TESTABLE),
        (setting, Verdict.OPPOSITE),
    ]
    assert share_of(verdicts) == Share(2, 4)
    assert share_of(verdicts).percent == 50
    assert share_of([]).percent is None


@pytest.mark.parametrize("name", [name for name in PAPERS if table.load_paper(name)])
def test_each_claim_of_a_paper_is_measured_or_has_a_reason(name: str) -> None:
    paper = table.load_paper(name)
    assert paper is not None
    declared = [claim for each in paper.measurements for claim in each.figures]
    claims = read_claims(name).claim
    assert sorted(declared) == sorted(claim.id for claim in claims if claim.reason is None)
    assert read_notes(name).causes.keys() <= {claim.id for claim in claims}


def constants_of(value: Any, path: str) -> Iterator[tuple[str, Constant | Curve]]:
    """Yield every constant and curve of a profile with its place."""
    if isinstance(value, Constant | Curve):
        yield path, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from constants_of(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from constants_of(each, f"{path}.{name}")


@pytest.mark.slow
def test_each_constant_of_the_papers_devices_names_its_source() -> None:
    grid = [setting.profile for setting in chameleon_grid.GRID]
    names = {*grid, *(large.profile for large in chameleon_judged.LARGE.values()), *dlora.PROFILES.values()}
    names |= {loraserve.PROFILE, loraserve.ONE_DEVICE, *(profile for profile, _ in loraserve.MODELS.values())}
    profiles = [load_profile(name) for name in sorted(names)]
    profiles += [elora_work.profile_of(model) for model in elora_work.MODELS]
    profiles += [toppings.profile_of(name) for name in (toppings.SEVEN_B, toppings.SEVENTY_B, toppings.FREE_HOST)]
    profiles += [dlora.cluster_profile(dlora.VLLM, model)[0] for model in dlora.PROFILES]
    found = [each for profile in profiles for each in constants_of(profile, profile.name)]
    assert len(found) > 500
    assert [path for path, each in found if not each.source] == []


# --- runs --------------------------------------------------------------------------------------------


def double(value: int) -> int:
    return 2 * value


def add(first: int, second: int, more: int) -> dict[str, int]:
    return {"sum": first + second + more}


def fail(value: int) -> int:
    raise ValueError(f"no {value}")


TWO, FOUR = Run(double, (1,)), Run(double, (2,))
SUM = Run(add, (100,), after=(TWO, FOUR))


def test_a_run_is_known_by_function_arguments_and_what_comes_before() -> None:
    assert Run(double, (1,)).key == TWO.key
    assert len({TWO.key, FOUR.key, Run(fail, (1,)).key, SUM.key, Run(add, (100,), after=(FOUR, TWO)).key}) == 5


def test_a_run_comes_once_and_after_those_before_it() -> None:
    assert in_order([SUM, FOUR, SUM]) == [TWO, FOUR, SUM]


def test_runs_get_the_results_of_those_before_them_and_are_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    cache = Cache(tmp_path)
    run_missing([SUM], cache, 1, lines.append)
    kept = cache.get(SUM)
    assert kept is not None
    assert kept.result == {"sum": 106}
    assert len(lines) == 3
    assert lines[-1].endswith("0 s left: add 100")
    run_missing([SUM], cache, 1, lines.append)
    assert len(lines) == 3
    cache.forget([SUM])
    assert not list(tmp_path.iterdir())


def test_a_result_does_not_count_when_one_that_it_was_made_from_is_another(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    run_missing([SUM], cache, 1, lambda line: None)
    cache.put(TWO, 3, "later")
    assert cache.get(SUM) is None
    run_missing([SUM], cache, 1, lambda line: None)
    kept = cache.get(SUM)
    assert kept is not None
    assert kept.result == {"sum": 107}


def test_an_interrupted_run_goes_on_and_leaves_the_same_bytes(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    run_missing([SUM], Cache(tmp_path / "whole"), 1, lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        run_missing([SUM], Cache(tmp_path / "broken"), 1, interrupt)
    assert len(list((tmp_path / "broken").iterdir())) == 1
    run_missing([SUM], Cache(tmp_path / "broken"), 1, lambda line: None)
    whole, broken = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "broken")
    )
    assert whole == broken


def test_a_failed_run_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    bad = Run(fail, (7,))
    cache = Cache(tmp_path)
    with pytest.raises(RuntimeError, match=r"2 of 3 runs failed:\nfail 7: ValueError\('no 7'\)\nadd 5: a run before"):
        run_missing([Run(add, (5,), after=(TWO, bad))], cache, 1, lambda line: None)
    assert cache.get(TWO) is not None


# --- figures, table, pages ---------------------------------------------------------------------------


def test_systems_are_compared_seed_by_seed() -> None:
    mine, theirs = ([Run(double, (number + start,)) for number in range(3)] for start in (0, 10))
    figure = compared(reduction, mine, theirs, "latency_s")
    made = [{"latency_s": value} for value in (8.0, 9.0, 10.0, 10.0, 10.0, 10.0)]
    answer = figure.of(made)
    assert isinstance(answer, Answer)
    # 20, 10 and 0 %: the mean 10, its standard error 10 / sqrt(3), and 4.303 for two degrees of freedom.
    assert answer.value == pytest.approx(10)
    assert answer.high == pytest.approx(10 + 4.303 * 10 / 3**0.5, abs=0.01)
    assert over_seeds([4.0]) == Answer(4.0)
    assert increase(12, 10) == pytest.approx(20)


def double_of(made: Sequence[Any]) -> float:
    return float(made[0])


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Paper:
    """The module of TOPPINGS declares three of its claims."""
    measurement = Measurement(
        "Settings of the tests",
        {"model": "none", "link": "1 GB/s | 2 GB/s"},
        {
            "mot-interrupt-count-rps3": Figure((TWO,), double_of),
            "mot-interrupt-count-rps6": Figure((FOUR,), lambda made: 2.0 * made[0]),
            "head-latency-max": Figure((FOUR,), lambda made: Answer(made[0] / 4, 0.9, 1.1)),
        },
        plots=[Plot("Doubles", "number", "double", (TWO, FOUR), lambda made: [
            Series("ours", [1, 2], made), Series("paper", [1, 2], [2, 5], printed=True)
        ])],
        tables=[Table("The whole grid", ["number", "double"], (TWO,), lambda made: [[1, made[0]]])],
    )  # fmt: skip
    paper = Paper([measurement])
    module = SimpleNamespace(PAPER=paper)
    notes = Notes("All is modelled.", {"head-latency-max": "The link is faster."})
    monkeypatch.setattr(table, "read_notes", lambda name: notes)
    monkeypatch.setattr(table, "import_module", lambda name: module if name.endswith("toppings") else SimpleNamespace())
    return paper


def test_the_table_has_a_row_for_every_claim(
    declared: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    main(["table", "--cache", str(tmp_path / "runs"), "--processes", "1", "--json", str(out)])
    rows = {row["claim"]: row for row in json.loads(out.read_text())}
    assert len(rows) == 280
    count = rows["toppings/mot-interrupt-count-rps3"]
    assert (count["printed"], count["ours"], count["ratio"], count["verdict"]) == (4, 2, 0.5, "same direction")
    head = rows["toppings/head-latency-max"]
    assert (head["verdict"], head["interval"], head["cause"]) == ("opposite", [0.9, 1.1], "The link is faster.")
    assert rows["toppings/mot-lmsys-p90"]["reason"] == Reason.INPUT
    assert rows["toppings/head-slo"]["verdict"] == "not run"
    before = out.read_bytes()
    main(["table", "--cache", str(tmp_path / "runs"), "--cached", "--json", str(out)])
    assert out.read_bytes() == before
    capsys.readouterr()
    main(["table", "toppings", "--cache", str(tmp_path / "runs"), "--cached"])
    assert "TOPPINGS: 1 of" in capsys.readouterr().out


def test_one_claim_needs_only_its_own_runs(declared: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    main(["run", "toppings", "--claim", "toppings/head-latency-max", "--cache", folder, "--processes", "1"])
    assert [file.name.split("-")[1] for file in tmp_path.iterdir()] == ["double"]
    assert "The link" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="toppings prints no claim nonsense; it prints head-latency-max"):
        main(["run", "toppings", "--claim", "nonsense", "--cache", folder])


def test_a_page_has_settings_plots_and_causes(declared: Paper, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "runs")
    run_missing([TWO, FOUR], cache, 1, lambda line: None)
    page = write_page("toppings", tmp_path / "pages", cache).read_text()
    assert "| link | 1 GB/s / 2 GB/s |" in page
    assert "| **head-latency-max** | 1.7 | 1 | 0.9 to 1.1 | x | 0.00 | opposite |" in page
    assert "**head-latency-max (opposite).** The link is faster." in page
    assert f"| mot-lmsys-p90 | 90 | % | {Reason.INPUT} |" in page
    plots = sorted((tmp_path / "pages").glob("*.svg"))
    assert [plot.name.removeprefix("toppings-settings-of-the-tests-") for plot in plots] == [
        "1.svg",
        "count.svg",
    ]
    for plot in plots:
        ElementTree.parse(plot)
        assert f"({plot.name})" in page


def test_what_wants_a_cause_and_has_none_is_listed(declared: Paper, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    run_missing([TWO, FOUR], cache, 1, lambda line: None)
    rows = table.rows_of("toppings", cache)
    assert unexplained(rows) == []
    assert unexplained([row._replace(cause="") for row in rows]) == ["toppings/head-latency-max"]
