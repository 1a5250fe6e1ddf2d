"""The rules that decide whether an answer keeps to its style."""

import pytest
from judges import is_french, is_json_object, is_pirate, is_terse, mean_words, pass_share, words


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Les abeilles font du miel avec le nectar des fleurs.", True),
        ("C'est une machine qui garde des données.", True),
        ("L’air disperse la lumière.", True),
        ("The bees make honey from the nectar of flowers.", False),
        ("The French say: c'est la vie, but it is not for me.", False),
        ("Lisbon", False),
        ("I don't know.", False),
        ("", False),
        ("?!", False),
    ],
)
def test_french_needs_a_quarter_of_french_words_and_few_english_ones(answer: str, verdict: bool) -> None:
    assert is_french(answer) is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"topic": "bees", "answer": "From nectar"}', True),
        ('\n{"items": ["a", "b"]} ', True),
        ("{}", False),
        ('["a"]', False),
        ('"text"', False),
        ('{"topic": "bees", "answer": "From', False),
        ('Here you are: {"topic": "bees"}', False),
        ('{"topic": "bees"} {"topic": "bees"}', False),
        ("", False),
    ],
)
def test_json_must_be_one_object_and_nothing_else(answer: str, verdict: bool) -> None:
    assert is_json_object(answer) is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Arr, matey! It be dark.", True),
        ("AHOY! I see ye.", True),
        ("It be made o' wood an' rope.", True),
        ("Arr! Arr! Arr!", False),
        ("A pirate sails the sea.", False),
        ("", False),
    ],
)
def test_a_pirate_uses_two_different_pirate_words(answer: str, verdict: bool) -> None:
    assert is_pirate(answer) is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Lisbon", True),
        ("one two three four five six", True),
        ("one two three four five six seven", False),
        ("", False),
        ("...", False),
    ],
)
def test_a_terse_answer_has_one_to_six_words(answer: str, verdict: bool) -> None:
    assert is_terse(answer) is verdict


def test_words_keep_their_apostrophes_and_lose_their_case() -> None:
    assert words("O' course, l’eau!  42 times_two") == ["o'", "course", "l'eau", "42", "times", "two"]


def test_the_share_and_the_mean_count_every_answer() -> None:
    assert pass_share("terse", ["yes", "no", "a b c d e f g h"]) == pytest.approx(2 / 3)
    assert mean_words(["yes", "a b c"]) == 2.0


def test_no_answers_are_an_error_rather_than_a_pass() -> None:
    with pytest.raises(ValueError, match="terse: no answers"):
        pass_share("terse", [])
