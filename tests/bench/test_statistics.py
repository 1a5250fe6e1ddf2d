import numpy as np
import pytest

from lorikeet.bench.statistics import mean_of, median_interval, ratio_over_requests


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
