from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.workloads.adapter_choice import ADAPTER_CHOICES, RULES, choose_adapters
from lorikeet.workloads.synthetic import PAPER_RANKS, spread
from lorikeet.workloads.workload import OptionError

MANY = 30_000
EXAMPLES = (
    "uniform round-robin zipf:1 skewed:2 drifting:1:10 functions functions:10 rank-power:1 rank-power:1:1 rank-halving "
    "rank-shifting"
).split()


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rank_shares(rule: str, times_s: np.ndarray) -> list[float]:
    """Shares of the five ranks, 8 first, among 25 adapters."""
    ranks = spread(PAPER_RANKS, 25)
    counts = Counter(choose_adapters(rule, ranks, times_s.tolist(), generator(), ranks))
    return [counts[rank] / len(times_s) for rank in PAPER_RANKS]


def test_every_rule_is_in_an_example_here() -> None:
    assert {example.split(":")[0] for example in EXAMPLES} | {"distinct"} == set(RULES)
    assert "rank-power:A[:B]" in ADAPTER_CHOICES


@given(st.sampled_from(EXAMPLES), st.integers(2, 9), st.lists(st.floats(0, 100), max_size=20), st.integers(0, 9))
def test_each_request_gets_an_adapter_and_the_same_one_for_a_seed(
    rule: str, adapters: int, times_s: list[float], seed: int
) -> None:
    ranks = spread(PAPER_RANKS, adapters)
    chosen = choose_adapters(rule, range(adapters), sorted(times_s), generator(seed), ranks)
    assert len(chosen) == len(times_s)
    assert set(chosen) <= set(range(adapters))
    assert chosen == choose_adapters(rule, range(adapters), sorted(times_s), generator(seed), ranks)


def test_adapters_in_turn_and_each_once() -> None:
    assert choose_adapters("round-robin", "ab", [0.0] * 5, generator()) == ["a", "b", "a", "b", "a"]
    assert choose_adapters("distinct", "abc", [0.0] * 2, generator()) == ["a", "b"]
    with pytest.raises(OptionError, match="3 requests cannot have distinct adapters: there are 2"):
        choose_adapters("distinct", "ab", [0.0] * 3, generator())


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        ("uniform", [1 / 3] * 3),
        ("zipf:1", [6 / 11, 3 / 11, 2 / 11]),
        ("zipf:0", [1 / 3] * 3),
        ("skewed:1", [0.274, 0.452, 0.274]),  # e^-½ = 0.607 beside 1
        ("skewed:0.01", [0, 1, 0]),
    ],
)
def test_random_adapters_have_their_shares(rule: str, shares: list[float]) -> None:
    chosen = choose_adapters(rule, "abc", [0.0] * MANY, generator())
    assert [chosen.count(name) / MANY for name in "abc"] == pytest.approx(shares, abs=0.01)


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        # LoRAServe's figures for its rank-skew sweep and its Exponential trace; Chameleon's for exponent 1.
        ("rank-power:1", [0.438, 0.219, 0.146, 0.110, 0.088]),
        ("rank-power:3", [0.843, 0.105, 0.031, 0.013, 0.007]),
        ("rank-power:0", [0.2] * 5),
        ("rank-halving", [0.5161, 0.2581, 0.1290, 0.0645, 0.0323]),
    ],
)
def test_ranks_have_the_shares_of_the_papers(rule: str, shares: list[float]) -> None:
    assert rank_shares(rule, np.zeros(MANY)) == pytest.approx(shares, abs=0.01)


def test_a_low_exponent_leaves_the_largest_rank_sixteen_percent() -> None:
    """LoRAServe, section V-H: at exponent 1/3 about 16 % of requests have rank 128."""
    assert rank_shares("rank-power:0.3333333333", np.zeros(MANY))[-1] == pytest.approx(0.158, abs=0.01)


@pytest.mark.parametrize(
    ("passed", "shares"),
    [
        (0.0, [0.125, 0.125, 0.125, 0.125, 0.5]),
        (0.5, [0.3125, 0.125, 0.125, 0.125, 0.3125]),
        (1.0, [0.5, 0.125, 0.125, 0.125, 0.125]),
    ],
)
def test_half_of_the_requests_shift_from_the_largest_rank_to_the_smallest(passed: float, shares: list[float]) -> None:
    times_s = np.concatenate([[0.0], np.full(MANY, 100 + 50 * passed), [150.0]])
    times_s[0] = 100.0
    assert rank_shares("rank-shifting", times_s) == pytest.approx(shares, abs=0.01)


def test_within_a_rank_popularity_is_flat_or_zipfs() -> None:
    """LoRAServe's relabelling: ten adapters of a rank, Zipf with exponent 1; the first has 34 % of them."""
    for rule, share in (("rank-power:1", 0.1), ("rank-power:1:1", 0.3414)):
        chosen = choose_adapters(rule, range(10), [0.0] * MANY, generator(), [8] * 10)
        assert chosen.count(0) / MANY == pytest.approx(share, abs=0.01)


def test_popular_adapters_move_on_with_time() -> None:
    chosen = choose_adapters("drifting:9:10", "abc", [5, 14.9, 15, 25, 35], generator())
    assert chosen == ["a", "a", "b", "c", "a"]


@pytest.mark.parametrize(
    "rule",
    ["zipf", "zipf:x", "zipf:nan", "uniform:2", "favourite", "skewed:0", "drifting:1", "drifting:1:0", "rank-power"],
)
def test_an_unknown_choice_of_adapters_is_refused(rule: str) -> None:
    with pytest.raises(OptionError, match=rule.split(":")[0]):
        choose_adapters(rule, "abc", [0.0] * 3, generator(), [8, 16, 32])


def test_a_rule_over_ranks_needs_ranks() -> None:
    with pytest.raises(OptionError, match="'rank-power:1' needs the adapters' ranks"):
        choose_adapters("rank-power:1", "abc", [0.0], generator())
    with pytest.raises(OptionError, match="at least two ranks"):
        choose_adapters("rank-shifting", "abc", [0.0], generator(), [8, 8, 8])
