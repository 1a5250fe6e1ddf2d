"""The workloads and the comparison of ``benchmarks/auto_live.py``; its runs compute for half an hour."""

import numpy as np
import pytest

from benchmarks.auto import AUTO, FIGURES, Results
from benchmarks.auto_live import RIVALS, WORKLOADS, compare, conversations, reaches


@pytest.mark.parametrize("workload", WORKLOADS)
def test_requests_follow_from_the_seed_and_arrive_in_the_window(workload: str) -> None:
    make = WORKLOADS[workload]
    made = make(10.0, 20.0, 1)
    assert made == make(10.0, 20.0, 1)
    assert made != make(10.0, 20.0, 2)
    assert all(0 <= each.arrival_s < 20 for each in made)
    assert len(made) == pytest.approx(200, rel=0.25)


def test_dialogues_are_under_way_when_a_run_begins() -> None:
    made = conversations(100.0, 20.0, 0)
    parts = np.histogram([each.arrival_s for each in made], bins=4, range=(0, 20))[0]
    assert parts.min() > 0.8 * parts.max()


def test_auto_is_compared_with_the_best_system_and_with_the_least_of_each_figure() -> None:
    def results(mean: float, p99: float, per_token: float) -> Results:
        values = dict(zip(FIGURES, (mean, p99, per_token), strict=True))
        return Results([{name: value * noise for name, value in values.items()} for noise in (0.9, 1.1)], np.nan)

    found = {name: results(4.0, 4.0, 4.0) for name in RIVALS}
    found |= {"dlora": results(1.0, 2.0, 1.0), "chameleon": results(2.0, 1.0, 2.0), AUTO: results(1.2, 1.0, 1.0)}
    best, figures = compare(found)
    assert best == "dlora"
    assert [each.over_best.value for each in figures] == pytest.approx([1.2, 0.5, 1.0])
    assert [each.least for each in figures] == ["dlora", "chameleon", "dlora"]
    assert [each.over_least.value for each in figures] == pytest.approx([1.2, 1.0, 1.0])
    assert [reaches(each.over_best) for each in figures] == [False, True, True]
