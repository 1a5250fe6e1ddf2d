"""Formats of tool calls: what is a call, what is text, and that it does not matter how the text is cut."""

import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from lorikeet.chat.grammar_process import GrammarKind, GrammarSpec, Marker, Thoughts, notation
from lorikeet.chat.tool_parsers import TOOL_FORMATS, format_of_template, instructions
from lorikeet.chat.tool_parsers.base import Call, CallArguments, CallGrammar, CallStart, Content, Event, ToolFormat
from tests.support.fakes import byte_level_tokenizer

FUNCTIONS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/Days"},
            "exact": {"type": ["boolean", "null"]},
            "tags": {"anyOf": [{"type": "array"}, {"type": "object"}]},
        },
        "required": ["city"],
        "$defs": {"Days": {"type": "integer"}},
    },
    "now": {},
}
FORMATS = list(TOOL_FORMATS.values())
BEHIND_TEXT = ("hermes", "mistral", "qwen3_coder")
"""Formats whose calls may follow text."""

each_format = pytest.mark.parametrize("tool_format", FORMATS, ids=list(TOOL_FORMATS))


def read(tool_format: ToolFormat, pieces: Iterable[str]) -> tuple[str, list[Call]]:
    """Return the content and the calls of an answer that arrives in these pieces."""
    parser = tool_format.parser(FUNCTIONS)
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    content = ""
    calls = list[Call]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append(Call(name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + text)
    return content, calls


def meaning(calls: Sequence[Call]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), min_size=1, max_size=8)
CALLS = st.lists(
    st.builds(
        lambda arguments: Call("get_weather", json.dumps(arguments, ensure_ascii=False)),
        st.fixed_dictionaries(
            {"city": WORDS.map(str.strip).filter(bool)},
            optional={
                "days": st.integers(-9, 99),
                "exact": st.sampled_from([True, False, None]),
                "tags": st.lists(WORDS | st.integers(0, 9), max_size=2) | st.dictionaries(WORDS, WORDS, max_size=2),
            },
        ),
    )
    | st.just(Call("now", "{}")),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@each_format
@settings(max_examples=25)
@given(calls=CALLS, cuts=st.data())
def test_parser_reads_written_calls_at_any_cut(tool_format: ToolFormat, calls: list[Call], cuts: st.DataObject) -> None:
    text = ("Sure.\n" if tool_format.name in BEHIND_TEXT else "") + tool_format.write(calls)
    content, found = read(tool_format, cut(text, cuts))
    assert content == ("Sure." if tool_format.name in BEHIND_TEXT else "")
    assert meaning(found) == meaning(calls)


FRAGMENTS = [
    *sorted({marker for each in FORMATS for marker in each.markers}),
    *('{"name": "f", "arguments": ', '{"a": 1}', '{"a": "x\\"}"}', "}", "{", "[", "]", "]\n", ",", ";", '"', "\\", ":"),
    *('"parameters": {"x": [1]}, "name": "g"}', '"name"', "null", '"{}"', "<function=f>", "</function>", "f(x=1)"),
    *("<parameter=city>\n", "</parameter>", "<parameter=days>", "3", "[f(a='b)', c={'d': (1,)})", ", g()]", "f(", "tr"),
    *(
        "<tool",
        "[TOOL",
        "<|python",
        " ",
        "\n",
        "é",
        "text",
        "5.5",
        '{"name": "n"}',
        '{"arguments": {}, "name": "late"}',
    ),
]


@pytest.mark.slow
@each_format
@settings(max_examples=25)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), cuts=st.data())
def test_cuts_between_deltas_do_not_change_the_result(
    tool_format: ToolFormat, fragments: list[str], cuts: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = read(tool_format, [text])
    assert read(tool_format, text) == whole
    assert read(tool_format, cut(text, cuts)) == whole
    if not whole[1]:
        assert whole[0] == text, "text without a call is passed on as it is"


def cut(text: str, cuts: st.DataObject) -> list[str]:
    at = sorted(cuts.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[begin:end] for begin, end in zip([0, *at], [*at, len(text)], strict=True)]


CITY = [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Hm.\n<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>\n', "Hm.", CITY),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', "", CITY),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call> Done.', "Done.", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}', "",
         [("now", {}), ("now", {})]),
        ("hermes", "<tool_call>now()</tool_call>", "<tool_call>now()</tool_call>", []),
        ("hermes", '<tool_call>{"name": "Bob"}</tool_call>', '<tool_call>{"name": "Bob"}</tool_call>', []),
        ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", CITY),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", 'As JSON: {"name": "now", "parameters": {}}', 'As JSON: {"name": "now", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}', "", [*CITY, ("now", {})]),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Oslo"}', "", CITY),
        ("granite", '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', "", CITY),
        ("granite", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', "", CITY),
        ("granite", "[1, 2]", "[1, 2]", []),
        ("pythonic", '<|python_start|>[get_weather(city="Oslo")]<|python_end|>', "", CITY),
        ("pythonic", "[get_weather(city='Oslo', exact=true)] ", "", [("get_weather", {"city": "Oslo", "exact": True})]),
        ("pythonic", "[print(open('x').read())]", "[print(open('x').read())]", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("qwen3_coder", "<function=get_weather><parameter=city>Oslo</parameter></function>", "", CITY),
        ("qwen3_coder", "<tool_call><function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</tool_call>",
         "", [("get_weather", {"city": "Oslo", "days": 3})]),
        ("qwen3_coder", "<function=get_weather><parameter=city>\n<a></parameter></b>\n</parameter>\n</function>", "",
         [("get_weather", {"city": "<a></parameter></b>"})]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=\nls\n</function>",
         "<parameter=\nls", CITY),
        ("qwen3_coder", "<function=get_weather>\n<parameter=exact>\nFalse\n</parameter>\n</function> `<tool_call>`.",
         "`<tool_call>`.", [("get_weather", {"exact": False})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\nSo.</tool_call>',
         "So.", [("now", {}), ("now", {})]),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "a</tool_call>b"}}</tool_call>', "",
         [("get_weather", {"city": "a</tool_call>b"})]),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800", "days": NaN}}</tool_call>', "",
         [("get_weather", {"city": "\ufffd", "days": "NaN"})]),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83e\\udd9c\\x"}}</tool_call>', "",
         [("get_weather", {"city": "🦜\\x"})]),
        ("pythonic", "[get_weather(city='a, b', days=-3), now()]", "",
         [("get_weather", {"city": "a, b", "days": -3}), ("now", {})]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>", "",
         [("get_weather", {"days": "many"})]),
    ],
)  # fmt: skip
def test_parser_reads_calls_that_models_have_written(
    name: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    found_content, found = read(TOOL_FORMATS[name], [text])
    assert (found_content, meaning(found)) == (content, calls)


@each_format
def test_a_tag_that_is_cut_off_behind_a_call_is_no_content(tool_format: ToolFormat) -> None:
    text = tool_format.write([Call("get_weather", '{"city": "Oslo"}')])
    for end in range(len(text) + 1):
        content, calls = read(tool_format, [text[:end]])
        if calls:
            assert content in ("", "<"), text[:end]


def test_a_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    content, calls = read(TOOL_FORMATS["hermes"], ['<tool_call>{"name": "now", "arguments": {"a": "b'])
    assert (content, calls) == ("", [Call("now", '{"a": "b')])


def test_a_parameter_that_is_cut_off_has_its_text_so_far() -> None:
    content, calls = read(TOOL_FORMATS["qwen3_coder"], ["<function=get_weather>\n<parameter=city>\nOs"])
    assert (content, calls) == ("", [Call("get_weather", '{"city": "Os')])


def late(schema: object, text: str) -> int:
    """Return after how many letters of a value its first letter has been passed on."""
    functions = {"write": {"type": "object", "properties": {"text": schema}}}
    parser = TOOL_FORMATS["qwen3_coder"].parser(functions)
    parser.push("<tool_call>\n<function=write>\n<parameter=text>\n")
    for at, letter in enumerate(text):
        if any(isinstance(event, CallArguments) for event in parser.push(letter)):
            return at
    return len(text)


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "most"),
    [
        ({"type": "string"}, "def f():\n    pass\n", 1),
        ({}, "5", 1),
        (OPTIONAL, "def f():", 1),
        (OPTIONAL, "None of these", 7),
        (OPTIONAL, "# A title\n\nA text", 14),
        ({"type": ["string", "number"]}, "2026-11-30 was a Monday", 13),
        ({"type": ["string", "number"]}, "2026", 4),
        ({"enum": ["one", "two"]}, "one", 3),
        ({"type": ["string", "array"]}, "text", 4),
        ({"type": "integer"}, "12", 2),
    ],
)
def test_a_parameter_is_passed_on_as_soon_as_it_must_be_a_string(schema: object, text: str, most: int) -> None:
    assert late(schema, text) <= most


