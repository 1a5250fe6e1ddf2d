"""Tools of the responses API as functions, and their calls as items."""

import json
import random

import pytest

from lorikeet.chat.responses_tools import CustomInput, as_arguments, chat_name, whole_input

TEXT = 'a "b" \\ \n\t é 🦜 \\u00e9 \\n \x01 </parameter>'


@pytest.mark.parametrize("escapes", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_input_arrives_unchanged_wherever_it_is_cut(escapes: bool, seed: int) -> None:
    choose = random.Random(seed)
    arguments = json.dumps({"input": TEXT}, ensure_ascii=escapes) if seed else as_arguments(TEXT)
    at = sorted(choose.sample(range(len(arguments)), choose.randint(0, len(arguments) // 2)))
    reader = CustomInput()
    found = ""
    for begin, end in zip([0, *at], [*at, len(arguments)], strict=True):
        found += reader.push(arguments[begin:end])
        assert TEXT.startswith(found)
    assert found + reader.finish() == TEXT == whole_input(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": ""}', ""),
        ("{}", ""),
        ("", ""),
        ('{"patch": "x"}', "x"),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": "a\\\\', "a"),
        ('{"input": "a\\\\u00', "a"),
        ('{"input": "a\\\\ud83e', "a"),
        ('{"inp', ""),
        ('{"input": "x", "other": 1}', "x"),
    ],
)
def test_arguments_in_another_form_or_cut_off_are_not_lost(arguments: str, text: str) -> None:
    assert whole_input(arguments.replace("\\\\", "\\")) == text


def test_a_namespace_is_part_of_the_name_in_a_chat() -> None:
    assert chat_name("now", "agents") == "agents__now"
    assert chat_name("_now", "mcp__git__") == "mcp__git__now"
    assert chat_name("now", None) == chat_name("now", "") == "now"
