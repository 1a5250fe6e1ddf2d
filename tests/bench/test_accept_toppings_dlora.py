"""The modelled lines of issue 7: their workloads, their settings, and how they judge."""

import numpy as np
import pytest

from benchmarks.accept import dlora_cases, modes_6
from benchmarks.accept import toppings_cases as toppings
from lorikeet.core.plan import KernelForm
from lorikeet.costs.model import CostModel, SequenceWork, step_work


def test_prompts_have_the_printed_quantiles() -> None:
    prompts = [each.input_tokens for each in toppings.lengths(20_000, np.random.default_rng(1))]
    assert np.percentile(prompts, 90) == pytest.approx(256, rel=0.05)
    assert np.percentile(prompts, 99) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(("tokens", "printed_s"), [(256, 0.044), (1000, 0.090)])
def test_steps_of_the_printed_profile_take_what_is_printed(tokens: int, printed_s: float) -> None:
    model = CostModel(toppings.printed_steps(), KernelForm.PADDED)
    work = step_work([SequenceWork(0, tokens, True, None, 0.0)], model.form)
    assert model.step_s(work) == pytest.approx(printed_s)


def test_each_request_has_the_next_adapter_in_turn() -> None:
    requests = toppings.requests_of(toppings.SETTINGS["S3"], 400)
    assert len({each.adapter for each in requests[:200]}) == 200
    assert 399 / (requests[-1].arrival_s - requests[0].arrival_s) == pytest.approx(9.0)


def test_a_run_of_each_kind_has_figures() -> None:
    figures = {row: toppings.run_case(toppings.Case("S3", "printed", row), 12) for row in ("cached", "toppings")}
    assert figures["cached"]["assisted_steps"] == 0
    assert figures["toppings"]["assisted_steps"] > 0
    assert figures["toppings"]["ttft_mean_s"] > figures["cached"]["ttft_mean_s"]


def test_rows_out_of_their_order_are_named() -> None:
    order = ("cached", "toppings", "toppings:on-demand", "toppings:strawman", "toppings:s-lora", "dlora")
    found = {
        toppings.Case(setting, "printed", row).name: {"ttft_mean_s": 1.0 + place, "tpt_mean_s": 1.0 + place}
        for setting in toppings.SETTINGS
        for place, row in enumerate(order)
    }
    assert modes_6.out_of_order(found) == []
    found[toppings.Case("S2", "printed", "toppings").name]["tpt_mean_s"] = 9.0
    assert len(modes_6.out_of_order(found)) == 1
    assert "S2: tpt_mean_s" in modes_6.out_of_order(found)[0]


def test_more_functions_to_an_adapter_are_more_skew() -> None:
    shares = [dlora_cases.largest_share(skew) for skew in dlora_cases.SKEWS]
    assert shares == sorted(shares)
    assert shares[-1] > 0.9
