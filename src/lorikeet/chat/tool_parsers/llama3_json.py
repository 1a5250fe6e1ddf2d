"""Reads and writes calls of Llama 3.1 to 3.3: the answer is a JSON object, or several with semicolons between.

{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
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
    call_object,
    content_until,
    rest_of,
)

_MARKER = "<|python_tag|>"


def _calls(output: Output) -> Reads[None]:
    output.suspect()
    letter = yield from after_space()
    if letter == "<" and (yield from rest_of(letter, _MARKER)):
        letter = yield from after_space()
    while True:
        while letter == "{" and (yield from call_object(output)):
            output.suspect()
            letter = yield from after_space()
            if letter in (";", ","):
                letter = yield from after_space()
        output.give_back()
        if not (yield from content_until(output, _MARKER)):
            return
        output.suspect(_MARKER)
        letter = yield from after_space()


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(call_as_json(call, "parameters") for call in calls)


def _grammar(grammar: CallGrammar) -> str:
    calls = grammar.several(grammar.call_object("parameters"), "; ")
    return grammar.build_alone(calls, r"/(.|\n)*/ & ~/\s*\{(.|\n)*/")


FORMAT = ToolFormat("llama3_json", (_MARKER,), (_MARKER, '"parameters":'), lambda _: _calls, _write, _grammar)
