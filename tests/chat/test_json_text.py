"""JSON that a model has written, or the beginning of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.chat.json_text import read_arguments, read_json, with_whole_characters

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6) | st.sampled_from(['{"[', "\\", "\n", "🦜"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), ascii_only=st.booleans(), data=st.data())
def test_arguments_that_are_cut_off_anywhere_are_an_object(
    value: dict[str, Any], ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_arguments(text) == with_whole_characters(value)
    cut = read_arguments(text[: data.draw(st.integers(1, len(text)))])
    assert cut.keys() <= with_whole_characters(value).keys()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("null", {}),
        ("[1]", {"arguments": [1]}),
        ('"text"', {"arguments": "text"}),
        ('{"x": "He said "no""}', {"arguments": '{"x": "He said "no""}'}),
        ('{"x": ', {}),
        ('{"x": [1, {"y": "a', {"x": [1, {"y": "a"}]}),
        ('{"x": "a\nb\\ud83e\\udd9c\\ud800"}', {"x": "a\nb🦜\ufffd"}),
        ('{"x": NaN}', {"arguments": '{"x": NaN}'}),
        ('{"x": 1e999}', {"x": 1.7976931348623157e308}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_any_text_makes_arguments(text: str, arguments: dict[str, Any]) -> None:
    assert read_arguments(text) == arguments


@pytest.mark.parametrize("text", ["", "NaN", "{", "[" * 1_000 + "]" * 1_000, "1" * 5_000])
def test_invalid_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own words
        read_json(text)
