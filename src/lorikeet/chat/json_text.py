"""Reads JSON that a model or a client has written, which may be cut off, too deep, or no JSON at all."""

import json
import re
import sys
from typing import Any

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_DEPTH = 200
"""Values nested more deeply are no JSON here: to read and write them would end in a RecursionError."""
_OPENING = "{["
_CLOSING = {"{": "}", "[": "]"}


def read_json(text: str) -> Any:
    """Return the value of a JSON text; its strings have whole characters only.

    Raises:
        ValueError: the text is no JSON, holds a word such as NaN, or is nested too deeply.
    """
    if max_depth(text) > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, strict=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return with_whole_characters(value)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _finite(text: str) -> float:
    """Return a number, the largest there is for one that is larger."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def max_depth(text: str) -> int:
    """Return how deeply brackets outside strings are nested."""
    deepest = depth = 0
    is_string = is_escaped = False
    for letter in text:
        if is_string:
            if is_escaped:
                is_escaped = False
            elif letter == "\\":
                is_escaped = True
            elif letter == '"':
                is_string = False
        elif letter == '"':
            is_string = True
        elif letter in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "}]":
            depth -= 1
    return deepest


def write_json(value: Any) -> str:
    """Return a value as JSON, with all letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def with_whole_characters(value: Any) -> Any:
    """Return a JSON value whose texts can be encoded: half a character becomes U+FFFD."""
    match value:
        case str():
            return _LONE_SURROGATES.sub("\ufffd", value) if not value.isascii() else value
        case list():
            return [with_whole_characters(each) for each in value]
        case dict():
            return {with_whole_characters(key): with_whole_characters(each) for key, each in value.items()}
    return value


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, of which a model may have written only the beginning, or no object.

    An object that was cut off is closed where it ends; a property whose value had not begun is left out. Of other text
    the object has the whole as ``arguments``, so that nothing is lost.
    """
    if not text.strip():
        return {}
    for candidate in (text, closed_object(text)):
        try:
            value = read_json(candidate)
        except ValueError:
            continue
        return value if isinstance(value, dict) else {} if value is None else {"arguments": value}
    return {"arguments": with_whole_characters(text)}


def closed_object(text: str) -> str:
    """Return an object that was cut off, closed where it can be; other text as it is."""
    if not text.lstrip().startswith("{"):
        return text
    open_brackets: list[str] = []
    ends = [0]
    """At each depth the position up to which the text can be kept if nothing complete follows."""
    is_string = is_escaped = False
    is_key = True
    after = ""  # the last letter outside strings that is no space
    begin = 0
    for at, letter in enumerate(text):
        if is_string:
            if is_escaped:
                is_escaped = False
            elif letter == "\\":
                is_escaped = True
            elif letter == '"':
                is_string = False
                if not is_key:
                    ends[-1] = at + 1
        elif letter == '"':
            is_string = True
            begin = at
            is_key = bool(open_brackets) and open_brackets[-1] == "{" and after in "{,"
        elif letter in _OPENING:
            open_brackets.append(letter)
            ends.append(at + 1)
        elif letter in "}]":
            if not open_brackets or _CLOSING[open_brackets.pop()] != letter:
                return text
            ends.pop()
            ends[-1] = at + 1
        elif letter == ",":
            ends[-1] = at
        if not letter.isspace():
            after = letter
    if not open_brackets:
        return text
    closing = "".join(_CLOSING[each] for each in reversed(open_brackets))
    if is_string and not is_key:
        string = _shortened(text[begin:], is_escaped=is_escaped)
        return text[:begin] + string + '"' + closing
    rest = text[ends[-1] :]
    value = rest.rpartition(":")[2].strip(" \t\r\n,")
    if open_brackets[-1] == "[" or (":" in rest and not is_string):
        try:
            read_json(value)
        except ValueError:
            pass
        else:
            return text.rstrip() + closing
    return text[: ends[-1]] + closing


def _shortened(string: str, *, is_escaped: bool) -> str:
    r"""Return a string that was cut off without half an escape, such as ``\`` or ``\u00``."""
    if is_escaped:
        return string[:-1]
    cut = re.search(r"(?<!\\)(?:\\\\)*(\\u[0-9a-fA-F]{0,3})$", string)
    return string if cut is None else string[: cut.start(1)]
