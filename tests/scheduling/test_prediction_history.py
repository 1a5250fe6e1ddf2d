"""History: the median of what an adapter answered lately."""

import random

import pytest

from lorikeet.scheduling.prediction import history as module
from lorikeet.scheduling.prediction.history import LengthHistory


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


def test_it_is_the_median_within_what_a_sketch_may_be_off() -> None:
    lengths = random.Random(0).choices(range(1000), k=900)
    predicted = told(LengthHistory(), "a", *lengths).predict("a")
    assert predicted is not None
    rank = sum(length <= predicted for length in lengths) / len(lengths)
    assert rank == pytest.approx(0.5, abs=0.03)


def test_the_base_model_has_a_history_of_its_own() -> None:
    history = told(told(LengthHistory(), "a", *[10] * 30), None, *[90] * 20)
    assert (history.predict(None), history.predict("a")) == (90, 10)


def test_what_was_long_ago_is_forgotten_little_by_little() -> None:
    history = told(LengthHistory(), "a", *[10] * 2000)
    told(history, "a", *[99] * 400)
    assert history.predict("a") == 10, "of the last 500 to 1,000 most are still old"
    told(history, "a", *[99] * 650)
    assert history.predict("a") == 99


def test_so_many_adapters_are_remembered_and_the_most_silent_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ADAPTERS", 2)
    history = told(told(LengthHistory(), "a", *[10] * 20), "b", *[20] * 20)
    told(history, "a", 10)
    told(history, "c", *[30] * 20)
    assert (history.predict("a"), history.predict("c")) == (10, 30)
    everybody = history.predict("nobody")
    assert history.predict("b") == everybody == 20, "b counts among all, and has no history of its own any more"
