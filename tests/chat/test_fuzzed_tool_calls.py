"""Whatever a model writes is read: calls that follow their grammar whole, everything else without losing a word."""

import json
import random
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from lorikeet.chat.chat_output import AnswerReader, ToolUse, whole_calls
from lorikeet.chat.grammar_process import GrammarKind, GrammarSpec
from lorikeet.chat.json_text import read_arguments, read_json
from lorikeet.chat.reasoning import REASONING_FORMATS, ReasoningFormat
from lorikeet.chat.tool_parsers import TOOL_FORMATS
from lorikeet.chat.tool_parsers.base import Call, CallGrammar, ToolFormat
from tests.chat.broken_answers import broken_answer
from tests.support.fuzzing import CASE_S, Fuzzing
from tests.support.grammars import PARSER, draw_answer, grammar_reader
from tests.support.schemas import hard_schema, random_schema

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

READER = grammar_reader()
FORMATS = list(TOOL_FORMATS.values())
each_format = pytest.mark.parametrize("tool_format", FORMATS, ids=list(TOOL_FORMATS))


class Read(NamedTuple):
    """What an answer holds."""

    content: str
    reasoning: str
    calls: list[Call]


def cut(text: str, choose: random.Random) -> list[str]:
    """Return a text in pieces."""
    at = sorted(choose.randint(0, len(text)) for _ in range(choose.choice([0, 1, 5, 40])))
    return [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


def read(
    pieces: Sequence[str],
    tool_format: ToolFormat,
    functions: dict[str, Any],
    reasoning: ReasoningFormat | None = None,
) -> Read:
    reader = AnswerReader(ToolUse(functions), tool_format, reasoning, "")
    parts = [*map(reader.push, pieces), reader.finish()]
    calls = whole_calls([call for part in parts for call in part.calls])
    found = Read(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        [Call(call["function"]["name"], call["function"]["arguments"]) for call in calls],
    )
    json.dumps([found.content, found.reasoning, found.calls], ensure_ascii=False).encode()
    return found


# --- answers that follow their grammar ---------------------------------------------------------------


def parameters(choose: random.Random) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    if choose.random() < 0.1:
        return {}
    schema = random_schema(choose, 2)
    special: list[Any] = [
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"allOf": [{"$ref": "#/$defs/point"}], "description": "as pydantic writes a field with a default"},
        {"enum": [1, 2, "two", None]},
        {"const": choose.choice([5, "5", True, "<|im_end|>", [1]])},
        {"$ref": "#/$defs/point"},
        {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "string"}]},
        {"type": "string"},
        {"type": "string", "minLength": 2, "maxLength": 9},
        {"type": "string", "pattern": r"^[a-z]+(-\d{2})?$|x$", "maxLength": 20},
        {"type": "number"},
        True,
        {},
    ]
    for name in choose.sample(["opt", "from", "path", "k-v", "é"], choose.randint(0, 3)):
        schema["properties"][name] = choose.choice(special)
    schema["properties"] = {name: of for name, of in schema["properties"].items() if " " not in name}
    schema["required"] = [name for name in schema["required"] if name in schema["properties"]]
    point = {"type": "object", "properties": {"k": {"type": "integer"}}, "additionalProperties": False}
    schema["$defs"] = {**schema.get("$defs", {}), "point": point}
    schema["additionalProperties"] = False
    return schema


@each_format
def test_text_of_a_grammar_is_a_call_with_valid_arguments(tool_format: ToolFormat, fuzz: Fuzzing) -> None:
    @fuzz.settings(few=25)
    @given(st.integers(0, 2**40))
    def draw(seed: int) -> None:
        choose = random.Random(seed)
        functions = {name: parameters(choose) for name in choose.sample(["f", "get_weather", "a-b.c"], 2)}
        grammar = tool_format.grammar(CallGrammar(functions, True, {}.get))
        checked = READER.check(GrammarSpec(GrammarKind.LARK, grammar, "tools"))
        fuzz.counts["refused" if checked.error else "accepted"] += 1
        if checked.error:
            return
        drawn = draw_answer(checked.grammar, choose, 300, closing=0.8)
        assert not drawn.error, (functions, drawn)
        found = read(cut(drawn.text, choose), tool_format, functions)
        if not drawn.is_complete:
            return
        fuzz.counts["complete"] += 1
        assert found.content == ""
        assert found.calls, drawn.text
        for call in found.calls:
            arguments = json.loads(call.arguments, parse_float=Decimal)
            assert read_json(call.arguments) == read_arguments(call.arguments)
            exact = json.loads(json.dumps(functions[call.name] or {"additionalProperties": False}), parse_float=Decimal)
            jsonschema.Draft202012Validator({"type": "object", **exact}).validate(arguments)
        again = tool_format.write(found.calls)
        assert meaning(read(cut(again, choose), tool_format, functions).calls) == meaning(found.calls)
        if not any(letter in drawn.text for letter in "eE.\\"):  # numbers and escapes have several forms
            tokens = PARSER.tokenize_str(again)
            matcher = LLMatcher(PARSER, checked.grammar, log_level=0)
            assert matcher.try_consume_tokens(tokens) == len(tokens), (drawn.text, again)

    draw()
    assert fuzz.counts["complete"]


def meaning(calls: Sequence[Call]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


# --- answers that do not -----------------------------------------------------------------------------

FUNCTIONS = {
    "f": {"type": "object", "properties": {"x": {"type": "integer"}, "o": {"type": "object"}, "n": {"type": "number"}}},
    "g": {},
}
OUTPUTS = 20
"""Of a case."""


@each_format
def test_parser_of_any_answer_neither_raises_nor_loses_text(tool_format: ToolFormat, fuzz: Fuzzing) -> None:
    formats = [None, *REASONING_FORMATS.values()]

    @fuzz.settings(few=10)
    @given(st.integers(0, 2**40))
    def draw(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(OUTPUTS):
            text, words = broken_answer(tool_format, choose)
            reasoning = choose.choice(formats)
            began_s = time.process_time()
            found = read(cut(text, choose), tool_format, FUNCTIONS, reasoning)
            assert found == read([text], tool_format, FUNCTIONS, reasoning)
            assert time.process_time() - began_s < CASE_S, text[:300]
            fuzz.counts["outputs"] += 1
            fuzz.counts["calls"] += len(found.calls)
            shown = " ".join((found.content, found.reasoning, *map(str, found.calls)))
            for word in words:
                assert word in shown, f"{word} is lost: {text!r:.600} {found}"
            for call in found.calls:
                read_arguments(call.arguments)

    draw()


@pytest.mark.parametrize("kind", [hard_schema, random_schema])
def test_every_kind_of_schema_makes_a_grammar_or_a_reason(kind: Any, fuzz: Fuzzing) -> None:
    @fuzz.settings(few=20)
    @given(st.integers(0, 2**40))
    def draw(seed: int) -> None:
        choose = random.Random(seed)
        schema = kind(choose)
        for tool_format in FORMATS:
            try:
                grammar = tool_format.grammar(CallGrammar({"f": {**schema, "type": "object"}}, True, {}.get))
            except ValueError:
                fuzz.counts["refused"] += 1
                continue
            READER.check(GrammarSpec(GrammarKind.LARK, grammar, "tools"))
            fuzz.counts["grammars"] += 1

    draw()
