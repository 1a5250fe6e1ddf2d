"""Prepares JSON schemas for the parser of grammars, and finds the kinds of values that they allow.

Schemas come from strangers, so every function here takes any JSON and ends.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_MAX_DEPTH = 24
_IN_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "unevaluatedProperties")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_IN_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_REGEX_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|.", re.DOTALL)
_NO_GRAMMAR = re.compile(r"\(\?|\\[bBAzZGk1-9]")
_ANY_TEXT = r"(.|\n)*"

KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
"""Kinds of JSON values; an integer is a number, too."""


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of values that a schema allows: all of ``KINDS`` for ``true`` and ``{}``.

    Args:
        schema: schema of the value.
        root: schema with the definitions that ``schema`` refers to.
    """
    return _kinds(schema, root, {}, 0)


def _kinds(
    schema: Any, root: Mapping[str, Any], of_references: dict[str, frozenset[str]], depth: int
) -> frozenset[str]:
    every = frozenset(KINDS)
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return every
    found = every
    named = schema.get("type")
    if named is not None:
        names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        known = {each for each in KINDS if each in names}
        found &= known | ({"integer"} if "number" in known else set()) if known else every
    if "const" in schema:
        found &= {kind_of(schema["const"])}
    if isinstance(choices := schema.get("enum"), list) and choices:
        found &= {kind_of(each) for each in choices}
    for key in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(key), list) and ways:
            found &= frozenset().union(*(_kinds(each, root, of_references, depth + 1) for each in ways))
    for each in all_of if isinstance(all_of := schema.get("allOf"), list) else ():
        found &= _kinds(each, root, of_references, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in of_references:  # Each reference is followed once, so that circles and long chains end.
            of_references[reference] = every
            of_references[reference] = _kinds(resolved(reference, root), root, of_references, depth + 1)
        found &= of_references[reference]
    return found


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
    return "array" if isinstance(value, Sequence) else "object"


def resolved(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference such as ``#/$defs/Point`` names; True, which allows all, for other forms."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return True
        found = found[key]
    return found


def fixed_values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Any] | None:
    """Return the values of ``enum`` or ``const``, even behind a reference; None if other values are allowed."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(choices := schema.get("enum"), list) and choices:
        return choices
    if "$ref" in schema:
        return fixed_values(resolved(schema["$ref"], root), root, depth + 1)
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) == 1:
        return fixed_values(all_of[0], root, depth + 1)
    return None


class TextLimits(NamedTuple):
    """Limits of a string.

    Attributes:
        shortest, longest: numbers of letters; ``longest`` is None without a limit.
        pattern: regex that a part of the string matches; empty without one.
    """

    shortest: int = 0
    longest: int | None = None
    pattern: str = ""


def text_limits(schema: Any, root: Mapping[str, Any], depth: int = 0) -> TextLimits:
    """Return the limits of a schema of strings, even behind a reference; keywords of other forms are no limits."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return TextLimits()
    if "$ref" in schema:
        return text_limits(resolved(schema["$ref"], root), root, depth + 1)
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) == 1:
        return text_limits(all_of[0], root, depth + 1)
    shortest, longest = (schema.get(key) for key in ("minLength", "maxLength"))
    pattern = schema.get("pattern")
    return TextLimits(
        shortest if type(shortest) is int and shortest > 0 else 0,
        longest if type(longest) is int and longest >= 0 else None,
        pattern if isinstance(pattern, str) else "",
    )


def whole_pattern(pattern: str) -> str:
    """Return a regex of whole strings for a schema's ``pattern``, which a part of a string matches.

    The result is empty for a pattern that no grammar can follow: with anchors inside it, look-around or references.
    """
    tokens = _REGEX_TOKEN.findall(pattern)
    ways: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        if _NO_GRAMMAR.fullmatch(token):
            return ""
        depth += token.startswith("(") - (token == ")")
        if token == "|" and not depth:
            ways.append([])
        else:
            ways[-1].append(token)
    whole = []
    for way in ways:
        begins = way[:1] == ["^"]
        ends = way[-1:] == ["$"]
        inner = way[begins : len(way) - ends]
        if {"^", "$"}.intersection(inner):
            return ""
        whole.append(f"{'' if begins else _ANY_TEXT}({''.join(inner)}){'' if ends else _ANY_TEXT}")
    return "|".join(whole)


def objects_in(schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it, outermost first."""
    if not isinstance(schema, dict) or depth > 4 * _MAX_DEPTH:
        return
    yield schema
    for key in _IN_ONE:
        yield from objects_in(schema.get(key), depth + 1)
    for key in _IN_LIST:
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            yield from objects_in(each, depth + 1)
    for key in _IN_NAMED:
        for each in schema[key].values() if isinstance(schema.get(key), dict) else ():
            yield from objects_in(each, depth + 1)
