"""What holds for every policy of the tables."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.policies.base import LOWEST, PrefetchPolicy
from lorikeet.memory.policies.lru import Lru, LruWithReuse
from lorikeet.memory.tree import BASE, DependencyTree
from lorikeet.papers.elora.bfs import Bfs
from lorikeet.papers.elora.cost_model import Elora
from lorikeet.papers.elora.rrip import Srrip
from lorikeet.papers.elora.wom import Wom
from lorikeet.policies import EVICTION, PREFETCH
from lorikeet.presets import PRESETS
from tests.memory.trees import (
    add_adapter,
    add_kv,
    arrive,
    bring_all,
    leave,
    nodes_of,
    random_tree,
    roots_come_first,
    view_of,
)
from tests.support.policies import policy_values
from tests.support.scripted import Bench, request
from tests.support.scripted import adapter as reference


@pytest.mark.parametrize("name", policy_values("eviction"))
def test_every_policy_has_a_finite_score_for_every_node(name: str) -> None:
    for seed in range(10):
        tree = random_tree(seed)
        nodes = nodes_of(tree)
        policy = EVICTION[name](view_of(tree))
        policy.batch(4, 0.0)
        for node in nodes:
            if tree.on_device[node]:
                policy.inserted([node], 0.0)
        for node in nodes:
            policy.arrived(int(tree.top[node]), [node] if tree.top[node] != node else [], 1.0)
            policy.admitted(int(tree.top[node]), [], 1.0)
        scores = policy.scores(np.array([BASE, *nodes]), 100.0)
        assert np.isfinite(scores[1:]).all()
        assert policy.choose(nodes[:3], 100.0) in nodes[:3]


@pytest.mark.parametrize("name", policy_values("eviction"))
def test_score_of_a_node_does_not_depend_on_others_scored_with_it(name: str) -> None:
    tree = random_tree(3)
    policy, nodes = EVICTION[name](view_of(tree)), nodes_of(tree)
    for node in nodes:
        policy.arrived(int(tree.top[node]), [], 1.0)
    together = policy.scores(np.array(nodes), 100.0)
    assert together == pytest.approx([policy.scores(np.array([node]), 100.0)[0] for node in nodes])


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_values("eviction"))
def test_all_nodes_of_a_large_tree_are_scored(name: str) -> None:
    tree = random_tree(4, adapters=300, kv=3000)
    policy, nodes = EVICTION[name](view_of(tree)), nodes_of(tree)
    assert policy.scores(np.array(nodes), 100.0).shape == (3300,)


@pytest.mark.parametrize("name", PREFETCH)
def test_every_prefetch_names_roots_first_and_nothing_twice(name: str) -> None:
    for seed in range(10):
        tree = random_tree(seed)
        view = view_of(tree)
        prefetch = PREFETCH[name](view, Lru(view))
        view.waiting = dict.fromkeys(tree.adapters, 1)
        named = bring_all(prefetch, tree, 100.0)
        assert len(named) == len(set(named))
        assert name == "best-first:flat" or roots_come_first(tree, named)
        assert bring_all(prefetch, tree, 100.0) == []


def test_the_least_recently_used_scores_lowest() -> None:
    tree = random_tree(2)
    nodes = nodes_of(tree)
    assert Lru(view_of(tree)).scores(np.array(nodes), 0.0).tolist() == tree.last_use_s[nodes].tolist()


def test_rarely_reused_kv_is_evicted_before_older_adapters_and_other_kv() -> None:
    tree = DependencyTree()
    chats, single_shots, idle = add_adapter(tree, last_use_s=8), add_adapter(tree, last_use_s=9), add_adapter(tree)
    chat = add_kv(tree, chats, last_use_s=8)
    shots = [add_kv(tree, single_shots, last_use_s=at) for at in (7, 9)]
    view = view_of(tree)
    view.kv_reuse = lambda tops: np.where(tops == single_shots, 0.04, 0.3)
    nodes = np.array([chats, single_shots, idle, chat, *shots])
    order = nodes[np.argsort(LruWithReuse(view).scores(nodes, 10.0), kind="stable")]
    assert order.tolist() == [*shots, idle, chats, chat, single_shots]


def test_without_prefetch_nothing_is_named() -> None:
    view = view_of(DependencyTree())
    prefetch = PREFETCH["none"](view, Lru(view))
    assert type(prefetch) is PrefetchPolicy
    assert list(prefetch.targets(0.0)) == []
    assert prefetch.evicts_below(1) == -np.inf


# --- BFS: branch sums ---------------------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(0, 1000), st.data())
def test_a_node_scores_the_sum_of_eval_over_its_branch(seed: int, data: st.DataObject) -> None:
    tree = random_tree(seed)
    view, nodes = view_of(tree), nodes_of(tree)
    each = dict(zip(nodes, Elora(view).scores(np.array(nodes), 60.0), strict=True))
    asked = data.draw(st.lists(st.sampled_from(nodes), min_size=1))
    scores = Bfs(view).scores(np.array(asked), 60.0)
    for node, score in zip(asked, scores, strict=True):
        branch = [other for other in nodes if tree.top[other] == tree.top[node]]
        total = sum(tree.size[other] * math.exp(each[other]) for other in branch)
        assert score == pytest.approx(math.log(total) if total else LOWEST)


def test_sums_of_very_old_nodes_still_differ() -> None:
    tree = DependencyTree()
    one, two = add_adapter(tree), add_adapter(tree)
    add_kv(tree, two)
    scores = Bfs(view_of(tree)).scores(np.array([one, two]), 1e6)
    assert np.diff(scores) == pytest.approx(math.log(2))


def test_all_kv_of_the_base_is_a_branch_too() -> None:
    tree = DependencyTree()
    kv = [add_kv(tree, BASE) for _ in range(3)]
    policy = Bfs(view_of(tree))
    scores = policy.scores(np.array([BASE, *kv]), 0.0)
    assert scores[1:] == pytest.approx(math.log(3 * 0.5))


def test_a_branch_leaves_as_a_whole_and_counts_no_adapters() -> None:
    policy = Bfs(view_of(random_tree(1)))
    policy.batch(32, 0.0)
    assert policy.whole_branches
    assert policy.adapter_offset(5.0) == 0.0


# --- SRRIP beside the textbook's ----------------------------------------------------------------


def textbook(trace: list[int], capacity: int) -> list[int]:
    """Who leaves: intervals that are really counted up; the first by number of those with 3."""
    interval: dict[int, int] = {}
    victims = []
    for item in trace:
        if item in interval:
            interval[item] = 0
            continue
        if len(interval) == capacity:
            while 3 not in interval.values():
                interval = {other: value + 1 for other, value in interval.items()}
            victims.append(min(other for other, value in interval.items() if value == 3))
            del interval[victims[-1]]
        interval[item] = 2
    return victims


@given(st.lists(st.integers(0, 8), max_size=200), st.integers(1, 6))
def test_victims_are_those_of_textbook_rrip(trace: list[int], capacity: int) -> None:
    tree = DependencyTree()
    nodes = [add_adapter(tree, there=False) for _ in range(9)]
    policy = Srrip(view_of(tree))
    victims = []
    for now, item in enumerate(trace):
        policy.arrived(nodes[item], [], now)
        if tree.on_device[nodes[item]]:
            continue
        there = [node for node in nodes if tree.on_device[node]]
        if len(there) == capacity:
            victim = there[int(np.argmin(policy.scores(np.array(there), now)))]
            policy.removed([victim], now)
            leave(tree, victim)
            victims.append(nodes.index(victim))
        arrive(tree, nodes[item])
        policy.inserted([nodes[item]], now)
    assert victims == textbook(trace, capacity)


def test_a_hit_of_what_lies_on_the_host_is_none() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree)
    here, away = add_kv(tree, adapter), add_kv(tree, adapter, there=False)
    policy = Srrip(view_of(tree))
    for node in (here, away):
        policy.inserted([node], 0.0)
    policy.arrived(adapter, [here, away], 1.0)
    assert np.diff(policy.scores(np.array([away, here]), 1.0)) == 2


def test_nodes_beyond_the_first_size_of_the_tree_are_known() -> None:
    tree = DependencyTree()
    policy = Srrip(view_of(tree))
    adapter = add_adapter(tree)
    policy.inserted([adapter], 0.0)
    nodes = [add_kv(tree, adapter) for _ in range(3000)]
    for node in nodes:
        policy.inserted([node], 0.0)
    policy.arrived(adapter, nodes[-1:], 1.0)
    scores = policy.scores(np.array([adapter, *nodes]), 1.0)
    assert scores.tolist() == [0.0] + [-2.0] * 2999 + [0.0]


# --- ELORA-WOM: each entry by its own times -----------------------------------------------------


def test_kv_generated_after_its_adapter_was_matched_scores_higher() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree)
    first, second = add_kv(tree, adapter), add_kv(tree, adapter)
    policy = Wom(view_of(tree))
    policy.arrived(adapter, [first], 10.0)
    policy.inserted([second], 13.0)
    tree.last_use_s[[adapter, first, second]] = 20.0  # the end of the request, which uses the path
    scores = policy.scores(np.array([adapter, first, second]), 20.0)
    assert scores[0] == scores[1]
    assert scores[2] - scores[0] == pytest.approx(3.0, abs=1e-3)


def test_reloaded_entry_keeps_its_time_until_forgotten() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree)
    kv = add_kv(tree, adapter)
    policy, at = Wom(view_of(tree)), np.array([kv])
    policy.inserted([kv], 10.0)
    policy.inserted([kv], 50.0)
    assert policy.scores(at, 60.0)[0] == pytest.approx(-50.0)
    policy.forgotten([kv])
    policy.inserted([kv], 59.0)
    assert policy.scores(at, 60.0)[0] == pytest.approx(-math.log(1 + math.e))


def test_an_adapter_without_requests_scores_lowest() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, visits=0)
    assert Wom(view_of(tree)).scores(np.array([adapter]), 5.0)[0] == LOWEST


@pytest.mark.parametrize(("name", "appears"), [("elora:wom", True), ("elora", False)])
def test_only_without_the_tree_kv_stays_without_what_it_needs(name: str, *, appears: bool) -> None:
    bench = Bench(blocks=24, host_blocks=60, preset=PRESETS[name])
    shares = []
    for number in range(12):
        ref = reference(f"a{number % 4}", 3)
        prompt = [100 * number + place for place in range(9)]
        bench.engine.submit(request(f"r{number}", prompt, bench.clock.now(), ref, max_tokens=16))
        bench.run()
        bench.clock.advance(3.0)
        shares.append(bench.engine.memory_stats().invalid_kv_bytes)
    assert any(shares) == appears
