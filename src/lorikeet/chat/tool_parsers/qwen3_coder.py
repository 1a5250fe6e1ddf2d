"""Calls of Qwen 3 Coder: one tag for each parameter, with its value as plain text.

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
from collections.abc import Mapping, Sequence
from typing import Any

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
    literal,
    rest_of,
    text_until,
)

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NEWLINE = "\n"
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_DEFINITION = re.compile(r"#/(\$defs|definitions)/(.+)")
_MAX_DEPTH = 10
_KINDS: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class _Reader:
    """Reads calls; the schemas of the functions say what is text and what is a number."""

    def __init__(self, functions: Mapping[str, Parameters]) -> None:
        self._functions = functions

    def __call__(self, output: Output) -> Reads[None]:
        while marker := (yield from content_until(output, _BEGIN, _FUNCTION)):
            output.suspect(marker)
            if marker == _BEGIN:
                marker = yield from rest_of((yield from after_space()), _FUNCTION)
            if not marker:
                output.give_back()
                continue
            name, end = yield from text_until(">")
            if not end:
                return
            output.start(name.strip())
            yield from self._parameters(output, name.strip())

    def _parameters(self, output: Output, function: str) -> Reads[None]:
        """Read parameters up to the end of the call."""
        schema = self._functions.get(function, {})
        known = schema.get("properties", {})
        opening = "{"
        marker = _PARAMETER_END
        while True:
            if marker != _PARAMETER:
                _, marker = yield from text_until(_PARAMETER, _FUNCTION_END, _END)
            if not marker:
                return
            if marker != _PARAMETER:
                output.arguments("{}" if opening == "{" else "}")
                break
            name, _ = yield from text_until(">")
            value, marker = yield from text_until(_PARAMETER_END, _PARAMETER, _FUNCTION_END, _END)
            if not marker:
                return
            name = name.strip()
            output.arguments(f"{opening}{_text(name)}: {_as_json(value, _kinds(known.get(name), schema))}")
            opening = ", "
            if marker in (_FUNCTION_END, _END):
                output.arguments("}")
                break
        if marker == _FUNCTION_END:
            output.suspect()
            if (yield from rest_of((yield from after_space()), _END)):
                output.forget()
            else:
                output.give_back()


def _as_json(text: str, kinds: tuple[type, ...]) -> str:
    """Return a parameter's text as JSON: a value of one of these types if it is one, else a string."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kinds:
        try:
            value = json.loads(_LITERALS.get(text.strip(), text))
        except ValueError:
            value = text
        if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
            return json.dumps(value, ensure_ascii=False)
    return _text(text)


def _kinds(schema: Any, root: Parameters, depth: int = 0) -> tuple[type, ...]:
    """Return the types that a value may have besides a string; ``root`` holds the definitions that are referred to."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ()
    named = schema.get("type", ())
    found = [kind for name in ([named] if isinstance(named, str) else named) for kind in _KINDS.get(name, ())]
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found += _kinds(one, root, depth + 1)
    if reference := _DEFINITION.fullmatch(str(schema.get("$ref", ""))):
        found += _kinds(root.get(reference[1], {}).get(reference[2]), root, depth + 1)
    return tuple(found)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write(calls: Sequence[Call]) -> str:
    return "\n".join(map(_as_tags, calls))


def _as_tags(call: Call) -> str:
    lines = [_BEGIN, f"{_FUNCTION}{call.name}>"]
    for name, value in json.loads(call.arguments).items():
        lines += [f"{_PARAMETER}{name}>", value if isinstance(value, str) else _text(value), _PARAMETER_END]
    return "\n".join([*lines, _FUNCTION_END, _END])


def _grammar(grammar: CallGrammar) -> str:
    # With its end in one lexeme, since a text would take the newline before the end.
    text = grammar.rule(r"/[^<]*\n<\/parameter>\n/")
    calls = []
    for name, schema in grammar.functions.items():
        parts = [literal(f"\n{_FUNCTION}{name}>\n")]
        properties, required = as_object(schema)["properties"], schema.get("required", ())
        for key, of_key in properties.items():
            value = _value_grammar(grammar, schema, key, of_key) or text
            parameter = f"{literal(f'{_PARAMETER}{key}>' + _NEWLINE)} {value}"
            parts.append(parameter if key in required else f"({parameter})?")
        calls.append(grammar.rule(" ".join([*parts, literal(_FUNCTION_END + _NEWLINE), grammar.marker(_END)])))
    return grammar.build_behind_text(_BEGIN, grammar.rule(" | ".join(calls)), _NEWLINE)


def _value_grammar(grammar: CallGrammar, schema: Parameters, key: str, of_key: Any) -> str:
    """Return the grammar of a value and its end, empty for any text."""
    end = literal(f"{_NEWLINE}{_PARAMETER_END}{_NEWLINE}")
    if choices := of_key.get("enum", ()) if isinstance(of_key, dict) else ():
        texts = (literal(one if isinstance(one, str) else _text(one)) for one in choices)
        return f"({' | '.join(texts)}) {end}"
    return f"{grammar.json_property(schema, key)} {end}" if _kinds(of_key, schema) else ""


FORMAT = ToolFormat("qwen3_coder", (_BEGIN, _END), (_FUNCTION,), _Reader, _write, _grammar)
