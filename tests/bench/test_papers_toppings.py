"""TOPPINGS' figures: what they are made of, and short runs."""

import pytest

from benchmarks.papers import toppings
from benchmarks.papers.toppings import Cell, Place
from lorikeet.bench.load_report import RequestResult
from lorikeet.core.plan import KernelForm

CELL = (3.0, 50)


def record(due_s: float, first_s: float, ended_s: float, tokens: int) -> RequestResult:
    times_s = (first_s, ended_s)
    return RequestResult("a", due_s, due_s, ended_s, token_times_s=times_s, input_tokens=100, output_tokens=tokens)


def test_a_request_is_interrupted_by_those_that_begin_while_it_decodes() -> None:
    found = toppings.each_request([record(0.0, 1.0, 5.0, 9), record(1.0, 2.0, 3.0, 9), record(1.0, 4.0, 6.0, 9)])
    assert found == {"e2e_s": [5.0, 2.0, 5.0], "interruptions": 0}
    cached = {"e2e_s": [4.0, 1.0, 4.5]}
    assert toppings.interrupted_share(found, cached) == pytest.approx((0.2 + 0.5 + 0.1) / 3)


def test_the_cell_is_the_nearest_to_the_printed_figures_of_on_demand_loading() -> None:
    wanted = Cell(2, 100)

    def of(cell: Cell, rate: int, preset: str = toppings.ON_DEMAND) -> dict[str, object]:
        share, count = toppings.INTERRUPTED[rate] if cell == wanted else (90, 500)
        return {"e2e_s": [100.0 - (0 if preset == toppings.ON_DEMAND else share)], "interruptions": count}

    made = [of(*key) for key in toppings.GRID_KEYS]
    cached = {(key[0].answer_tokens, key[1]): number for number, key in enumerate(toppings.GRID_KEYS) if len(key) > 2}
    for rate, (share, _) in toppings.INTERRUPTED.items():
        made[cached[wanted.answer_tokens, rate]] = {"e2e_s": [100.0 - share], "interruptions": 0}
    assert toppings.choose_cell(*made) == wanted
    assert min(toppings.cells_by_distance(made))[0] == pytest.approx(0)


def test_the_lengths_have_the_printed_quantiles() -> None:
    drawn = sorted(each.input_tokens for each in toppings.lengths(20_000, 50, 1))
    assert drawn[18_000] == pytest.approx(256, rel=0.06)
    assert drawn[19_800] == pytest.approx(1000, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("form", [KernelForm.PADDED, KernelForm.UNPADDED])
def test_the_schedulers_models_are_fitted_to_noisy_steps(form: KernelForm) -> None:
    decode, prefill = (toppings.profiled(form, 50, prefill=prefill) for prefill in (False, True))
    of_ranks_s = toppings.decode_s(form, 32, (64,)) - toppings.decode_s(form, 32, (8,))
    # Larger batches also have more tokens, which the models do not count apart.
    assert 1 < decode.slope_s * 32 * 56 / of_ranks_s < 3
    assert prefill.fixed_s > 0
    assert 0.9 < toppings.determination(form) < 1


@pytest.mark.slow
def test_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toppings.run_case(CELL, "S3", toppings.OURS, 1, 10)["tpt_mean_s"] > 0
    monkeypatch.setitem(toppings.PLACES, "30/s", Place(2, 20, 8.0, "uniform", 2.0))
    within = toppings.run_place(CELL, (0.1, 0.2), "30/s", toppings.BY_CHANCE, "loaded", 1)["within"]
    assert 0 <= within[0] <= within[1] <= 1
    assert toppings.cold_prefill_s(CELL, toppings.OURS, 64, 64) > 0
    assert toppings.host_ms(CELL) > 0
