"""Kinds of values that a schema allows."""

import re
from typing import Any

import pytest

from lorikeet.chat.json_schema import KINDS, fixed_values, kinds_of, text_limits, whole_pattern

ROOT: dict[str, Any] = {
    "$defs": {"O": {"type": "object"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}},
    "definitions": {"a/b": {"enum": [1, 2]}},
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        (True, KINDS),
        ({}, KINDS),
        (False, ()),
        ({"type": "integer"}, ("integer",)),
        ({"type": "number"}, ("integer", "number")),
        ({"type": ["string", "null"]}, ("null", "string")),
        ({"type": "martian"}, KINDS),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("null", "integer")),
        ({"allOf": [{"$ref": "#/$defs/O"}], "description": "d"}, ("object",)),
        ({"enum": [1, "a", None, 1.5]}, ("null", "integer", "number", "string")),
        ({"const": [1]}, ("array",)),
        ({"$ref": "#/definitions/a~1b"}, ("integer",)),
        ({"$ref": "#/nowhere"}, KINDS),
        ({"$ref": "#/$defs/loop"}, KINDS),
    ],
)
def test_kinds_of_values(schema: Any, kinds: tuple[str, ...]) -> None:
    assert kinds_of(schema, ROOT) == set(kinds)


def test_many_references_take_little_time() -> None:
    chain = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 3} for at in range(200)}
    assert kinds_of({"$ref": "#/$defs/d0"}, {"$defs": chain}) == set(KINDS)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"const": None}, [None]),
        ({"enum": [1, "a"]}, [1, "a"]),
        ({"$ref": "#/definitions/a~1b"}, [1, 2]),
        ({"allOf": [{"$ref": "#/definitions/a~1b"}]}, [1, 2]),
        ({"type": "string"}, None),
        ({"$ref": "#/$defs/loop"}, None),
    ],
)
def test_fixed_values(schema: Any, values: list[Any] | None) -> None:
    assert fixed_values(schema, ROOT) == values


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"^\d{3}-[a-z/]+$", ["123-a/b"], ["x123-a", "123-"]),
        ("b", ["abc", "b", "\nb"], ["ac"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("^(a|b)$", ["a"], ["ab"]),
        (r"^[^$^|]+$", ["a"], ["a$", "|"]),
        (r"^[]a]b", ["]b"], ["b"]),
        (r"^\$\^$", ["$^"], ["^$"]),
        (r"a\\$", ["a\\"], ["a"]),
        ("^(?:ab)+$", ["abab"], ["aba"]),
    ],
)
def test_a_pattern_of_a_part_becomes_a_regex_of_the_whole(pattern: str, matches: list[str], others: list[str]) -> None:
    whole = re.compile(whole_pattern(pattern))
    for text in matches:
        assert whole.fullmatch(text)
        assert re.search(pattern, text)
    for text in others:
        assert not whole.fullmatch(text)
        assert not re.search(pattern, text)


@pytest.mark.parametrize("pattern", ["(^a)", "a$b", "(?=a)b", r"\bfoo", r"(\d)\1", "(?P<a>b)"])
def test_a_pattern_that_no_grammar_can_follow_is_left_out(pattern: str) -> None:
    assert whole_pattern(pattern) == ""


def test_limits_of_a_text_are_found_behind_references() -> None:
    root = {"$defs": {"z": {"allOf": [{"type": "string", "minLength": 2, "maxLength": 3, "pattern": "a"}]}}}
    assert text_limits({"$ref": "#/$defs/z"}, root) == (2, 3, "a")
    assert text_limits({"minLength": "2", "maxLength": True, "pattern": 5}, {}) == (0, None, "")
    assert text_limits({"$ref": "#"}, {"$ref": "#"}) == (0, None, "")
