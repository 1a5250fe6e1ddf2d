"""ELORA-WOM: each entry is scored by its own times."""

import math

import numpy as np
import pytest

from lorikeet.memory.policies.base import LOWEST
from lorikeet.memory.tree import DependencyTree
from lorikeet.papers.elora.wom import Wom
from lorikeet.presets import PRESETS
from tests.memory.trees import (
    add_adapter,
    add_kv,
    view_of,
)
from tests.support.scripted import Bench, request
from tests.support.scripted import adapter as reference


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
