"""Reads and writes Mistral's calls: a marker, then an array of JSON objects, or a name and its arguments.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]
[TOOL_CALLS]f[ARGS]{"x": 1}
"""

import re
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
    content_until,
    json_container,
    literal,
    text_until,
)

_MARKER = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"
_NAME = re.compile(r"[\w.:/-]+")
_CALL_ID = re.compile(r"\w{9}")


def _calls(output: Output) -> Reads[None]:
    while (yield from content_until(output, _MARKER)):
        output.suspect(_MARKER)
        letter = yield from after_space()
        if letter == "[":
            yield from call_list(output)
        elif letter:
            yield from _named_call(output, letter)
        output.give_back()


def _named_call(output: Output, first: str) -> Reads[None]:
    rest, marker = yield from text_until(_ARGUMENTS, _ID, "{")
    name = (first + rest).strip()
    if marker == _ID:
        call_id, marker = yield from text_until(_ARGUMENTS, "{")
        if not _CALL_ID.fullmatch(call_id.strip()):  # Other text must not be lost.
            return
    if not _NAME.fullmatch(name) or not marker:
        return
    if marker == _ARGUMENTS and (yield from after_space()) != "{":
        return
    output.start(name)
    yield from json_container("{", output.arguments)


def _write(calls: Sequence[Call]) -> str:
    return f"{_MARKER}[{', '.join(map(call_as_json, calls))}]"


def _grammar(grammar: CallGrammar) -> str:
    body = f"{literal('[')} {grammar.several(grammar.call_object(), ', ')} {literal(']')}"
    return grammar.build_behind_text(_MARKER, grammar.rule(body), is_list=True)


FORMAT = ToolFormat("mistral", (_MARKER, _ARGUMENTS, _ID), (_MARKER,), lambda _: _calls, _write, _grammar, id_letters=9)
