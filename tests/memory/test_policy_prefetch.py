"""Prefetch of the newest nodes, of the adapters of the queue, and of all adapters."""

import numpy as np

from lorikeet.memory.policies.all_prefetch import AllPrefetch
from lorikeet.memory.policies.lru import Lru, LruWithReuse
from lorikeet.memory.policies.prefetch import NewestFirst
from lorikeet.memory.policies.queue_prefetch import QueuePrefetch
from lorikeet.memory.tree import BASE, DependencyTree, NodeTransfer
from lorikeet.papers.chameleon.cache import WANTED, Chameleon
from lorikeet.papers.elora.prefetch import BestFirst
from lorikeet.papers.elora.rrip import Srrip
from tests.memory.trees import (
    add_adapter,
    add_kv,
    bring_all,
    random_tree,
    score,
    view_of,
)

NOW = 100.0


def test_newest_first_does_not_look_at_scores() -> None:
    for seed in range(20):
        trees = random_tree(seed), random_tree(seed)
        views = [view_of(tree) for tree in trees]
        by_score = bring_all(BestFirst(views[0], Lru(views[0])), trees[0], NOW)
        assert bring_all(NewestFirst(views[1], Srrip(views[1])), trees[1], NOW) == by_score


# --- the queue ---------------------------------------------------------------------------------------


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


# --- newest first, with reuse -------------------------------------------------------------------------


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
