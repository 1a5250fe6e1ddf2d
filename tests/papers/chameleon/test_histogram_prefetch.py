"""Chameleon's predictive prefetch, by histograms of the times between arrivals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.tree import BASE, DependencyTree
from lorikeet.papers.chameleon.cache import PROTECTED, WANTED, Chameleon
from lorikeet.papers.chameleon.histogram_prefetch import GapHistogram, HistogramPrefetch
from tests.memory.trees import (
    add_adapter,
    arrive,
    view_of,
)

BIN_S = 10 * 10.0 / 240


EARLIEST_S, LATEST_S = 100 + 23 * BIN_S, 100 + 25 * BIN_S
"""Gaps of 9.9 s lie in the bin before 10 s, gaps of 10.1 s in the one after it."""


class Regular:
    """One adapter that a request arrives for about every 10 seconds, the last at 100 s; nobody has loaded it."""

    def __init__(self, arrivals: int = 11) -> None:
        self.tree = DependencyTree()
        self.other, self.adapter = add_adapter(self.tree), add_adapter(self.tree, there=False)
        self.view = view_of(self.tree)
        self.eviction = Chameleon(self.view)
        self.prefetch = HistogramPrefetch(self.view, self.eviction)
        for number in range(11 - arrivals, 11):
            self.prefetch.arrived(self.adapter, 10.0 * number - 0.1 * (number % 2))

    def named(self, now: float) -> list[int]:
        return list(self.prefetch.targets(now))

    def bring(self, now: float) -> None:
        assert self.named(now) == [self.adapter]
        self.prefetch.fetched(self.adapter, now)
        arrive(self.tree, self.adapter)

    def score(self, now: float) -> float:
        return float(self.eviction.scores(np.array([self.adapter]), now)[0])


def test_an_adapter_is_named_shortly_before_its_next_arrival_is_expected() -> None:
    regular = Regular()
    assert regular.named(EARLIEST_S - 0.01) == []
    assert regular.named(EARLIEST_S + 0.01) == [regular.adapter]
    assert regular.named(LATEST_S - 0.01) == [regular.adapter]
    assert regular.named(LATEST_S + 0.01) == []


def test_it_is_named_by_a_load_and_a_step_earlier() -> None:
    regular = Regular()
    regular.view.load_s = lambda nodes: np.full(len(nodes), 2.0)
    regular.view.iteration_s = 0.5
    assert regular.named(EARLIEST_S - 2.51) == []
    assert regular.named(EARLIEST_S - 2.49) == [regular.adapter]


def test_nothing_is_predicted_from_fewer_than_10_gaps() -> None:
    assert Regular(arrivals=11).named(110.0) != []
    assert Regular(arrivals=10).named(110.0) == []


def test_eviction_makes_room_for_the_queue_but_not_for_predictions() -> None:
    regular = Regular()
    assert regular.prefetch.evicts_below(regular.adapter) == -np.inf
    regular.view.waiting = {regular.adapter: 1}
    assert regular.prefetch.evicts_below(regular.adapter) == WANTED


def test_queued_adapters_precede_predicted_ones_without_duplicates() -> None:
    regular = Regular()
    queued = add_adapter(regular.tree, there=False)
    regular.view.waiting = {queued: 1}
    assert regular.named(110.0) == [queued, regular.adapter]
    regular.view.waiting = {queued: 1, regular.adapter: 1}
    assert regular.named(110.0) == [queued, regular.adapter]


def test_predictions_come_in_the_order_of_their_times() -> None:
    regular = Regular()
    sooner = add_adapter(regular.tree, there=False)
    for number in range(11):
        regular.prefetch.arrived(sooner, 10.0 * number - 0.1 * (number % 2) - 1.0)
    regular.view.load_s = lambda nodes: np.full(len(nodes), 5.0)
    assert regular.named(108.0) == [sooner, regular.adapter]


def test_prefetched_adapter_is_protected_until_its_expected_use_passes() -> None:
    regular = Regular()
    regular.bring(110.0)
    assert PROTECTED < regular.score(LATEST_S - 0.01) < WANTED
    assert regular.score(LATEST_S + 0.01) <= 1.0


def test_it_is_protected_no_longer_once_it_was_used() -> None:
    regular = Regular()
    regular.bring(110.0)
    regular.prefetch.arrived(regular.adapter, 110.1)
    assert regular.score(110.1) <= 1.0


def test_what_the_queue_wanted_is_not_protected() -> None:
    regular = Regular()
    regular.view.waiting = {regular.adapter: 1}
    regular.bring(110.0)
    regular.view.waiting = {}
    assert regular.score(110.0) <= 1.0


def test_only_adapters_that_are_expected_and_away_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step; those whose time is over may be many."""
    regular = Regular()
    here = add_adapter(regular.tree)
    for adapter, until in ((here, 11), (add_adapter(regular.tree, there=False), 10)):
        for number in range(until - 11, until):
            regular.prefetch.arrived(adapter, 10.0 * number)
    looked: list[list[int]] = []
    regular.view.load_s = lambda nodes: (looked.append(nodes.tolist()), np.zeros(len(nodes)))[1]
    regular.named(LATEST_S - 0.01)
    regular.prefetch.due_s(LATEST_S - 0.01)
    assert looked == [[regular.adapter]] * 2


def test_forgotten_adapter_and_its_successor_in_the_slot_are_not_expected() -> None:
    regular = Regular()
    regular.prefetch.forgotten([regular.adapter])
    regular.tree.remove_adapter(regular.adapter)
    assert regular.named(110.0) == []
    assert add_adapter(regular.tree, there=False) == regular.adapter
    assert regular.named(110.0) == []


def test_requests_of_the_base_are_not_predicted() -> None:
    tree = DependencyTree()
    view = view_of(tree)
    prefetch = HistogramPrefetch(view, Chameleon(view))
    for number in range(20):
        prefetch.arrived(BASE, float(number))
    assert list(prefetch.targets(20.0)) == []


@pytest.mark.slow
@given(st.lists(st.floats(0.8, 1.5), min_size=10, max_size=200))
def test_quantiles_are_exact_within_a_bin(gaps: list[float]) -> None:
    histogram, now = GapHistogram(0.0), 0.0
    for gap in gaps:
        now += gap
        histogram.add(now)
    for share in (0.05, 0.5, 0.99):
        exact = float(np.quantile(gaps, share, method="inverted_cdf"))
        assert (
            histogram.quantile_s(share, upper=False) - 1e-9 <= exact <= histogram.quantile_s(share, upper=True) + 1e-9
        )


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
def test_bins_follow_when_arrivals_become_rarer_or_more_frequent(factor: float) -> None:
    histogram, now = GapHistogram(0.0), 0.0
    for gap in [1.0] * 20 + [factor] * 2000:
        now += gap
        histogram.add(now)
    bin_s = histogram.quantile_s(0.5, upper=True) - histogram.quantile_s(0.5, upper=False)
    mean = (20 + 2000 * factor) / 2020
    assert mean / 24 / 2 <= bin_s <= mean / 24 * 2
    assert histogram.quantile_s(0.5, upper=False) == pytest.approx(factor, abs=2 * bin_s)
    assert histogram._counts.sum() == pytest.approx(2020)


def test_arrivals_that_all_come_at_once_are_expected_at_once() -> None:
    histogram = GapHistogram(5.0)
    for _ in range(30):
        histogram.add(5.0)
    assert histogram.quantile_s(0.99, upper=True) == pytest.approx(0.0, abs=1e-6)
