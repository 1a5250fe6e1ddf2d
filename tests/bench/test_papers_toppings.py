"""TOPPINGS' figures: what they are made of, and short runs."""

import pytest

from benchmarks.papers import toppings
from benchmarks.papers.toppings import Cell, Place
from lorikeet.bench.load_report import RequestRecord
from lorikeet.core.plan import KernelForm

CELL = (3.0, 50)


def record(due_s: float, first_s: float, ended_s: float, tokens: int) -> RequestRecord:
    times_s = (first_s, ended_s)
    return RequestRecord("a", due_s, due_s, ended_s, token_times_s=times_s, input_tokens=100, output_tokens=tokens)


def test_interruptions_are_what_decoding_takes_longer_than_its_steps() -> None:
    (one_s, ten_s) = (toppings.decode_s("padded", batch, (64,), 106) for batch in (1, 10))
    added_s = (ten_s - one_s) / 9
    # Two requests of ten steps. The second begins within the first, and costs it half a second.
    alone = record(0.0, 1.0, 1.0 + 10 * one_s, 11)
    assert toppings.interruptions([alone]) == {"interrupted_share": pytest.approx(0), "interruptions": 0}
    both_s = 10 * (one_s + added_s)
    first, second = record(0.0, 1.0, 1.5 + both_s, 11), record(1.0, 1.5, 1.5 + both_s, 11)
    found = toppings.interruptions([first, second])
    together = both_s / (both_s + 0.5)
    lost_s = 0.5 + both_s - 10 * (one_s + added_s * together)
    assert found["interrupted_share"] == pytest.approx(lost_s / (1.5 + both_s) / 2)
    assert found["interruptions"] == 0.5


def test_the_cell_is_the_nearest_to_the_printed_figures_of_on_demand_loading() -> None:
    far, printed = {"interrupted_share": 0.9, "interruptions": 500}, toppings.INTERRUPTED.values()
    made = [far] * (3 * len(toppings.CELLS))
    made[12:15] = [{"interrupted_share": share / 100, "interruptions": count} for share, count in printed]
    assert toppings.choose_cell(*made) == toppings.CELLS[4] == Cell(2, 100)
    assert min(toppings.cells_by_distance(made))[0] == pytest.approx(0)


def test_the_lengths_have_the_printed_quantiles() -> None:
    drawn = sorted(each.input_tokens for each in toppings.lengths(20_000, 50, 1))
    assert drawn[18_000] == pytest.approx(256, rel=0.06)
    assert drawn[19_800] == pytest.approx(1000, rel=0.12)


@pytest.mark.parametrize("form", [KernelForm.PADDED, KernelForm.UNPADDED])
def test_the_schedulers_models_are_fitted_to_noisy_steps(form: KernelForm) -> None:
    decode, prefill = (toppings.profiled(form, 50, prefill=prefill) for prefill in (False, True))
    of_ranks_s = toppings.decode_s(form, 32, (64,)) - toppings.decode_s(form, 32, (8,))
    # Larger batches also have more tokens, which the models do not count apart.
    assert 1 < decode.slope_s * 32 * 56 / of_ranks_s < 3
    assert prefill.fixed_s > 0
    assert 0.9 < toppings.determination(form) < 1


def test_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toppings.run_case(CELL, "S3", toppings.OURS, 1, 10)["tpt_mean_s"] > 0
    monkeypatch.setitem(toppings.PLACES, "30/s", Place(2, 20, 8.0, "uniform", 2.0))
    within = toppings.run_place(CELL, (0.1, 0.2), "30/s", toppings.BY_CHANCE, "loaded", 1)["within"]
    assert 0 <= within[0] <= within[1] <= 1
    assert toppings.cold_prefill_s(CELL, toppings.OURS, 64, 64) > 0
    assert toppings.host_ms(CELL) > 0
