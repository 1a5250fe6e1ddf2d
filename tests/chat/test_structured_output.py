"""What bodies say about the form of their answers, and grammars that are refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from lorikeet.chat import structured_output
from lorikeet.chat.grammar_process import GrammarKind
from lorikeet.chat.protocol import CompletionRequest
from lorikeet.chat.structured_output import TaggedPart, grammar_spec, tagged_text
from lorikeet.http.errors import ApiError
from tests.support.api_server import END, TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, body

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPLETIONS = "/v1/completions"


def spec(**fields: Any) -> structured_output.GrammarSpec | None:
    return grammar_spec(CompletionRequest(prompt="a", **fields))


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "ebnf", "start: /a/"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"regex": "a"}, "regex", "a"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_every_field_names_a_grammar(fields: dict[str, Any], kind: str, text: Any) -> None:
    found = spec(**fields)
    assert found is not None
    assert found.kind == kind
    assert (json.loads(found.text) if kind in ("json_schema", "choice") else found.text) == text
    assert found.param.partition(".")[0] in fields


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"structured_outputs": {"json": None}}],
)
def test_some_bodies_name_no_model(fields: dict[str, Any]) -> None:
    assert spec(**fields) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' must be one of"),
        ({"response_format": {"type": "json_schema"}}, "json_schema: must be an object with a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "a JSON schema must be an object"),
        ({"guided_json": "{"}, "guided_json: not valid JSON"),
        ({"guided_choice": []}, "guided_choice: must be a list of strings"),
        ({"guided_choice": ["a", ""]}, "guided_choice: must be a list of strings"),
        ({"regex": ""}, "regex: must be a string that is not empty"),
        ({"regex": "a", "guided_choice": ["a"]}, "only one grammar, but the body has guided_choice and regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "regex and choice exclude each other"),
        ({"structured_outputs": {"xml": "a"}}, "the field 'xml' is unknown"),
        ({"structured_outputs": {"structural_tag": "{"}}, "not valid JSON"),
        ({"response_format": {"type": "structural_tag"}}, "missing required field `structures`"),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, "structures must not"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}
                }
            },
            "'<a>' does not begin with a trigger",
        ),
        ({"regex": "a" * (structured_output.MAX_GRAMMAR_BYTES + 1)}, "at most 131072"),
    ],
)
def test_contradictory_fields_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        spec(**fields)
    assert refused.value.status == 400
    assert refused.value.param


def test_options_of_vllm_change_the_grammar() -> None:
    plain = spec(structured_outputs={"json": SCHEMA})
    options = {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}
    strict = spec(structured_outputs=options)
    assert plain is not None
    assert strict is not None
    assert strict.whitespace == "" != plain.whitespace
    assert json.loads(strict.text) == {**SCHEMA, "additionalProperties": False}
    spaced = spec(guided_json=SCHEMA, guided_whitespace_pattern=" ")
    assert spaced is not None
    assert spaced.whitespace == " "


async def test_the_engine_gets_the_checked_grammar(server: Running) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["a", "b"]},
        {"ebnf": 'root ::= "a"'},
    ):
        assert (await server.http.post(CHAT, json=body(**fields))).status_code == 200
        assert server.engine.submitted[-1].sampling.grammar
    assert (await server.http.post(CHAT, json=body(regex="a+", n=2, ignore_eos=True))).status_code == 200
    first, second = server.engine.submitted[-2:]
    assert first.sampling.grammar == second.sampling.grammar == "start: /a+/"
    assert first.sampling.stop_token_ids, "an answer that follows a grammar ends where that does"
    await server.http.post(CHAT, json=body())
    assert server.engine.submitted[-1].sampling.grammar == ""


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_json": {"type": "object", "if": {}}}, '"if"'),
        ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 1}}, "minLength"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"ebnf": "root ::= nowhere"}, "nowhere"),
        ({"regex": "(a{1000}){4000}"}, "takes too long"),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_a_400(server: Running, fields: dict[str, Any], reason: str) -> None:
    reply = await server.http.post(COMPLETIONS, json={"prompt": "a", **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == next(iter(fields))
    assert reason in error["message"]
    assert not server.engine.submitted
    assert server.service.gate.active == 0


async def test_grammar_that_crashes_its_process_affects_no_other_request(server: Running) -> None:
    deep = "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(9_000)) + '\nr9000: "a"'
    for _ in range(2):
        reply = await server.http.post(COMPLETIONS, json={"prompt": "a", "structured_outputs": {"grammar": deep}})
        assert reply.status_code == 400, reply.text
        assert "nested too deeply" in reply.json()["error"]["message"]
    assert (await server.http.post(COMPLETIONS, json={"prompt": "a", "regex": "a"})).status_code == 200


async def test_a_model_without_end_token_has_no_grammars(start: Start) -> None:
    async with start() as server:
        server.service.grammars._limits = structured_output.ModelLimits(256, 300)
        reply = await server.http.post(COMPLETIONS, json={"prompt": "a", "regex": "a"})
        assert reply.status_code == 400
        assert "no end token" in reply.json()["error"]["message"]


async def test_large_schemas_come_through_the_process_for_large_bodies(server: Running) -> None:
    schema = {"enum": [f"value {at}" for at in range(5_000)]}
    fields = {"prompt": "a", "guided_json": schema}
    assert len(json.dumps(fields)) > 2**16
    assert (await server.http.post(COMPLETIONS, json=fields)).status_code == 200
    assert "value 4999" in server.engine.submitted[-1].sampling.grammar
    fields["guided_json"] = {"enum": [f"value {at}" for at in range(50_000)]}
    reply = await server.http.post(COMPLETIONS, json=fields)
    assert reply.status_code == 400
    assert "at most 131072" in reply.json()["error"]["message"]


def test_tagged_parts_share_their_trigger() -> None:
    parts = [
        TaggedPart("<f", "<f=a>", "{}", "</f>"),
        TaggedPart("<f", "<f=b>", "{}", "</f>"),
        TaggedPart("!", "!", "{}", "", 7),
    ]
    found = tagged_text(parts, "tools")
    assert found.kind is GrammarKind.LARK
    assert found.text.count("[lazy]") == 1
    assert "trigger_1: TEXT <[7]>" in found.text


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("hello world", True),
        ("hello <f=a>[1]</f> the <f=b>{}</f>", True),
        ("", True),
        ("hello <f=c>", False),
        ("hello <f=a>{}", False),
        ("hello <f=a>[1]", False),
        ("hello <f", False),
        ("hello <g", True),
    ],
)
def test_trigger_continues_with_one_of_its_parts(text: str, follows: bool) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "object"}, "end": "</f>"},
        ],
        "triggers": ["<f"],
    }
    found = spec(response_format=tag)
    assert found is not None
    matcher = LLMatcher(LLTokenizer(TOKENIZER.to_str(), eos_token=[END]), found.text)
    token_ids = TOKENIZER.encode(text).ids
    taken = matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert (taken and matcher.is_accepting()) == follows


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [END], "regex": "a+"}, "allowed_token_ids and regex leave no token"),
        ({"allowed_token_ids": [END], "bad_words": ["<|im_end|>"]}, "allowed_token_ids and bad_words leave no token"),
        ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids and min_tokens leave no token"),
        ({"bad_words": ["a"], "guided_choice": ["a"]}, "bad_words and guided_choice leave no token"),
        ({"allowed_token_ids": [END], "regex": "a*", "min_tokens": 1}, "and min_tokens and regex leave no token"),
        ({"allowed_token_ids": [END], "regex": "a*"}, ""),
        ({"allowed_token_ids": [END], "min_tokens": 0}, ""),
        ({"regex": "(a|b)+", "bad_words": ["a"], "min_tokens": 3}, ""),
        ({"guided_choice": ["a", "bcd"], "min_tokens": 4}, "guided_choice: min_tokens is 4, but no answer"),
        ({"guided_choice": ["a", "bcd"], "min_tokens": 3}, ""),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}},
                "min_tokens": 6,
            },
            "response_format: min_tokens is 6, but no answer",
        ),
    ],
)
async def test_fields_that_forbid_every_first_token_are_a_400(
    server: Running, fields: dict[str, Any], names: str
) -> None:
    reply = await server.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 8, **fields})
    assert reply.status_code == (400 if names else 200), reply.text
    if names:
        assert names in reply.json()["error"]["message"]
        assert not server.engine.submitted
