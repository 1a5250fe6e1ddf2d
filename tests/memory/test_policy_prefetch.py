"""What is prefetched, in which order: the tree's rule, scores, newest first, whole branches."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.policies import prefetch as prefetching
from lorikeet.memory.policies.all_prefetch import AllPrefetch
from lorikeet.memory.policies.base import EvictionPolicy, is_prefetchable, stays_on_device
from lorikeet.memory.policies.lru import Lru, LruWithReuse
from lorikeet.memory.policies.prefetch import NewestFirst
from lorikeet.memory.policies.queue_prefetch import QueuePrefetch
from lorikeet.memory.tree import BASE, DependencyTree, NodeKind, NodeTransfer
from lorikeet.papers.chameleon.cache import PROTECTED, WANTED, Chameleon
from lorikeet.papers.chameleon.histogram_prefetch import GapHistogram, HistogramPrefetch
from lorikeet.papers.elora.bfs import Bfs
from lorikeet.papers.elora.cost_model import Elora, Factor
from lorikeet.papers.elora.prefetch import BestFirst, BestFirstFlat, Branches
from lorikeet.papers.elora.rrip import Srrip
from tests.memory.trees import (
    add_adapter,
    add_kv,
    arrive,
    bring_all,
    nodes_of,
    random_tree,
    roots_come_first,
    score,
    view_of,
)

NOW = 100.0


def plain_order(tree: DependencyTree, eviction: EvictionPolicy) -> Iterator[int]:
    """Algorithm D as it is written: of all candidates take the best, then look again."""
    named: set[int] = set()
    while True:
        candidates = []
        for node in set(nodes_of(tree)) - named:
            parent = int(tree.parent[node])
            is_adapter = tree.kind[node] == NodeKind.ADAPTER
            is_open = is_adapter or parent in named or stays_on_device(tree, np.array([parent]))[0]
            if is_open and is_prefetchable(tree, node):
                offset = eviction.prefetch_adapter_offset(NOW) if tree.kind[node] == NodeKind.KV else 0.0
                candidates.append((-(tree.score[node] - offset), -tree.last_use_s[node], tree.depth[node], node))
        if not candidates:
            return
        node = int(min(candidates)[3])
        named.add(node)
        yield node


def moved(order: Iterator[int], tree: DependencyTree) -> list[int]:
    """Bring the adapters of an order as they are named."""
    named = []
    for node in order:
        named.append(node)
        if tree.kind[node] == NodeKind.ADAPTER:
            tree.moving[node] = NodeTransfer.IN
    return named


@pytest.mark.slow
@given(st.integers(0, 1000), st.booleans(), st.sampled_from((None, Factor.RECENCY)), st.sampled_from((1, 3, 1024)))
def test_the_best_come_first_as_in_algorithm_d(seed: int, few_values: bool, without: Factor | None, chunk: int) -> None:
    orders = []
    for chosen in (True, False):
        tree = random_tree(seed, few_values=few_values)
        eviction = Elora(view_of(tree), without=without)
        eviction.batch(8, 0.0)
        score(tree, eviction, NOW)
        before, prefetching._SORTED = prefetching._SORTED, chunk
        try:
            order = BestFirst(eviction.view, eviction).targets(NOW) if chosen else plain_order(tree, eviction)
            orders.append(moved(order, tree))
        finally:
            prefetching._SORTED = before
    assert orders[0] == orders[1]


def test_everything_is_prefetched_in_the_end_even_unrequested_adapters() -> None:
    for seed in range(20):
        tree = random_tree(seed)
        eviction = Elora(view_of(tree))
        named = bring_all(BestFirst(eviction.view, eviction), tree, NOW)
        assert roots_come_first(tree, named)
        assert tree.on_device[nodes_of(tree)].all()


def test_first_prefetch_is_an_adapter_if_none_is_resident() -> None:
    tree = DependencyTree()
    add_kv(tree, BASE, there=False, visits=1000, last_use_s=NOW)
    adapter = add_adapter(tree, there=False, visits=1)
    eviction = Elora(view_of(tree))
    eviction.batch(8, 0.0)
    score(tree, eviction, NOW)
    assert next(BestFirst(eviction.view, eviction).targets(NOW)) == adapter


def test_each_adapter_that_comes_makes_the_next_less_urgent() -> None:
    tree = DependencyTree()
    add_adapter(tree, visits=100)
    adapters = [add_adapter(tree, there=False, visits=100) for _ in range(5)]
    kv = add_kv(tree, BASE, there=False, visits=140)
    eviction = Elora(view_of(tree))
    eviction.batch(1000, 0.0)
    # 100 (N+1)/N against 140: adapters come first while N is 1 or 2.
    named = bring_all(BestFirst(eviction.view, eviction), tree, NOW)
    assert named.index(kv) == 2
    assert set(named) == {*adapters, kv}


def test_kv_below_an_adapter_that_is_passed_over_is_not_named() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, there=False)
    add_kv(tree, adapter, there=False)
    assert list(BestFirst(view_of(tree), Lru(view_of(tree))).targets(NOW)) == [adapter]


def test_moving_or_freed_nodes_and_their_children_are_not_prefetched() -> None:
    tree = DependencyTree()
    coming, retired, leaving = (add_adapter(tree, there=there) for there in (False, False, True))
    tree.moving[coming], tree.adapters[retired].retired = NodeTransfer.READ, True
    tree.moving[leaving] = NodeTransfer.OUT
    add_kv(tree, leaving, there=False)
    view = view_of(tree)
    for prefetch in (BestFirst(view, Lru(view)), Branches(view, Bfs(view))):
        assert list(prefetch.targets(NOW)) == []


def test_with_last_uses_as_scores_the_newest_come_first() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, last_use_s=9.0)
    old, new = (add_kv(tree, adapter, there=False, last_use_s=last) for last in (1.0, 5.0))
    child = add_kv(tree, old, there=False, last_use_s=8.0)
    away = add_adapter(tree, there=False, last_use_s=3.0)
    view = view_of(tree)
    assert bring_all(BestFirst(view, Lru(view)), tree, NOW) == [new, away, old, child]


def test_newest_first_does_not_look_at_scores() -> None:
    for seed in range(20):
        trees = random_tree(seed), random_tree(seed)
        views = [view_of(tree) for tree in trees]
        by_score = bring_all(BestFirst(views[0], Lru(views[0])), trees[0], NOW)
        assert bring_all(NewestFirst(views[1], Srrip(views[1])), trees[1], NOW) == by_score


def test_without_the_tree_any_kv_on_the_host_is_named_by_itself() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, there=False, visits=1)
    first = add_kv(tree, adapter, there=False, visits=2)
    second = add_kv(tree, first, there=False, visits=3)
    view = view_of(tree)
    assert bring_all(BestFirstFlat(view, Elora(view)), tree, NOW) == [second, first, adapter]


def test_branches_come_one_after_another_the_largest_sum_first() -> None:
    tree = DependencyTree()
    small, large = (add_adapter(tree, there=False, visits=visits) for visits in (5, 1))
    below_small = add_kv(tree, small, there=False)
    below_large = [add_kv(tree, large, there=False, visits=2) for _ in range(4)]
    deeper = add_kv(tree, below_large[0], there=False)
    base = add_kv(tree, BASE, there=False, visits=3)
    view = view_of(tree)
    named = bring_all(Branches(view, Bfs(view)), tree, NOW)
    assert named == [large, *below_large, deeper, small, below_small, base]


def test_branches_bring_everything_roots_first() -> None:
    for seed in range(20):
        tree = random_tree(seed)
        view = view_of(tree)
        named = bring_all(Branches(view, Bfs(view)), tree, NOW)
        assert roots_come_first(tree, named)
        assert tree.on_device[nodes_of(tree)].all()
        tops = [top for top, _ in groupby(int(tree.top[node]) for node in named)]
        assert len(tops) == len(set(tops)) > 1


# --- Prefetch by the queue, by histograms of the times between arrivals, and of everything ------


def test_queue_prefetch_follows_queue_order_and_skips_resident_nodes() -> None:
    tree = DependencyTree()
    third, here, first, coming = (add_adapter(tree, there=there) for there in (False, True, False, False))
    tree.moving[coming] = NodeTransfer.READ
    view = view_of(tree)
    view.waiting = {first: 2, BASE: 1, here: 1, coming: 1, third: 1}
    prefetch = QueuePrefetch(view, Chameleon(view))
    assert list(prefetch.targets(0.0)) == [first, third]
    assert not prefetch.below_watermark_only


def test_room_for_the_queue_is_made_of_tier_1_only() -> None:
    tree = DependencyTree()
    idle, wanted, away = (add_adapter(tree, there=there) for there in (True, True, False))
    view = view_of(tree)
    view.waiting = {wanted: 1, away: 1}
    eviction = Chameleon(view)
    limit = QueuePrefetch(view, eviction).evicts_below(away)
    assert limit == WANTED
    scores = eviction.scores(np.array([idle, wanted]), 0.0)
    assert scores[0] < limit <= scores[1]
    eviction.protect(idle, 1.0)
    assert eviction.scores(np.array([idle]), 0.0)[0] < limit


def test_eviction_policy_without_tiers_evicts_nothing_for_the_queue() -> None:
    tree = DependencyTree()
    view = view_of(tree)
    assert QueuePrefetch(view, Lru(view)).evicts_below(add_adapter(tree, there=False)) == -np.inf


# --- all ---------------------------------------------------------------------------------------------


def test_all_prefetch_names_every_adapter_off_the_device() -> None:
    tree = DependencyTree()
    first, _, second, coming = (add_adapter(tree, there=there) for there in (False, True, False, False))
    tree.moving[coming] = NodeTransfer.READ
    view = view_of(tree)
    prefetch = AllPrefetch(view, Lru(view))
    assert list(prefetch.targets(0.0)) == [first, second]
    assert prefetch.evicts_below(first) == -np.inf
    assert not prefetch.below_watermark_only  # it needs no ticks


# --- histograms --------------------------------------------------------------------------------------


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


def test_kv_that_is_rarely_reused_is_not_prefetched() -> None:
    tree = DependencyTree()
    reused, single = add_adapter(tree), add_adapter(tree)
    kv = add_kv(tree, reused, there=False, last_use_s=1.0)
    add_kv(tree, single, there=False, last_use_s=2.0)
    view = view_of(tree)
    view.kv_reuse = lambda tops: np.where(tops == reused, 0.5, 0.01)
    eviction = LruWithReuse(view)
    score(tree, eviction, NOW)
    assert list(NewestFirst(view, eviction).targets(NOW)) == [kv]
