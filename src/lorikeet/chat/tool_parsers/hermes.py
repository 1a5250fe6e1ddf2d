"""Reads and writes calls of Hermes, Qwen 2.5, Qwen 3 and Granite 4: a JSON object between tags.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
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
    end_tag,
    literal,
    structure_until,
)

_BEGIN = "<tool_call>"
_END = "</tool_call>"


def _calls(output: Output) -> Reads[None]:
    marker = yield from content_until(output, _BEGIN)
    while marker:
        output.suspect(_BEGIN)
        calls = output.calls
        letter = yield from after_space()
        while letter == "{" and (yield from call_object(output)):
            output.suspect()  # Some models write several calls between a pair of tags.
            letter = yield from after_space()
            if letter == "<":
                break
        if output.calls == calls:
            output.give_back()
            marker = yield from content_until(output, _BEGIN)
            continue
        marker = ""
        if letter == "<":
            marker = yield from end_tag(letter, _BEGIN, _END)
        if marker or not letter:
            output.forget()
        else:
            output.give_back()
            marker = yield from structure_until(output, _BEGIN, _END)  # A model may forget to close a call.
        if marker == _END:
            marker = yield from content_until(output, _BEGIN)
        elif marker != _BEGIN:  # The text ends, maybe within a tag.
            return


def _write(calls: Sequence[Call]) -> str:
    return "\n".join(f"{_BEGIN}\n{call_as_json(call)}\n{_END}" for call in calls)


def _grammar(grammar: CallGrammar) -> str:
    newline = literal("\n")
    body = grammar.rule(f"{newline} {grammar.call_object()} {newline} {grammar.marker(_END)}")
    return grammar.build_behind_text(_BEGIN, body, "\n")


FORMAT = ToolFormat("hermes", (_BEGIN, _END), (_BEGIN,), lambda _: _calls, _write, _grammar)
