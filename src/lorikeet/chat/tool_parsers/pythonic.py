"""Calls of Llama 3.2 and 4 and others, written in Python: the answer is a list of function calls.

[f(x=1, y="a"), g()]
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

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

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which models write instead of Python's."""


def _calls(output: Output) -> Reads[None]:
    output.suspect()
    letter = yield from after_space()
    if letter == "<" and (yield from rest_of(letter, _BEGIN)):
        letter = yield from after_space()
    if letter == "[":
        letter = yield from after_space()
        while letter and letter != "]":
            call = _parsed((yield from _call_text(letter)))
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
    text, depth, quote, is_escaped = [first], 0, "", False
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
            if depth == 0 and not re.fullmatch(r"[\w.]+", "".join(text)):
                return ""


def _parsed(source: str) -> Call | None:
    """Return a call written in Python; None if it is none with constant arguments."""
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if None in arguments:
            return None
        return Call(ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


def _write(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_as_python, calls))}]"


def _as_python(call: Call) -> str:
    arguments = json.loads(call.arguments)
    return f"{call.name}({', '.join(f'{name}={_literal(value)}' for name, value in arguments.items())})"


def _literal(value: Any) -> str:
    """Return a JSON value in Python, with strings as JSON writes them."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    return repr(value)


def _grammar(grammar: CallGrammar) -> str:
    calls = []
    for name, schema in grammar.functions.items():
        properties, required = as_object(schema)["properties"], schema.get("required", ())
        values = {key: f"{literal(key + '=')} {grammar.json_property(schema, key)}" for key in properties}
        needed = [values[key] for key in properties if key in required]
        optional = [values[key] for key in properties if key not in required]
        keywords = _list_of(needed, optional)
        calls.append(grammar.rule(f"{literal(name + '(')} {keywords} {literal(')')}"))
    several = grammar.several(grammar.rule(" | ".join(calls)), ", ")
    return grammar.build_alone(f"{literal('[')} {several} {literal(']')}", r"/(.|\n)*/ & ~/\s*\[(.|\n)*/")


def _list_of(needed: Sequence[str], optional: Sequence[str]) -> str:
    """Return a grammar of keywords in their order, with commas between."""
    comma = literal(", ")

    def followed_by(first: str, others: Sequence[str]) -> str:
        return " ".join([first, *(f"({comma} {each})?" for each in others)])

    if needed:
        return followed_by(f" {comma} ".join(needed), optional)
    starts = [followed_by(each, optional[at + 1 :]) for at, each in enumerate(optional)]
    return f"({' | '.join(starts)})?" if starts else ""


FORMAT = ToolFormat("pythonic", (_BEGIN, _END), (_BEGIN, "[func_name1("), lambda _: _calls, _write, _grammar)
