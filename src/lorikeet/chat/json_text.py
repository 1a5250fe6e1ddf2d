"""Reads text that a model or a client wrote as JSON, and that may be cut off, too deep or not JSON at all."""

import json
import re
import sys
from typing import Any

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_DEPTH = 200
"""Most levels of nested values; reading and writing deeper values would raise RecursionError."""
_OPENING = "{["
_CLOSING = {"{": "}", "[": "]"}


def read_json(text: str) -> Any:
    """Return the value of a JSON text, with only whole characters in its strings.

    Raises:
        ValueError: the text is not JSON, contains a word such as NaN, or is nested too deeply.
    """
    if max_depth(text) > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, strict=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return with_whole_characters(value)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    """Return a number, limited to the largest float."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def max_depth(text: str) -> int:
    """Return the depth of nested brackets outside strings."""
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
    """Return a value as JSON, without escapes for letters beyond ASCII."""
    return json.dumps(value, ensure_ascii=False)


def with_whole_characters(value: Any) -> Any:
    """Return a JSON value with U+FFFD for each half of a character, so that its texts can be encoded."""
    match value:
        case str():
            return _LONE_SURROGATES.sub("\ufffd", value) if not value.isascii() else value
        case list():
            return [with_whole_characters(each) for each in value]
        case dict():
            return {with_whole_characters(key): with_whole_characters(each) for key, each in value.items()}
    return value


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, whose text may be cut off or not an object.

    An object that was cut off is closed where it ends, without a property whose value had not begun. Other text becomes
    the property ``arguments`` as a whole, so that nothing is lost.
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
    """Return an object that was cut off as a closed object; return other text unchanged."""
    if not text.lstrip().startswith("{"):
        return text
    open_brackets: list[str] = []
    ends = [0]
    """Position, for each depth, up to which the text is kept if nothing complete follows."""
    is_string = is_escaped = False
    is_key = True
    after = ""  # The last letter outside strings, spaces apart.
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
    r"""Return a string that was cut off, without half an escape such as ``\`` or ``\u00`` at its end."""
    if is_escaped:
        return string[:-1]
    cut = re.search(r"(?<!\\)(?:\\\\)*(\\u[0-9a-fA-F]{0,3})$", string)
    return string if cut is None else string[: cut.start(1)]
