"""Chameleon's programs: their workload against the printed statistics, the choice of the cell, and knees."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.chameleon import GRID_TABLE, PAPER, grid
from benchmarks.papers.chameleon.judged import LARGE, large_setting
from benchmarks.papers.chameleon.simulate import (
    CONTEXT_TOKENS,
    LONGEST_ANSWER_TOKENS,
    READINGS,
    S_LORA,
    Setting,
    Sweep,
    alone,
    lengths,
    run_at,
    simulate_work,
    work_at,
)
from benchmarks.papers.measure import Run
from benchmarks.papers.runs import AZURE, trace
from lorikeet.workloads.synthetic import PAPER_RANKS, spread

CELL = grid.GRID[0]


def test_the_trace_has_its_printed_lengths_and_those_that_run_fit_the_context() -> None:
    # Splitwise prints medians of 1,020 tokens of input and 129 of output for the conversation service.
    assert np.median([each.input_tokens for each in trace(AZURE)]) == 1020
    assert np.median([each.output_tokens for each in trace(AZURE)]) == 129
    assert max(each.input_tokens + each.output_tokens for each in lengths()) <= CONTEXT_TOKENS
    assert max(each.output_tokens for each in lengths()) == LONGEST_ANSWER_TOKENS
    cut = sum(one != other for one, other in zip(lengths(), trace(AZURE), strict=True))
    assert cut / len(lengths()) == pytest.approx(0.083, abs=0.001)


def test_the_workload_is_the_printed_one() -> None:
    work = work_at(CELL, 8.0, 20_000, 1)
    rank_of = dict(zip(work.names, spread(CELL.ranks, CELL.adapters), strict=True))
    assert Counter(rank_of.values()) == dict.fromkeys(PAPER_RANKS, 20), "N_a / 5 adapters of each rank"
    adapters = [each.adapter for each in work.requests if each.adapter is not None]
    ranks = Counter(rank_of[each] for each in adapters)
    shares = np.array([ranks[rank] for rank in PAPER_RANKS]) / len(adapters)
    power = 1 / np.arange(1, 6)
    assert shares == pytest.approx(power / power.sum(), abs=0.015), "power law, smaller ranks more often"
    for rank in PAPER_RANKS:
        uses = Counter(each for each in adapters if rank_of[each] == rank)
        expected = ranks[rank] / 20
        chi_squared = sum((count - expected) ** 2 / expected for count in uses.values())
        assert chi_squared < 43.8, "uniform within a rank (19 degrees of freedom, 0.1 %)"
    arrivals_s = np.array([each.arrival_s for each in work.requests])
    gaps_s = np.diff(arrivals_s)
    assert len(arrivals_s) / arrivals_s[-1] == pytest.approx(8.0, rel=1e-3)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.03), "Poisson"
    scaled = [each.input_tokens for each in work.requests]
    assert np.median(scaled) == pytest.approx(1020 * CELL.lengths, rel=0.05)


def test_the_cell_is_the_one_in_which_s_lora_is_as_printed() -> None:
    def cell(knee: float, load: float, both: float) -> dict[str, object]:
        return {
            "knees": dict(zip(READINGS, (3.0, knee, 20.0), strict=True)),
            "load_percent": load,
            "adapter_percent": both,
        }

    exact = cell(8.7, 17.5, 60.0)
    assert grid.distance(exact, "p99-ttft") == 0
    assert grid.choose(cell(8.0, 17.5, 60.0), exact, cell(8.7, 30.0, 60.0)) == (1, "p99-ttft", 0.0)
    assert grid.distance(cell(8.7, 35.0, 60.0), "p99-ttft") == pytest.approx(np.log(2))


def test_the_choice_depends_on_no_run_of_chameleon() -> None:
    assert grid.GRID[grid.CHOICE.place] == grid.CELL
    assert all(run.function is grid.baseline_cell and not run.after for run in grid.BASELINES)
    assert set(GRID_TABLE.runs) >= {*grid.BASELINES, *grid.CHAMELEONS}, "the page has all cells"


def test_a_knee_is_found_between_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def p99(preset: str, setting: Setting, rate: float, window_s: float, seed: int) -> dict[str, float]:
        tried.append(rate)
        return {"ttft_p99_s": 0.5 * (rate / 4) ** 2}

    monkeypatch.setattr("benchmarks.papers.chameleon.simulate.run_at", p99)
    for near in (2.0, 6.5, 11.0):
        assert Sweep(S_LORA, CELL, 1, near).knee(2.0) == pytest.approx(8.0)
    assert len(tried) == len(set(tried)) < 30
    monkeypatch.setattr("benchmarks.papers.chameleon.simulate.run_at", lambda *_, **__: {"ttft_p99_s": 9.0})
    with pytest.raises(RuntimeError, match="no rate keeps"):
        Sweep(S_LORA, CELL, 1, 8.0).knee(2.0)
    monkeypatch.setattr("benchmarks.papers.chameleon.simulate.run_at", lambda *_, **__: {"ttft_p99_s": 0.1})
    with pytest.raises(RuntimeError, match="too short"):
        Sweep(S_LORA, CELL, 1, 8.0).knee(2.0)


@pytest.mark.slow
def test_loading_and_computing_take_the_shares_that_the_link_gives_them() -> None:
    one = alone(Setting(CELL.profile, 0.3, 4.0, 4096), 128, 1024)
    assert one["loaded_s"] - one["there_s"] == pytest.approx(256 * 2**20 / 4e9, rel=0.01)
    assert (one["there_s"] - one["base_s"]) / one["base_s"] == pytest.approx(42.5 / 40, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["30b", "7b-24gb"])
def test_models_on_an_a100_fit_and_run(model: str) -> None:
    setting = large_setting(CELL, LARGE[model])
    assert setting.window_s > 30
    assert simulate_work("chameleon", setting, work_at(setting, 2.0, 3, 1))["ttft_p99_s"] > 0


def canned(run: Run) -> Any:
    """Plain data of the form that a run returns."""
    knees = dict.fromkeys(READINGS, 3.0)
    if run.arguments[0] == grid.CELL:  # the grid chooses it
        knees[grid.CHOICE.reading] = 9.0
    loads = {load: {"ttft_p50_s": 0.1, "ttft_p99_s": 0.5} for load in grid.LOADS}
    both = {"chameleon:s-lora": 10.0, "chameleon": 11.0, "tokens": 300.0}
    made: dict[str, Any] = {
        "baseline_cell": {"load_percent": 18.0, "adapter_percent": 60.0, "knees": knees, "loads": loads},
        "chameleon_cell": {"knees": knees, "loads": loads},
        "judged_limit": 2.0,
        "judged_knee": 9.0,
        "large_knees": both,
        "large_load": {"rate": 6.0, "s_lora_s": 1.0, "reduction": 20.0},
    }
    return made.get(run.function.__name__, SHORT_RUN)


SHORT_RUN = {
    **{f"ttft_{name}_s": 0.5 for name in ("mean", "p50", "p99", "most")},
    "tbt_p99_ms": 90.0,
    "ttft_p99_by_rank_s": {"8": 0.4, "128": 0.6},
    "ttft_p99_by_minute_s": [0.4, 0.5],
    **{f"{name}_share": 0.5 for name in ("completed", "hit", "bypassed", "squashed")},
    **dict.fromkeys(("loaded_bytes", "prefetched", "prefetched_used"), 8),
}


@pytest.mark.slow
def test_every_figure_plot_and_table_follows_from_its_runs() -> None:
    assert run_at("chameleon", CELL, 6.0, 4.0, 1).keys() >= SHORT_RUN.keys()
    for measurement in PAPER.measurements:
        for figure in measurement.figures.values():
            assert np.isfinite(np.array(figure.of([canned(run) for run in figure.runs]), float)).all()
        for table in measurement.tables:
            rows = table.rows([canned(run) for run in table.runs])
            assert all(len(row) == len(table.headings) for row in rows)
        for plot in measurement.plots:
            assert plot.x_label
            assert plot.y_label
            assert plot.series([canned(run) for run in plot.runs])
