"""Reads and writes calls of Qwen 3 Coder: one tag for each parameter, with its value as plain text.

<tool_call>
<function=f>
<parameter=x>
1
</parameter>
</function>
</tool_call>
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from lorikeet.chat.json_schema import KINDS, fixed_values, kind_of, kinds_of, text_limits, whole_pattern
from lorikeet.chat.json_text import write_json
from lorikeet.chat.tool_parsers.base import (
    Call,
    CallGrammar,
    Output,
    Parameters,
    Reads,
    ToolFormat,
    after_space,
    as_object,
    content_until,
    end_tag,
    literal,
    passed_until,
    rest_of,
    structure_until,
    text_until,
)
from lorikeet.chat.tool_parsers.python_text import read_value

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_NEWLINE = "\n"
_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _END)
"""Tags that may end a value, since models forget some of them."""
_KEY = re.compile(r"[^>\n]+")
_PLAIN_KINDS = frozenset({"null", "boolean", "integer", "number", "string"})
_PLAIN_WORDS = ("null", "None", "true", "True", "false", "False")
_PLAIN_NUMBER = re.compile(r"[\d.][\w.+-]*")
_AROUND_PLAIN = re.compile(r"#[^\n]*|[\\()]")
"""Comments, continued lines and brackets, with which Python may write a constant."""
_LONGEST_COUNTED = 512
"""Letters up to which a grammar limits a text; more take too long to compile together with a pattern."""
_MOST_PLAIN = 200
"""Letters of a value after which it is no longer compared with null, booleans and numbers."""


class _Value:
    """Value of a parameter: one description makes its grammar, reads it and writes it.

    A value that may be a string is plain text, even if it may also be another kind; any other value is JSON. Reading
    prefers the other kinds to a string.

    Args:
        key: the parameter's name.
        function: the function's schema.
    """

    def __init__(self, key: str, function: Parameters) -> None:
        properties = function.get("properties")
        schema = properties.get(key, True) if isinstance(properties, Mapping) else True
        self._key = key
        self._function = function
        self._schema = schema
        self._kinds = kinds_of(schema, function)
        self._fixed = fixed_values(schema, function)

    def grammar(self, grammar: CallGrammar) -> str:
        """Return the grammar of the value and its end."""
        end = literal(f"{_NEWLINE}{_PARAMETER_END}{_NEWLINE}")
        if self._fixed is not None:
            texts = dict.fromkeys(map(_written, self._fixed))
            return f"({' | '.join(literal(text) for text in texts)}) {end}"
        if "string" not in self._kinds:
            return f"{grammar.json_property(self._function, self._key)} {end}"
        # The value and its end are one lexeme, since a text would include the newline before the end.
        last = r"\n<\/parameter>\n"
        markers = "|".join(re.escape(each).replace("/", r"\/") for each in _ENDS)
        parts = [rf"/(.|\n)*{last}/", rf"~/(.|\n)*({markers})(.|\n)*{last}/"]
        return grammar.terminal(" & ".join([*parts, *self._limits(last)]))

    def _limits(self, last: str) -> Iterator[str]:
        """Yield regexes of the schema's length and pattern, for a value that is always a string, and ``last``."""
        if self._kinds != {"string"}:
            return
        limits = text_limits(self._schema, self._function)
        shortest = min(limits.shortest, _LONGEST_COUNTED)
        longest = limits.longest if limits.longest is not None and limits.longest <= _LONGEST_COUNTED else None
        if longest is not None and shortest > longest:
            raise ValueError(f"the argument {self._key[:100]!r} has a minLength above its maxLength")
        if shortest or longest is not None:
            yield rf"/(.|\n){{{shortest},{'' if longest is None else longest}}}{last}/"
        if limits.pattern and (pattern := whole_pattern(limits.pattern)):
            yield f"/({regex_to_lark(pattern, 'dws')}){last}/"

    def is_text(self, begin: str) -> bool:
        """Return whether every value that starts with ``begin`` is a string."""
        if self._kinds in (frozenset(KINDS), frozenset({"string"})):
            return True
        if self._fixed is not None or "string" not in self._kinds or not self._kinds <= _PLAIN_KINDS:
            return False
        return len(begin) <= _MOST_PLAIN and not _may_be_plain(begin)

    def read(self, text: str) -> str:
        """Return a parameter's text as JSON: a value that its schema allows, else a string."""
        text = text.removeprefix(_NEWLINE).removesuffix(_NEWLINE)
        is_known = self._kinds != frozenset(KINDS)
        if is_known and self._kinds - {"string"}:
            try:
                value = read_value(text)
            except ValueError:
                return write_json(text)
            is_fixed = self._fixed is None or (value in self._fixed and not (text in self._fixed and value != text))
            if kind_of(value) in self._kinds - {"string"} and is_fixed:
                return write_json(value)
        return write_json(text)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else write_json(value)


def _may_be_plain(begin: str) -> bool:
    """Return whether a text may begin null, a boolean or a number, in JSON or Python."""
    words = _AROUND_PLAIN.sub(" ", begin).split()
    while words and not words[0].strip("+-"):
        words.pop(0)
    if len(words) != 1:
        return not words
    word = words[0].lstrip("+-")
    return any(each.startswith(word) for each in _PLAIN_WORDS) or bool(_PLAIN_NUMBER.fullmatch(word))


