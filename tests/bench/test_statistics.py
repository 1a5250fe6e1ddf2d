import numpy as np
import pytest

from lorikeet.bench.statistics import mean_of, median_interval, p95_of, ratio_over_repeats, ratio_over_requests


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


def test_of_repeats_that_differ_none_outweighs_the_others() -> None:
    theirs = np.random.default_rng(0).exponential(1.0, (3, 50))
    theirs[2] *= 100.0
    ours = theirs * np.array([[1.0], [1.0], [0.125]])
    assert ratio_over_requests(ours.tolist(), theirs.tolist(), mean_of).value < 0.2
    ratio = ratio_over_repeats(ours.tolist(), theirs.tolist(), mean_of)
    assert ratio.value == pytest.approx(0.5)
    assert (ratio.low, ratio.high) == pytest.approx((0.125, 1.0)), "any repeat may have been the one that is right"


@pytest.mark.parametrize("reduce", [mean_of, p95_of])
def test_repeats_that_agree_leave_the_interval_over_requests(reduce: object) -> None:
    generator = np.random.default_rng(1)
    ours, theirs = generator.exponential(0.8, (1, 200)).repeat(3, 0), generator.exponential(1.0, (1, 200)).repeat(3, 0)
    found = ratio_over_repeats(ours.tolist(), theirs.tolist(), reduce)  # type: ignore[arg-type]
    assert found == pytest.approx(ratio_over_requests(ours.tolist(), theirs.tolist(), reduce), rel=0.03)  # type: ignore[arg-type]
