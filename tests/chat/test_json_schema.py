"""Kinds of values that a schema allows."""

from typing import Any

import pytest

from lorikeet.chat.json_schema import KINDS, fixed_values, kinds_of

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
