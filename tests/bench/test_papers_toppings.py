"""TOPPINGS' figures: what they are made of, and short runs."""

import pytest

from benchmarks.papers import toppings
from benchmarks.papers.toppings import Cell, Place
from lorikeet.bench.load_report import RequestResult
from lorikeet.core.plan import KernelForm

CELL = (3.0, 50, 0.0)


def record(due_s: float, *times_s: float) -> RequestResult:
    return RequestResult(
        "a", due_s, due_s, times_s[-1], token_times_s=times_s, input_tokens=100, output_tokens=len(times_s)
    )


def test_a_request_is_suspended_while_others_load_and_prefill() -> None:
    found = toppings.each_request(
        [
            record(0.0, 1.0, 1.5, 3.5, 4.0),  # two begin in its second gap: suspended from 1.5 to 3.0
            record(0.5, 2.0, 3.5, 4.0),  # the third begins after its first token
            record(0.5, 3.0, 3.5, 6.0, 6.5),  # the last begins in its second gap
            record(4.0, 5.5, 6.0),
        ]
    )
    assert found == {"e2e_s": [4.0, 3.5, 6.0, 2.0], "suspended_s": [1.5, 1.0, 2.0, 0.0], "interruptions": 1}
    assert toppings.interrupted_share(found) == pytest.approx((1.5 / 4 + 1 / 3.5 + 2 / 6) / 4)
    assert toppings.delay_percent(found) == pytest.approx(100 * (1.5 / 2.5 + 1 / 2.5 + 2 / 4) / 4)


def test_the_cell_is_the_nearest_to_the_printed_figures_of_on_demand_loading() -> None:
    wanted = Cell(2, 215, 1.5)
    made = []
    for cell, rate in toppings.GRID_KEYS:
        share, count = toppings.INTERRUPTED[rate] if cell == wanted else (90, 500)
        made.append({"e2e_s": [100.0], "suspended_s": [float(share)], "interruptions": count})
    assert toppings.choose_cell(*made) == wanted
    assert min(toppings.cells_by_distance(made))[0] == pytest.approx(0)


def test_dloras_einsum_reads_all_adapters_of_a_server() -> None:
    profile = toppings.profile_of(toppings.SEVEN_B)
    few_s, many_s = (
        toppings.with_all_loaded(profile, toppings.SETTINGS[name]).lora_costs(KernelForm.EINSUM).fixed.value
        for name in ("MAF 128", "MAF 256")
    )
    assert many_s - few_s == pytest.approx(128 * 96 * 2**20 / 1.55e12, rel=0.01)


def test_answers_have_the_mean_of_their_distribution() -> None:
    for answers in toppings.ANSWERS[2:4]:
        drawn = [each.output_tokens for each in toppings.lengths(20_000, answers, 1)]
        assert sum(drawn) / len(drawn) == pytest.approx(215, rel=0.05)


def test_the_lengths_have_the_printed_quantiles() -> None:
    drawn = sorted(each.input_tokens for each in toppings.lengths(20_000, (50, 0.0), 1))
    assert drawn[18_000] == pytest.approx(256, rel=0.06)
    assert drawn[19_800] == pytest.approx(1000, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("form", [KernelForm.PADDED, KernelForm.UNPADDED])
def test_the_schedulers_models_are_fitted_to_noisy_steps(form: KernelForm) -> None:
    decode, prefill = (toppings.profiled(form, (50, 0.0), prefill=prefill) for prefill in (False, True))
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
