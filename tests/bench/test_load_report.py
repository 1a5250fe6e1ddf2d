from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.bench.load_report import RequestResult, distribution, jain_index, most_under_way, summarise
from lorikeet.bench.statistics import mean_of, median_interval, ratio_over_requests
from lorikeet.core.request import Slo

MODERATE = st.floats(1e-6, 1e6)


def exchange(sent_s: float, *token_times_s: float, **more: Any) -> RequestResult:
    """An answer that ends with its last token, one token an event."""
    ended_s = token_times_s[-1] if token_times_s else sent_s
    count = len(token_times_s)
    given = {"due_s": sent_s, "ended_s": ended_s, "input_tokens": 10, "output_tokens": count, "asked_tokens": count}
    return RequestResult(**{"adapter": None, "sent_s": sent_s, "token_times_s": token_times_s, **given, **more})


def failed(sent_s: float, kind: str, message: str = "", **more: Any) -> RequestResult:
    return exchange(sent_s, error=kind, message=message, **more)


def test_times_are_counted_from_sending() -> None:
    one = exchange(1.0, 1.5, 1.6, 2.1, ended_s=2.2)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.3)
    assert one.gaps_s == pytest.approx([0.1, 0.5])
    assert one.e2e_s == pytest.approx(1.2)


def test_tpot_divides_by_tokens_however_many_came_in_an_event() -> None:
    assert exchange(0.0, 1.0, 2.0, output_tokens=5).tpot_s == pytest.approx(0.25)
    assert exchange(0.0, 1.0).tpot_s is None


def test_time_held_back_by_the_limit_is_not_the_clients_lateness() -> None:
    assert exchange(3.0, 4.0, due_s=1.0, held_s=1.75).lateness_s == pytest.approx(0.25)


@given(st.lists(MODERATE, min_size=1, max_size=40))
def test_percentiles_lie_in_order_between_smallest_and_largest(values: list[float]) -> None:
    found = distribution([None, *values])
    assert found is not None
    assert found.count == len(values)
    ordered = [min(values), found.p50, found.p90, found.p95, found.p99, max(values)]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(ordered))
    assert min(values) * (1 - 1e-9) <= found.mean <= max(values) * (1 + 1e-9)


def test_nothing_has_no_distribution() -> None:
    assert distribution([None]) is None


def test_jain_index_of_equal_shares_is_the_fraction_of_nonzero_ones() -> None:
    assert jain_index([1.0] * 20 + [0.0] * 80) == pytest.approx(0.2)
    assert jain_index([]) is None
    assert jain_index([0.0]) is None


@given(st.lists(MODERATE, min_size=1, max_size=30), st.floats(0.01, 100))
def test_jains_index_is_between_one_nth_and_one_and_does_not_know_units(values: list[float], factor: float) -> None:
    index = jain_index(values)
    assert index is not None
    assert 1 / len(values) * (1 - 1e-9) <= index <= 1 + 1e-9
    assert jain_index([value * factor for value in values]) == pytest.approx(index)
    assert jain_index([values[0]] * len(values)) == pytest.approx(1)


def test_failed_request_misses_the_slo_and_own_limits_override_common_ones() -> None:
    exchanges = [
        exchange(0.0, 0.4, 0.5),
        exchange(0.0, 0.6, 0.7),
        exchange(0.0, 0.6, 0.7, slo=Slo(ttft_s=1.0)),
        failed(0.0, "HTTP 429"),
    ]
    figures = summarise(exchanges, Slo(ttft_s=0.5))
    assert figures.slo_attainment == 0.5
    assert figures.goodput == pytest.approx(2 / 0.7)
    assert summarise(exchanges[:2], Slo()).slo_attainment is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [(Slo(tpot_s=0.1), True), (Slo(tpot_s=0.09), False), (Slo(e2e_s=0.7), True), (Slo(0.5, 0.1, 0.69), False)],
)
def test_every_limit_must_be_met(slo: Slo, met: bool) -> None:
    assert exchange(0.0, 0.5, 0.5 + 0.0999, ended_s=0.7).meets(slo) is met


def test_rates_count_whole_answers_from_first_request_to_last_answer() -> None:
    hung = msgspec.structs.replace(failed(4.0, "timeout"), ended_s=600.0)
    figures = summarise([exchange(1.0, 2.0, 3.0), exchange(2.0, 4.0, 5.0), hung], Slo())
    assert figures.duration_s == 4.0
    assert (figures.requests, figures.completed) == (3, 2)
    assert figures.request_rate == 0.5
    assert figures.output_token_rate == 1.0
    assert figures.token_rate == 6.0
    assert figures.offered_rate == pytest.approx(2 / 3)


