"""History: the median of what an adapter answered lately."""

import random
from collections import Counter

import pytest

from lorikeet.scheduling.prediction import history as module
from lorikeet.scheduling.prediction.history import LengthHistory
from lorikeet.workloads.predictors import NoisyOracle


def told(history: LengthHistory, adapter: str | None, *lengths: int) -> LengthHistory:
    for tokens in lengths:
        history.add(adapter, tokens)
    return history


def test_nothing_is_known_at_first() -> None:
    assert LengthHistory().predict("a") is None


def test_an_adapter_is_judged_by_all_answers_until_it_has_given_twenty() -> None:
    history = told(LengthHistory(), "a", *[10] * 100)
    told(history, "b", *[50] * 19)
    assert (history.predict("b"), history.predict(None)) == (10, 10)
    told(history, "b", 50)
    assert (history.predict("b"), history.predict("a"), history.predict(None)) == (50, 10, 10)


@pytest.mark.parametrize("count", [20, 501, 900, 1000])
def test_it_is_the_median(count: int) -> None:
    lengths = random.Random(0).choices(range(1000), k=count)
    assert told(LengthHistory(), "a", *lengths).predict("a") == sorted(lengths)[count // 2]


def test_equal_answers_give_equal_predictions() -> None:
    lengths = random.Random(1).choices(range(1000), k=1700)
    first = LengthHistory()
    second = LengthHistory()
    for tokens in lengths:
        told(first, "a", tokens)
        told(second, "a", tokens)
        assert first.predict("a") == second.predict("a"), "a simulation could not be repeated"


def test_the_base_model_has_a_history_of_its_own() -> None:
    history = told(told(LengthHistory(), "a", *[10] * 30), None, *[90] * 20)
    assert (history.predict(None), history.predict("a")) == (90, 10)


def test_what_was_long_ago_is_forgotten_little_by_little() -> None:
    history = told(LengthHistory(), "a", *[10] * 2000)
    told(history, "a", *[99] * 400)
    assert history.predict("a") == 10, "of the last 500 to 1,000 most are still old"
    told(history, "a", *[99] * 650)
    assert history.predict("a") == 99


def test_least_recently_used_adapter_is_forgotten_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ADAPTERS", 2)
    history = told(told(LengthHistory(), "a", *[10] * 20), "b", *[20] * 20)
    told(history, "a", 10)
    told(history, "c", *[30] * 20)
    assert (history.predict("a"), history.predict("c")) == (10, 30)
    everybody = history.predict("nobody")
    assert history.predict("b") == everybody == 20, "b counts among all, and has no history of its own any more"


# --- The oracle: right as often as it is told to be, and never by chance where it is to be wrong ---

LENGTHS = list(range(1, 101))
"""Quintiles: 1 to 20, 21 to 40, …"""


def quintile(tokens: int) -> int:
    return (tokens - 1) // 20


@pytest.mark.parametrize("accuracy", [0.6, 0.8, 1.0])
def test_it_tells_the_true_length_as_often_as_asked_for(accuracy: float) -> None:
    oracle = NoisyOracle(accuracy, LENGTHS)
    right = sum(oracle.predict(str(number), 1 + number % 100) == 1 + number % 100 for number in range(5000))
    assert right / 5000 == pytest.approx(accuracy, abs=0.03)


def test_a_miss_lies_in_another_quintile_and_all_others_are_equally_likely() -> None:
    oracle = NoisyOracle(0.0, LENGTHS)
    told = Counter(quintile(oracle.predict(str(number), 50)) for number in range(4000))
    assert told.keys() == {0, 1, 3, 4}
    assert all(count == pytest.approx(1000, rel=0.15) for count in told.values())


def test_prediction_does_not_depend_on_earlier_requests() -> None:
    first, second = NoisyOracle(0.5, LENGTHS), NoisyOracle(0.5, LENGTHS)
    names = [str(number) for number in range(50)]
    forwards = {name: first.predict(name, 30) for name in names}
    backwards = {name: second.predict(name, 30) for name in reversed(names)}
    assert forwards == backwards
    assert forwards != {name: NoisyOracle(0.5, LENGTHS, seed=1).predict(name, 30) for name in names}


def test_more_accurate_predictor_is_right_where_a_less_accurate_one_is() -> None:
    worse, better = NoisyOracle(0.6, LENGTHS), NoisyOracle(0.8, LENGTHS)
    right = [name for name in map(str, range(300)) if worse.predict(name, 30) == 30]
    assert right
    assert all(better.predict(name, 30) == 30 for name in right)


def test_equal_lengths_are_one_class() -> None:
    lengths = [5] * 70 + [9] * 30
    oracle = NoisyOracle(0.0, lengths)
    assert {oracle.predict(str(number), 5) for number in range(50)} == {9}
    assert {oracle.predict(str(number), 9) for number in range(50)} == {5}
    assert NoisyOracle(0.0, [5, 5, 5]).predict("x", 5) == 5, "there is no other class"


@pytest.mark.parametrize(("accuracy", "lengths"), [(1.2, [1]), (-0.1, [1]), (0.5, [])])
def test_nonsense_is_refused(accuracy: float, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"accuracy|lengths"):
        NoisyOracle(accuracy, lengths)
