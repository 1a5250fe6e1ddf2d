"""The search for the adapter whose examples are nearest to a prompt."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.chat.nearest_examples import NearestExamples, used_part

EXAMPLES = {
    "french": [
        "Translate into French: The train leaves at noon.",
        "How do you say thank you in French?",
        "Please put this sentence into French: I am hungry.",
    ],
    "sql": [
        "Write an SQL query that counts orders by customer.",
        "SQL: join the tables users and payments.",
        "Which SQL query lists all products without stock?",
    ],
}


def test_a_prompt_goes_to_the_adapter_with_the_nearest_examples() -> None:
    nearest = NearestExamples(EXAMPLES)
    found = nearest.nearest("Translate into French: The shop is closed.")
    assert found.name == "french"
    assert found.why.startswith("french: similarity 0.")
    assert nearest.nearest("An SQL query for the sum of all payments, please").name == "sql"
    for name, examples in EXAMPLES.items():
        assert {nearest.nearest(example).name for example in examples} == {name}


@pytest.mark.parametrize("prompt", ["Who was the first person on Mars?", "", " \n", "!!!", "日本語の文"])
def test_a_prompt_that_is_near_no_example_goes_to_the_base(prompt: str) -> None:
    found = NearestExamples(EXAMPLES).nearest(prompt)
    assert found.name == ""
    assert found.why.startswith("none: the nearest is ")


def test_words_of_languages_without_spaces_are_compared() -> None:
    nearest = NearestExamples({**EXAMPLES, "japanese": ["天気を教えてください", "明日の天気を教えて", "東京の天気は"]})
    assert nearest.nearest("大阪の天気を教えてください").name == "japanese"


def test_a_single_adapter_learns_its_threshold_from_its_own_examples() -> None:
    nearest = NearestExamples({"french": EXAMPLES["french"]})
    assert 0 < nearest.threshold < 1
    assert nearest.nearest("Translate into French: The shop is closed.").name == "french"
    assert nearest.nearest("SQL: join two tables").name == ""


def test_examples_that_have_nothing_in_common_choose_nobody() -> None:
    nearest = NearestExamples({"odd": ["abc", "xyz"]})
    assert nearest.nearest("hello").name == ""
    assert NearestExamples({}).nearest("hello") == ("", "no adapter that the key may use has examples")


def test_adapters_with_the_same_examples_count_as_one() -> None:
    twins = NearestExamples({**EXAMPLES, "french-v2": EXAMPLES["french"], "a-repeated": EXAMPLES["sql"] * 2})
    assert math.isclose(twins.threshold, NearestExamples(EXAMPLES).threshold)
    assert twins.nearest("Translate into French: The shop is closed.").name == "french"
    assert twins.nearest("SQL: join two tables").name == "a-repeated"


def test_the_beginning_and_the_end_of_a_long_prompt_count() -> None:
    assert len(used_part("x" * 10**6)) == 4001
    assert used_part(used_part("ab" * 10**5)) == used_part("ab" * 10**5)
    nearest = NearestExamples(EXAMPLES)
    filler = "Translate into French: The train leaves at noon. " * 40
    assert nearest.nearest(filler + "unseen " * 10**5 + filler).name == "french"


def test_the_choice_is_the_same_in_every_process() -> None:
    source = (
        "from lorikeet.chat.nearest_examples import NearestExamples as N;"
        f"n = N({EXAMPLES!r}); print(repr(n.threshold), *map(repr, n.similarities('Say in French: a query')))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", source], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@given(
    st.dictionaries(st.text(max_size=3), st.lists(st.text(min_size=1), min_size=1, max_size=5), max_size=5), st.text()
)
def test_any_texts_are_searched(examples: dict[str, list[str]], prompt: str) -> None:
    nearest = NearestExamples(examples)
    assert nearest.nearest(prompt).name in {"", *examples}
    assert all(-1e-9 <= each <= 1 + 1e-9 for each in nearest.similarities(prompt))