def test_the_first_request_of_each_adapter_is_cold_and_the_base_never_is() -> None:
    figures = summarise(
        [
            exchange(0.0, 0.1),
            exchange(3.0, 3.2, adapter="b"),
            exchange(1.0, 2.0, adapter="a"),
            exchange(2.0, 2.1, adapter="a"),
        ],
        Slo(),
    )
    assert figures.cold_ttft_s is not None
    assert figures.warm_ttft_s is not None
    assert (figures.cold_ttft_s.count, figures.cold_ttft_s.mean) == (2, pytest.approx(0.6))
    assert (figures.warm_ttft_s.count, figures.warm_ttft_s.mean) == (2, pytest.approx(0.1))
    cold = {each.adapter: each.cold_ttft_s for each in figures.adapters}
    assert cold == {"a": pytest.approx(1.0), "b": pytest.approx(0.2), None: None}


def test_an_adapter_whose_first_request_failed_has_no_cold_ttft() -> None:
    figures = summarise([failed(0.0, "timeout", adapter="a"), exchange(1.0, 1.5, adapter="a")], Slo())
    assert figures.cold_ttft_s is None
    assert figures.adapters[0].cold_ttft_s is None
    assert (figures.adapters[0].requests, figures.adapters[0].failed) == (2, 1)


def test_fairness_compares_the_adapters_latency_per_token() -> None:
    """a: 1 s for 2 tokens; b: 3 s for 2 tokens."""
    exchanges = [exchange(0.0, 0.5, 1.0, adapter="a"), exchange(0.0, 1.0, 3.0, adapter="b")]
    assert summarise(exchanges, Slo()).fairness == pytest.approx(2.0**2 / (2 * (0.5**2 + 1.5**2)))


def test_there_is_no_fairness_where_an_adapter_got_nothing() -> None:
    exchanges = [exchange(0.0, 0.5, 1.0, adapter="a"), failed(0.0, "timeout", adapter="b")]
    assert summarise(exchanges, Slo()).fairness is None


def test_errors_are_counted_by_kind_with_the_first_message() -> None:
    exchanges = [failed(0.0, "HTTP 429", "full"), failed(1.0, "timeout"), failed(2.0, "HTTP 429", "still full")]
    figures = summarise(exchanges, Slo())
    assert {kind: (each.count, each.example) for kind, each in figures.errors.items()} == {
        "HTTP 429": (2, "full"),
        "timeout": (1, ""),
    }
    assert figures.ttft_s is None


def test_short_answers_and_cached_tokens_are_reported() -> None:
    exchanges = [exchange(0.0, 1.0, asked_tokens=2, cached_tokens=5), exchange(0.0, 1.0)]
    figures = summarise(exchanges, Slo())
    assert figures.short_answers == 1
    assert figures.cached_share == 0.5
    assert summarise(exchanges[1:], Slo()).cached_share is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=15))
def test_requests_under_way_are_counted_as_at_every_moment(spans: list[tuple[int, int]]) -> None:
    exchanges = [exchange(float(start), ended_s=float(start + length)) for start, length in spans]
    moments = np.arange(0, 31) + 0.5
    slow = max(sum(start < moment < start + length for start, length in spans) for moment in moments)
    assert most_under_way(exchanges) == slow


def test_figures_can_be_written_as_json() -> None:
    figures = summarise([exchange(0.0, 1.0, adapter="a")], Slo())
    assert msgspec.json.decode(msgspec.json.encode(figures))["adapters"][0]["adapter"] == "a"


# ---  -------------------------------------------------------------------------------------------


def test_the_interval_of_a_median_holds_it_and_shrinks_with_more_values() -> None:
    generator = np.random.default_rng(0)
    few, many = generator.normal(10, 1, 9).tolist(), generator.normal(10, 1, 900).tolist()
    (low, high), (lower, upper) = median_interval(few), median_interval(many)
    assert low <= np.median(few) <= high
    assert high - low > 2 * (upper - lower)


def test_a_ratio_of_the_same_requests_has_no_width_however_different_they_are() -> None:
    theirs = np.random.default_rng(0).exponential(1.0, (3, 50))
    ratio = ratio_over_requests((0.5 * theirs).tolist(), theirs.tolist(), mean_of)
    assert tuple(ratio) == pytest.approx((0.5, 0.5, 0.5))


def p95_of(values: np.ndarray) -> np.ndarray:
    """Return 95th percentiles over repeats and requests."""
    return np.percentile(values, 95, axis=(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [mean_of, p95_of])
def test_the_interval_of_a_ratio_holds_the_true_one_about_as_often_as_it_says(reduce: object) -> None:
    generator = np.random.default_rng(1)
    held = 0
    for seed in range(100):
        ours, theirs = generator.exponential(0.8, (1, 200)), generator.exponential(1.0, (1, 200))
        ratio = ratio_over_requests(ours.tolist(), theirs.tolist(), reduce, resamples=400, seed=seed)  # type: ignore[arg-type]
        assert ratio.low <= ratio.high
        held += ratio.low <= 0.8 <= ratio.high
    assert 85 <= held <= 100


def test_repeats_are_taken_together() -> None:
    ratio = ratio_over_requests([[1.0, 2.0], [3.0, 4.0]], [[2.0, 2.0], [2.0, 4.0]], mean_of)
    assert ratio.value == pytest.approx(1.0)