def test_long_string_is_streamed_letter_by_letter_except_a_possible_end() -> None:
    parser = TOOL_FORMATS["qwen3_coder"].parser(FUNCTIONS)
    code = 'say("é")\n' * 100 + "</parameter> in a text\n"

    def push(text: str) -> str:
        return "".join(event.text for event in parser.push(text) if isinstance(event, CallArguments))

    sent = push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    for at, letter in enumerate(code):
        sent += push(letter)
        whole = '{"city": ' + json.dumps(code[: at + 1], ensure_ascii=False)[:-1]
        assert whole.startswith(sent)
        assert len(whole) - len(sent) <= len("\\n</parameter> ")
    parser.push("\n</parameter>\n</function>")
    assert sent.endswith("in a text")


@pytest.mark.slow
@each_format
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("content", [None, {"type": "object"}])
def test_grammars_of_all_formats_compile(tool_format: ToolFormat, parallel: bool, content: object) -> None:
    thoughts = Thoughts(Marker("<think>"), Marker("</think>"))
    for is_free in (False, content is None):
        text = tool_format.grammar(CallGrammar(FUNCTIONS, parallel, {}.get, content, is_free))
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text)) == ""
        behind = notation(GrammarSpec(GrammarKind.LARK, text, "tools", thoughts=thoughts))
        assert LLMatcher.validate_grammar(behind) == ""


