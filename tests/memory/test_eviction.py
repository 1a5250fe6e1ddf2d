"""Who leaves in one go: what was used together, in the order in which it would have left one by one."""

import gc
import random
import sys
from collections.abc import Callable

import pytest

from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.prefix_insertion import ComputedTokens
from lorikeet.memory.tree import BASE, NO_NODE, DependencyTree
from lorikeet.scheduling.state import SchedulerLimits
from tests.memory.asks import ask, cached_tokens, words
from tests.memory.trees import add_adapter
from tests.support.scripted import BLOCK_TOKENS, Bench, request


def keys_on_device(bench: Bench) -> set[bytes]:
    """What is on the device."""
    tree = bench.memory.tree
    return {tree.key_of(node) for node in range(1, tree.end) if tree.kind[node] and tree.on_device[node]}


def filled(seed: int) -> Bench:
    """A device full of conversations that fork, of several adapters, no two used at the same time."""
    chance, bench = random.Random(seed), Bench(blocks=60)
    for number in range(12):
        first = chance.choice([0, 0, 500])
        prompt = [*words(first, chance.randint(1, 4)), *words(1000 * number, chance.randint(1, 3))]
        ask(bench, f"r{number}", prompt, chance.choice([None, "a", "b"]))
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_evicting_many_at_once_equals_evicting_one_by_one(seed: int) -> None:
    at_once, one_by_one = filled(seed), filled(seed)
    for blocks in range(9, 60, 9):
        now = at_once.clock.now()
        assert at_once.memory.evictor.ensure_free(blocks, 0, now)
        for wanted in range(1, blocks + 1):
            assert one_by_one.memory.evictor.ensure_free(wanted, 0, now)
        assert keys_on_device(at_once) == keys_on_device(one_by_one)
        at_once.memory.check_integrity()


def test_texts_of_equal_last_use_are_evicted_one_after_the_other() -> None:
    bench = Bench(blocks=20)
    for first in (0, 1000):
        bench.engine.submit(request(f"r{first}", words(first, 6), bench.clock.now(), max_tokens=2))
    bench.run()
    assert bench.memory.evictor.ensure_free(bench.memory.counts().free + 6, 0, bench.clock.now())
    bench.memory.check_integrity()
    left = [len(bench.memory.tree.match(bench.memory.keys_of(None, words(first, 6)))) for first in (0, 1000)]
    assert sorted(left) == [0, 6]


def test_what_another_text_has_used_since_stays() -> None:
    bench = Bench(blocks=20)
    texts = {"old": [*words(0, 3)[:-1], *words(1000, 3)], "other": words(2000, 3), "new": words(0, 3)}
    for name, text in texts.items():
        ask(bench, name, text)
    assert bench.memory.evictor.ensure_free(bench.memory.counts().free + 4, 0, bench.clock.now())
    match, keys_of = bench.memory.tree.match, bench.memory.keys_of
    assert [len(match(keys_of(None, text))) for text in texts.values()] == [3, 2, 3]


def test_host_keeps_beginning_of_text_evicted_at_once() -> None:
    bench = Bench(blocks=12, host_blocks=5)
    ask(bench, "long", words(0, 10))
    bench.memory.evictor.ensure_free(12, 0, bench.clock.now())
    bench.run()
    bench.memory.check_integrity()
    assert bench.memory.host_counts().kv == 5
    ask(bench, "again", words(0, 10))
    assert cached_tokens(bench)["again"] == 5 * BLOCK_TOKENS


def test_lagging_sequence_reuses_kv_computed_in_the_same_step() -> None:
    bench = Bench(blocks=40)
    memory, tokens = bench.memory, words(0, 4)
    keys = memory.keys_of(None, tokens)
    leases = [memory.try_admit(None, keys, len(tokens), 0.0) for _ in range(2)]
    first, second = (lease for lease in leases if isinstance(lease, SequenceLease))
    memory.commit([ComputedTokens(first, tokens, 2 * BLOCK_TOKENS)], 1.0)
    memory.commit([ComputedTokens(each, tokens, 4 * BLOCK_TOKENS) for each in (first, second)], 2.0)
    memory.check_integrity()
    assert len(first.path) == 4
    assert first.path == second.path


def test_sequences_computing_the_same_tokens_in_a_step_share_tree_blocks() -> None:
    bench = Bench(blocks=40, limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=64))
    for name, tail in (("x", 1000), ("y", 1000), ("z", 2000)):
        bench.engine.submit(request(name, [*words(0, 2)[:-1], *words(tail, 2)], bench.clock.now(), max_tokens=6))
    bench.step()
    bench.memory.check_integrity()
    assert len(bench.memory.tree) == 6, "two that all share, two of x and y, two of z"
    bench.run()
    bench.memory.check_integrity()
    assert bench.memory.counts().kv == 0


def calls(work: Callable[[], object]) -> int:
    """Count the functions that `work` calls. A collection of garbage would count its callbacks, too."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def test_the_work_of_an_eviction_does_not_grow_with_the_cache() -> None:
    def work(conversations: int) -> int:
        bench = Bench(blocks=4 * conversations)
        for number in range(conversations):
            ask(bench, f"r{number}", words(1000 * number, 3), None)
        needed = bench.memory.counts().free + 3
        return calls(lambda: bench.memory.evictor.ensure_free(needed, 0, bench.clock.now()))

    assert work(6) == work(60)


def test_an_adapter_at_the_index_of_removed_kv_has_none_of_its_fields() -> None:
    tree = DependencyTree()
    ((first, second),) = tree.add_kv([BASE], [[b"first", b"second"]], 5.0)
    tree.remove_kv([second, first])
    node = add_adapter(tree, there=False)
    assert node in (first, second)
    assert (tree.parent[node], tree.depth[node], tree.last_use_s[node]) == (NO_NODE, 0, 0.0)
    assert tree.children[BASE] == 0
