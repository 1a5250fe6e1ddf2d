"""Reads calls and values that a model has written in Python."""

import ast
import re
import warnings
from typing import Any

from lorikeet.chat.json_text import max_depth, read_json, with_whole_characters, write_json
from lorikeet.chat.tool_parsers.base import Call

MAX_NAME = 200
NAME = re.compile(r"[\w.:/-]+")
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which models may write instead of Python's."""
_KEYWORD = re.compile(r"\s*([^\s=,'\"()\[\]{}](?:[^=,'\"()\[\]{}]*[^\s=,'\"()\[\]{}])?)\s*=(?!=)")
_MAX_DEPTH = 50
_CLOSING = {")": "(", "]": "[", "}": "{"}


def read_call(source: str) -> Call | None:
    """Return a call such as ``f(x=1, y="a")``; None unless it has only constants, by name.

    Args:
        source: source of the call, up to its last parenthesis.
    """
    name, _, inner = source.strip().partition("(")
    arguments: dict[str, Any] = {}
    if not NAME.fullmatch(name) or not inner.endswith(")"):
        return None
    try:
        for part in _parts(inner[:-1]):
            keyword = _KEYWORD.match(part)
            if keyword is None:
                return None
            arguments[keyword[1]] = read_value(part[keyword.end() :])
        return Call(name, write_json(arguments))
    except ValueError:
        return None


def read_value(source: str) -> Any:
    """Return the value of a constant in JSON or Python.

    Raises:
        ValueError: the source is not a constant, or JSON lacks its value.
    """
    source = source.strip()
    try:
        return read_json(source)
    except ValueError:
        pass
    if max_depth(source) > _MAX_DEPTH or _signs(source) > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escapes.
            value = _value(ast.parse(source, mode="eval").body)
        return read_json(write_json(_joined_halves(value)))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no constant") from error


def _signs(source: str) -> int:
    """Return the length of the longest run of letters that each nest the text behind them."""
    return max(map(len, re.findall(r"[-+~(\s]*", source)), default=0)


def _parts(text: str) -> list[str]:
    """Return the parts of a list of arguments between its commas.

    Raises:
        ValueError: a bracket or a quote is not closed.
    """
    parts = []
    begin = 0
    brackets = []
    quote = ""
    is_escaped = False
    for at, letter in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            brackets.append(letter)
        elif letter in ")]}":
            if not brackets or brackets.pop() != _CLOSING[letter]:
                raise ValueError("brackets do not match")
        elif letter == "," and not brackets:
            parts.append(text[begin:at])
            begin = at + 1
    if brackets or quote:
        raise ValueError("not closed")
    last = text[begin:]
    return [*parts, last] if last.strip() else parts


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


def _joined_halves(value: Any) -> Any:
    """Return a value with whole characters: Python does not join the two escapes that JSON writes for some."""
    match value:
        case str():
            joined = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return with_whole_characters(joined)
        case list():
            return [_joined_halves(each) for each in value]
        case dict():
            return {_joined_halves(key): _joined_halves(each) for key, each in value.items()}
    return value