class _Argument:
    """Passes a parameter on as JSON: a string while it is written, any other value at its end.

    Args:
        output: takes the JSON text.
        value: the parameter's value.
    """

    def __init__(self, output: Output, value: _Value) -> None:
        self._output = output
        self._value = value
        self._held: list[str] = []
        """Letters that are not passed on yet; of a string only a newline, which may belong to the end tag."""
        self._is_text = False

    def add(self, letters: str) -> None:
        """Add letters of the value."""
        self._held.append(letters)
        if not self._is_text:
            if len(self._held) > _MOST_PLAIN or not self._value.is_text("".join(self._held)):
                return
            self._is_text = True
            self._output.arguments(': "')
            self._held = ["".join(self._held).removeprefix(_NEWLINE)]
        text = "".join(self._held)
        self._held = [_NEWLINE] if text.endswith(_NEWLINE) else []
        self._pass_on(text.removesuffix(_NEWLINE))

    def end(self) -> None:
        """End the value at its end tag."""
        if self._is_text:
            self._output.arguments('"')
        else:
            self._output.arguments(f": {self._value.read(''.join(self._held))}")

    def cut(self) -> None:
        """End the value at the end of the text: a string that is not closed."""
        if not self._is_text:
            self._output.arguments(': "')
        text = "".join(self._held)
        self._pass_on(text if self._is_text else text.removeprefix(_NEWLINE))

    def _pass_on(self, text: str) -> None:
        self._output.arguments(write_json(text)[1:-1])


class _Reader:
    """Reads calls, and distinguishes text and numbers by the schemas of the functions."""

    def __init__(self, functions: Mapping[str, Parameters]) -> None:
        self._functions = functions

    def __call__(self, output: Output) -> Reads[None]:
        while marker := (yield from content_until(output, _BEGIN, _FUNCTION)):
            output.suspect(marker)
            while marker == _BEGIN:
                letter = yield from after_space()
                marker = yield from rest_of(letter, _BEGIN, _FUNCTION)
            if not marker:
                output.give_back()
                continue
            name, end = yield from text_until(">", _NEWLINE)
            if not end:
                return
            if end == _NEWLINE or not name.strip():
                output.give_back()
                continue
            output.start(name.strip())
            yield from self._parameters(output, name.strip())

    def _parameters(self, output: Output, function: str) -> Reads[None]:
        """Read parameters up to the end of the call; keep the beginning of a parameter that is cut off."""
        schema = self._functions.get(function, {})
        opening = "{"
        marker = _PARAMETER_END
        while True:
            if marker != _PARAMETER:
                marker = yield from structure_until(output, _PARAMETER, _FUNCTION_END, _BEGIN, _END)
            if marker != _PARAMETER:
                if marker:
                    output.arguments("{}" if opening == "{" else "}")
                break
            name, end = yield from text_until(">", _NEWLINE, "<")
            if end and (end != ">" or not name.strip()):  # Models sometimes write half a tag.
                output.content(f"{_PARAMETER}{name}{end}")
                marker = _PARAMETER_END
                continue
            output.arguments(f"{opening}{write_json(name.strip())}" if end or name else "")
            opening = ", "
            if not end:
                return
            argument = _Argument(output, _Value(name.strip(), schema))
            marker = yield from _value_until_end(argument.add)
            if not marker:
                argument.cut()
                return
            argument.end()
            if marker in (_FUNCTION_END, _END):
                output.arguments("}")
                break
        if marker == _FUNCTION_END:
            output.suspect()
            letter = yield from after_space()
            if not letter or (yield from end_tag(letter, _END)):
                output.forget()
            else:
                output.give_back()


def _value_until_end(sink: Callable[[str], None]) -> Reads[str]:
    """Pass a parameter's text on; return its end. The text may contain its end tag before other text, as in code."""
    while True:
        marker = yield from passed_until(sink, *_ENDS)
        if marker != _PARAMETER_END:
            return marker
        space = ""
        found = ""
        while not found:
            letter = yield
            if letter and letter in " \t\r\n":
                space += letter
                continue
            found = yield from _prefix_of(letter, _PARAMETER, _FUNCTION_END, _END)
            if not found or found in (_PARAMETER, _FUNCTION_END, _END):
                return found or _PARAMETER_END
        sink(marker + space + found)


def _prefix_of(first: str, *markers: str) -> Reads[str]:
    """Return the marker that begins with ``first``, or its beginning with the letter that does not fit.

    The result is empty at the end of the text.
    """
    found = first
    while found and found not in markers and any(marker.startswith(found) for marker in markers):
        letter = yield
        if not letter:
            return ""
        found += letter
    return found


def _write(calls: Sequence[Call]) -> str:
    return "\n".join(map(_as_tags, calls))


def _as_tags(call: Call) -> str:
    lines = [_BEGIN, f"{_FUNCTION}{call.name}>"]
    for name, value in json.loads(call.arguments).items():
        lines += [f"{_PARAMETER}{name}>", _written(value), _PARAMETER_END]
    return "\n".join([*lines, _FUNCTION_END, _END])


def _grammar(grammar: CallGrammar) -> str:
    calls = []
    for name, schema in grammar.functions.items():
        parts = [literal(f"\n{_FUNCTION}{name}>\n")]
        required = schema.get("required", ())
        for key in as_object(schema)["properties"]:
            if not _KEY.fullmatch(key) or key != key.strip():
                raise ValueError(f"the argument {key[:100]!r} of {name} cannot be written between tags")
            parameter = f"{literal(f'{_PARAMETER}{key}>' + _NEWLINE)} {_Value(key, schema).grammar(grammar)}"
            parts.append(parameter if key in required else f"({parameter})?")
        calls.append(grammar.rule(" ".join([*parts, literal(_FUNCTION_END + _NEWLINE), grammar.marker(_END)])))
    return grammar.build_behind_text(_BEGIN, grammar.rule(" | ".join(calls)), _NEWLINE)


FORMAT = ToolFormat("qwen3_coder", (_BEGIN, _END), (_FUNCTION,), _Reader, _write, _grammar)
