"""Reads and writes calls of Llama 3.2 and 4 and others, written in Python: the answer is a list of function calls.

[f(x=1, y="a"), g()]
"""

import json
import re
from collections.abc import Sequence

from lorikeet.chat.json_text import write_json
from lorikeet.chat.tool_parsers.base import (
    Call,
    CallGrammar,
    Output,
    Reads,
    ToolFormat,
    after_space,
    as_object,
    literal,
    rest_of,
)
from lorikeet.chat.tool_parsers.python_text import MAX_NAME, NAME, read_call

_BEGIN = "<|python_start|>"
_END = "<|python_end|>"
_KEY = re.compile(r"""[^\s=,'"()\[\]{}]+""")


def _calls(output: Output) -> Reads[None]:
    output.suspect()
    letter = yield from after_space()
    if letter == "<" and (yield from rest_of(letter, _BEGIN)):
        letter = yield from after_space()
    if letter == "[":
        letter = yield from after_space()
        while letter and letter != "]":
            call = read_call((yield from _call_text(letter)))
            if call is None:
                break
            output.start(call.name)
            output.arguments(call.arguments)
            output.suspect()
            letter = yield from after_space()
            if letter == ",":
                letter = yield from after_space()
        if letter == "]" and output.calls:
            output.forget()
            letter = yield from after_space()
            output.suspect(letter)
            if letter == "<" and (yield from rest_of(letter, _END)):
                output.forget()
    output.give_back()


def _call_text(first: str) -> Reads[str]:
    """Return the source of a call up to its last parenthesis; empty at the end of the text."""
    text = [first]
    depth = 0
    quote = ""
    is_escaped = False
    while True:
        letter = yield
        if not letter:
            return ""
        text.append(letter)
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if depth <= 0 and letter in ")]}":
                return "".join(text)
            if depth == 0 and not (len(text) < MAX_NAME and NAME.fullmatch(letter)):
                return ""


def _write(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_as_python, calls))}]"


def _as_python(call: Call) -> str:
    """Return a call with its values in JSON, like the grammar; most are the same in Python."""
    arguments = json.loads(call.arguments)
    return f"{call.name}({', '.join(f'{name}={write_json(value)}' for name, value in arguments.items())})"


def _grammar(grammar: CallGrammar) -> str:
    calls = []
    for name, schema in grammar.functions.items():
        properties = as_object(schema)["properties"]
        required = schema.get("required", ())
        for key in properties:
            if not _KEY.fullmatch(key):
                raise ValueError(f"the argument {key[:100]!r} of {name} cannot be written as a keyword of a call")
        values = {key: f"{literal(key + '=')} {grammar.json_property(schema, key)}" for key in properties}
        needed = [values[key] for key in properties if key in required]
        optional = [values[key] for key in properties if key not in required]
        keywords = _list_of(needed, optional)
        calls.append(grammar.rule(f"{literal(name + '(')} {keywords} {literal(')')}"))
    several = grammar.several(grammar.rule(" | ".join(calls)), ", ")
    return grammar.build_alone(f"{literal('[')} {several} {literal(']')}", r"/(.|\n)*/ & ~/\s*\[(.|\n)*/")


def _list_of(needed: Sequence[str], optional: Sequence[str]) -> str:
    """Return a grammar of keywords in their order, with commas between them."""
    comma = literal(", ")

    def followed_by(first: str, others: Sequence[str]) -> str:
        return " ".join([first, *(f"({comma} {each})?" for each in others)])

    if needed:
        return followed_by(f" {comma} ".join(needed), optional)
    starts = [followed_by(each, optional[at + 1 :]) for at, each in enumerate(optional)]
    return f"({' | '.join(starts)})?" if starts else ""


FORMAT = ToolFormat("pythonic", (_BEGIN, _END), (_BEGIN, "[func_name1("), lambda _: _calls, _write, _grammar)
