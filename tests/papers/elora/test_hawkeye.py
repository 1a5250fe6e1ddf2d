"""Hawkeye: OPTgen beside a search of all ways, and what is learned from it."""

from functools import cache
from itertools import cycle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.tree import DependencyTree
from lorikeet.papers.elora.hawkeye import Hawkeye, OptGen
from tests.memory.trees import add_adapter, add_kv, view_of


def most_hits(trace: tuple[int, ...], capacity: int) -> int:
    """The most hits that any cache could have that need not keep what it fetches."""

    @cache
    def best(index: int, held: frozenset[int]) -> int:
        if index == len(trace):
            return 0
        item = trace[index]
        after = held | {item}
        choices = [after] if len(after) <= capacity else [after - {other} for other in after]
        return (item in held) + max(best(index + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


def optgen_hits(trace: tuple[int, ...], capacity: int, history: int, beside: tuple[int, ...] = (0,)) -> int:
    """Hits of a trace of items of one block, each of which is accessed beside others that never come again."""
    optimal, hits = OptGen(capacity, history), 0
    last: dict[int, int] = {}
    for item, others in zip(trace, cycle(beside), strict=False):
        if item in last:
            hits += optimal.access_again(last[item], 1)
        last[item] = optimal.now
        optimal.next_request(1 + others)
    return hits


@given(st.lists(st.integers(0, 5), max_size=14).map(tuple), st.integers(1, 4))
def test_optgen_counts_as_many_hits_as_the_best_cache_has(trace: tuple[int, ...], capacity: int) -> None:
    assert optgen_hits(trace, capacity, 1000) == most_hits(trace, capacity)


@given(
    st.lists(st.integers(0, 5), max_size=300).map(tuple),
    st.integers(1, 4),
    st.integers(1, 40),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple),
)
def test_optgen_forgets_what_is_older_than_its_history(
    trace: tuple[int, ...], capacity: int, history: int, beside: tuple[int, ...]
) -> None:
    """The same hits as if reuses over more than the history were first accesses."""
    blocks = [1 + others for _, others in zip(trace, cycle(beside), strict=False)]
    held = np.zeros(len(trace) + 1, int)
    last: dict[int, int] = {}
    expected = 0
    for now, item in enumerate(trace):
        since = last.get(item)
        if since is not None and sum(blocks[since:now]) <= history and held[since:now].max() < capacity:
            held[since:now] += 1
            expected += 1
        last[item] = now
    assert optgen_hits(trace, capacity, history, beside) == expected


def test_optgen_forgets_requests_that_accessed_nothing() -> None:
    """Those of the base whose prompts are shorter than a block."""
    optimal = OptGen(10, 100)
    for _ in range(1000):
        optimal.next_request(0)
    assert (optimal.now, len(optimal._blocks), len(optimal._held)) == (1000, 100, 128)


def test_optgen_counts_sizes() -> None:
    optimal = OptGen(10, 1000)
    optimal.next_request(14)
    assert optimal.access_again(0, 6)
    assert not optimal.access_again(0, 5)
    assert optimal.access_again(0, 4)


def test_computed_kv_counts_as_accessed() -> None:
    friendly = []
    for computed in (6, 7):
        tree = DependencyTree()
        adapter, other = add_adapter(tree), add_adapter(tree)
        policy = Hawkeye(view_of(tree, device_blocks=1))
        policy.arrived(adapter, [], 0.0)
        for _ in range(computed):
            policy.inserted([add_kv(tree, adapter)], 0.0)
        policy.arrived(other, [], 1.0)
        policy.arrived(adapter, [], 2.0)
        friendly.append(policy.scores(np.array([adapter]), 2.0)[0] > 2.0**39)
    assert friendly == [True, False]


def test_nodes_of_an_adapter_without_timely_kv_reuse_leave_first() -> None:
    tree = DependencyTree()
    used, scanned = add_adapter(tree, size=2), add_adapter(tree, size=2)
    mine = add_kv(tree, used)
    others = [[add_kv(tree, scanned) for _ in range(3)] for _ in range(20)]
    policy = Hawkeye(view_of(tree, device_blocks=8))
    for turn in range(5):
        policy.arrived(used, [mine], turn)
        for path in others:
            policy.arrived(scanned, path, turn)
            policy.arrived(used, [mine], turn)
    policy.arrived(scanned, others[0], 6.0)
    scores = policy.scores(np.array([mine, others[0][0]]), 6.0)
    assert scores[0] > scores[1]


def test_evicting_a_friendly_node_takes_the_lru_and_detrains_its_adapter() -> None:
    tree = DependencyTree()
    adapters = [add_adapter(tree) for _ in range(2)]
    policy = Hawkeye(view_of(tree))
    for adapter in adapters:
        policy.arrived(adapter, [], 0.0)
    first, second = policy.scores(np.array(adapters), 0.0)
    assert first < second
    policy.removed([adapters[1]], 1.0)
    policy.arrived(adapters[1], [], 1.0)  # learns that it would have been kept: as friendly as before
    assert policy.scores(np.array(adapters), 1.0)[1] > second
    policy.removed([adapters[1]], 2.0)
    policy.removed([adapters[1]], 2.0)
    policy.arrived(adapters[1], [], 2.0)
    assert policy.scores(np.array(adapters), 2.0)[1] < first


def test_node_with_reused_index_was_never_accessed() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree)
    gone = add_kv(tree, adapter)
    policy = Hawkeye(view_of(tree))
    policy.inserted([gone], 0.0)
    before = policy.scores(np.array([gone]), 0.0)[0]
    policy.forgotten([gone])
    tree.remove_kv([gone])
    new = add_kv(tree, adapter)
    assert new == gone
    assert policy.scores(np.array([new]), 0.0)[0] == 0.0
    policy.inserted([new], 1.0)
    assert policy.scores(np.array([new]), 0.0)[0] > before
