"""Reads and writes calls of Granite 3: the answer is an array of JSON objects behind a marker.

<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]
"""

from collections.abc import Sequence

from lorikeet.chat.tool_parsers.base import (
    Call,
    CallGrammar,
    Output,
    Reads,
    ToolFormat,
    after_space,
    call_as_json,
    call_list,
    literal,
    rest_of,
)

_MARKERS = ("<|tool_call|>", "<tool_call>")
"""Markers of Granite 3.0 and 3.1, and of the code model; the array may come without its marker."""


def _calls(output: Output) -> Reads[None]:
    output.suspect()
    letter = yield from after_space()
    if letter == "<" and (yield from rest_of(letter, *_MARKERS)):
        letter = yield from after_space()
    if letter == "[":
        yield from call_list(output)
    output.give_back()


def _write(calls: Sequence[Call]) -> str:
    return f"{_MARKERS[0]}[{', '.join(map(call_as_json, calls))}]"


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.several(grammar.call_object(), ", ")
    whole = f"{grammar.marker(_MARKERS[0])} {literal('[')} {calls} {literal(']')}"
    return grammar.build_alone(whole, r"/(.|\n)*/ & ~/\s*(<\|tool_call\|>|<tool_call>|\[)(.|\n)*/")


FORMAT = ToolFormat("granite", _MARKERS, (_MARKERS[0],), lambda _: _calls, _write, _grammar)
