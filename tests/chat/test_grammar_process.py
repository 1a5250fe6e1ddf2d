"""Grammars that passed the check lead to an answer, and to no dead end."""

import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.chat.grammar_process import GrammarKind, GrammarSpec, without_covered_patterns
from lorikeet.core.grammar_tokenizer import with_token_ids
from tests.support.api_server import END, TOKENIZER
from tests.support.fuzzing import Fuzzing
from tests.support.grammars import draw_answer, grammar_reader
from tests.support.schemas import hard_schema, patterned_schema, random_regex, random_schema

READER = grammar_reader()
SPECIAL = "<|im_end|>"


def spec(kind: str, text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind(kind), text, "p")


def checked(kind: str, text: str) -> str:
    found = READER.check(spec(kind, text))
    assert not found.error
    return found.grammar


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [random_schema, patterned_schema, hard_schema])
def test_schema_is_refused_or_its_grammar_gives_valid_values(kind: Callable[..., Any], fuzz: Fuzzing) -> None:
    @fuzz.settings(few=60)
    @given(st.integers(0, 2**40))
    def draw(seed: int) -> None:
        choose = random.Random(seed)
        schema = kind(choose)
        found = READER.check(spec("json_schema", json.dumps(schema)))
        fuzz.counts["refused" if found.error else "accepted"] += 1
        if found.error:
            assert "<state>" not in found.error
            return
        for _ in range(4):
            drawn = draw_answer(found.grammar, choose)
            assert not drawn.error, f"{json.dumps(schema)}: {drawn.text!r}: {drawn.error[:200]}"
            if drawn.is_complete:
                fuzz.counts["complete answers"] += 1
                value = json.loads(drawn.text, parse_float=Decimal)
                exact = json.loads(json.dumps(schema), parse_float=Decimal)
                jsonschema.Draft202012Validator(exact).validate(value)

    draw()
    assert fuzz.counts["accepted"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_regex_is_refused_or_leads_to_an_answer(fuzz: Fuzzing) -> None:
    @fuzz.settings(few=40)
    @given(st.integers(0, 2**40))
    def draw(seed: int) -> None:
        choose = random.Random(seed)
        pattern = "".join(choose.sample([random_regex(choose), r"<\|im_end\|>", r"(<\|im_start\|>)?", "[a-z]*"], 3))
        drawn = draw_answer(checked("regex", pattern), choose)
        assert not drawn.error

    draw()


@pytest.mark.parametrize("text", [SPECIAL, f"a{SPECIAL}b", f"{SPECIAL * 2}", "<|im_start|>user", "<", "<|im_"])
def test_text_like_a_special_token_is_written_as_text(text: str) -> None:
    for grammar in (checked("choice", json.dumps([text])), checked("json_schema", json.dumps({"const": text}))):
        drawn = draw_answer(grammar, random.Random(0))
        assert drawn.is_complete
        assert drawn.text in (text, json.dumps(text))


def test_a_grammar_may_name_a_special_token() -> None:
    start = TOKENIZER.token_to_id("<|im_start|>")
    grammar = checked("ebnf", 'start: <|im_start|> "<|im_start|>" /[^<>]*/ // <|im_end|>')
    assert f"<[{start}]>" in grammar
    assert draw_answer(grammar, random.Random(1), closing=1.0).text.startswith("<|im_start|>" * 2)
    assert with_token_ids('start: <|x|> "<|x|>" /<\\|x|>/', {"<|x|>": 7}) == 'start: <[7]> "<|x|>" /<\\|x|>/'


@pytest.mark.parametrize(
    ("names", "patterns", "kept"),
    [
        (["a"], ["^a$"], []),
        (["a", "b"], ["^(a|b)$"], []),
        (["a"], ["^(a|b)$"], ["^(a|b)$"]),
        (["a"], ["^a"], ["^a"]),
        (["größe"], ["^größe$", "x"], ["x"]),
        ([], ["^a$"], ["^a$"]),
        (["a"], ["(?=a)"], ["(?=a)"]),
    ],
)
def test_patterns_that_match_the_names_of_properties_only_are_left_out(
    names: list[str], patterns: list[str], kept: list[str]
) -> None:
    one = {"type": "integer"}
    two = {"maximum": 3}
    schema = {"properties": dict.fromkeys(names, one), "patternProperties": dict.fromkeys(patterns, two)}
    found = without_covered_patterns(schema)
    assert list(found["patternProperties"]) == kept
    if not kept:
        assert found["properties"] == {name: {"allOf": [one, two]} for name in names}
    assert len(schema["patternProperties"]) == len(patterns), "the schema itself stays as it was"


def test_objects_that_must_contain_one_another_without_end_are_refused() -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    assert READER.check(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "p", "")).error
    assert READER.check(spec("json_schema", '{"$ref": "#"}')).error == "no answer can follow the grammar"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "foo"}', "Invalid type: foo"),
        (GrammarKind.LARK, 'start: r0\nr0: %json {"type": "foo"}', "failed to compile JSON schema: Invalid type: foo"),
        (GrammarKind.EBNF, "start: nope", 'at 1(8): unknown name: "nope"\n   1 | start: nope\n'),
    ],
)
def test_error_shows_the_lines_of_the_senders_own_grammar_only(kind: GrammarKind, text: str, reason: str) -> None:
    error = READER.check(GrammarSpec(kind, text, "p")).error
    assert error.startswith(reason)
    assert ("start:" in error) == (kind is GrammarKind.EBNF)


@pytest.mark.parametrize(
    ("kind", "text", "most"),
    [
        (GrammarKind.CHOICE, '["yes", "né"]', 3),
        (GrammarKind.REGEX, r"\d{5}", 5),
        (GrammarKind.REGEX, r"[A-Z]{2}(-\w{3}){0,4}", 18),
        (GrammarKind.JSON_SCHEMA, '{"enum": ["red", null]}', 5),
        (GrammarKind.EBNF, 'root ::= "a" | "bc" "d"?', 3),
    ],
)
def test_grammar_shorter_than_min_tokens_is_refused(kind: GrammarKind, text: str, most: int) -> None:
    assert not READER.check(GrammarSpec(kind, text, "x", least_tokens=most)).error
    error = READER.check(GrammarSpec(kind, text, "x", least_tokens=most + 1)).error
    assert error.startswith(f"min_tokens is {most + 1}, but no answer")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "a*"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 0, "maximum": 999999}'),  # Too many to count.
        (GrammarKind.EBNF, 'root ::= "a" root | "b"'),
    ],
)
def test_answers_of_unlimited_length_are_not_refused(kind: GrammarKind, text: str) -> None:
    assert not READER.check(GrammarSpec(kind, text, "x", least_tokens=500)).error


def test_whitespace_pattern_is_limited_to_json_whitespace() -> None:
    text = json.dumps({"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3})
    found = READER.check(GrammarSpec(GrammarKind.JSON_SCHEMA, text, "p", r"\s{0,10}"))
    for seed in range(20):
        drawn = draw_answer(found.grammar, random.Random(seed), closing=0.4)
        if drawn.is_complete:
            json.loads(drawn.text)


def test_first_tokens_of_a_grammar_are_found() -> None:
    first = READER.check(spec("regex", "a*")).first
    begins = {token for token in range(8 * len(first)) if first[token // 8] >> (token % 8) & 1}
    assert END in begins
    assert all(TOKENIZER.decode([token]).strip("a") == "" for token in begins - {END})
