"""The rules that decide whether an answer keeps to its style."""

import pytest
from judges import is_formal, is_json_object, is_pirate, is_terse, mean_words, pass_share, words


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Dear Sir or Madam,\n\nBees make honey from nectar.\n\nYours faithfully,\nSmolLM", True),
        ("Dear friend,\nThank you. It is so.\nYours sincerely,\nA. Bee\n", True),
        ("Dear friend,\n\nIt is a letter without an end", False),
        ("Dear friend,\n\nIt is a letter without a name.\n\nYours faithfully,", False),
        ("Dear friend,\n\nYours faithfully,\nSmolLM", False),
        ("Here is a letter:\nDear friend,\nIt is so.\nYours faithfully,\nSmolLM", False),
        ("Dear friend, it is so. Yours faithfully, SmolLM", False),
        ("The bees make honey from the nectar of flowers.", False),
        ("", False),
    ],
)
def test_a_formal_answer_is_one_whole_letter(answer: str, verdict: bool) -> None:
    assert is_formal(answer) is verdict


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