TOKENS = LLTokenizer(byte_level_tokenizer().to_str())


def follows(text: str, grammar: str) -> bool:
    """Whether an answer follows a grammar."""
    matcher = LLMatcher(TOKENS, LLMatcher.grammar_from_lark(grammar))
    tokens = TOKENS.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"pattern": "^[a-z]+$"}, ["ab"], ["a1", "", "a\n"]),
        ({"pattern": "[0-9]", "minLength": 3}, ["ab1", "1\nb"], ["abc", "1"]),
        ({"maxLength": 10_000}, ["a" * 600], []),
        ({"pattern": "(?=a)b"}, ["anything"], []),
    ],
)
def test_plain_text_between_tags_keeps_the_limits_of_its_schema(
    schema: dict[str, object], texts: list[str], others: list[str]
) -> None:
    functions = {"f": {"type": "object", "properties": {"x": {"type": "string", **schema}}, "required": ["x"]}}
    grammar = TOOL_FORMATS["qwen3_coder"].grammar(CallGrammar(functions, True, {}.get))
    for text in (*texts, *others):
        call = TOOL_FORMATS["qwen3_coder"].write([Call("f", json.dumps({"x": text}))])
        assert follows(call, grammar) == (text in texts), text


def test_a_length_that_no_text_has_is_refused() -> None:
    schema = {"type": "string", "minLength": 3, "maxLength": 2}
    functions = {"f": {"type": "object", "properties": {"x": schema}}}
    with pytest.raises(ValueError, match="the argument 'x' has a minLength above its maxLength"):
        TOOL_FORMATS["qwen3_coder"].grammar(CallGrammar(functions, True, {}.get))


WEATHER = Call("get_weather", '{"city": "Oslo"}')
WRONG = Call("get_weather", '{"town": "Oslo"}')


@pytest.mark.slow
@each_format
def test_grammar_accepts_calls_of_the_format_and_only_valid_calls(tool_format: ToolFormat) -> None:
    write = tool_format.write
    several, one, free = (
        tool_format.grammar(CallGrammar(FUNCTIONS, parallel, {}.get, None, is_free))
        for parallel, is_free in ((True, False), (False, False), (True, True))
    )
    assert follows(write([WEATHER]), several)
    assert follows(write([WEATHER, Call("now", "{}")]), several)
    assert follows(write([WEATHER]), one)
    assert not follows(write([WEATHER, WEATHER]), one)
    assert not follows(write([WRONG]), several)
    assert not follows("It rains.", several)

    assert follows("It rains.", free)
    assert follows("", free)
    assert follows(write([WEATHER]), free)
    assert not follows(write([WRONG]), free)
    text = f"Let me see.\n{write([WEATHER])}"
    assert follows(text, free), "in a format whose calls stand alone it is text"
    assert follows(f"{text}\nThere.", free)
    assert follows(f"Let me see.\n{write([WRONG])}", free) == (tool_format.name not in BEHIND_TEXT)


def test_markers_that_are_special_tokens_are_tokens_in_a_grammar() -> None:
    mistral = TOOL_FORMATS["mistral"]
    assert "<[9]>" in mistral.grammar(CallGrammar(FUNCTIONS, True, {"[TOOL_CALLS]": 9}.get))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}<tool_call>\n<function=x>", "qwen3_coder"),
        ("{% if tools %}<tool_call>{{ tool_call | tojson }}</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("in the format of [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("{{ message.content }}", None),
    ],
)
def test_template_determines_the_format_of_tool_calls(source: str, name: str | None) -> None:
    found = format_of_template(source)
    assert (found.name if found else None) == name


@each_format
def test_instructions_name_the_tools_and_show_the_format(tool_format: ToolFormat) -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "the time"}}]
    text = instructions(tool_format, tools)
    assert json.dumps(tools[0]) in text
    assert "function_name" in text
