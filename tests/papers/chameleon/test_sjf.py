"""Shortest job first, with and without aging."""

import pytest

from lorikeet.papers.chameleon.sjf import ShortestFirst
from tests.support.admission_queues import View, admitted, filled, made, order


def test_the_shortest_expected_answer_goes_first() -> None:
    requests = [
        made("long", 0.0, answer_tokens=50),
        made("predicted", 1.0, answer_tokens=50, predicted_tokens=5),
        made("short", 2.0, answer_tokens=10),
        made("later", 3.0, answer_tokens=10),
    ]
    assert order("sjf", requests) == ["predicted", "short", "later", "long"]


def test_aging_lets_a_long_one_be_overtaken_only_for_so_long() -> None:
    queue = filled(
        ShortestFirst(View(), gamma=2.0),
        [
            made("long", 0.0, answer_tokens=50),
            made("before", 24.0, answer_tokens=1),
            made("after", 25.0, answer_tokens=1),
        ],
    )
    # 50 - 2 × 0 beside 1 - (-2) × 24 = 49 and 51.
    assert admitted(queue) == ["before", "long", "after"]


@pytest.mark.parametrize(("gamma", "waits"), [(0.0, 200), (1.0, 39)])
def test_a_long_one_starves_without_aging_and_not_with_it(gamma: float, waits: int) -> None:
    queue = ShortestFirst(View(), gamma=gamma)
    queue.add(made("long", 0.0, answer_tokens=40), 0.0)
    for second in range(200):
        queue.add(made(f"short-{second}", float(second), answer_tokens=1), float(second))
        if admitted(queue, most=1) == ["long"]:
            break
    else:
        second = 200
    assert second == waits
