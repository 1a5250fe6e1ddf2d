"""Answers of a model with broken tool calls."""

import random

from lorikeet.chat.tool_parsers.base import Call, ToolFormat

VALUES = (
    *('"a"', "1", "NaN", "-Infinity", "1e999", "null", "True", "[1, [2]]", '{"a": {"b": "}"}}', '"\\ud83e\\udd9c"'),
    *('"\\ud800"', '"\\udc00\\ud800x"', '"\\u12"', '"\\x"', '"a\nb\tc"', "9" * 5_000, "[" * 3_000, "(" * 300),
    *("-" * 3_000, '{"a": ' * 1_000, "f(", "x=", "[f(x=1)]", "g()", "é🦜", "\\", "\\u", '"', "'", "}", "]", "{"),
    *(",", ":", ";", "\n", " ", "[f(x='\\ud83e\\udd9c', o={'a': (1,)})]", "f(x=9" + "0" * 5_000 + ")"),
    *("g(a=b'x')", "g(**{})", "g(x={1, 2})"),
)

PLANTED = [f"w{at}w" for at in range(9)]
"""Words that must not be lost."""


def broken_answer(tool_format: ToolFormat, choose: random.Random) -> tuple[str, list[str]]:
    """Return an answer of calls and their parts in any order, and the words in it."""
    objects = [
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "g", "parameters": {}}',
        '{"arguments": {"x": "a"}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": ',
    ]
    tags = (
        "<function=f>",
        "</function>",
        "<parameter=x>",
        "<parameter=n>\n",
        "\n</parameter>",
        "<function=",
        "<think>",
    )
    markers = [*tool_format.markers, *tags, "</think>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "[ARGS]"]
    made = tool_format.write([Call("f", '{"x": 1, "o": {"a": "b"}}'), Call("g", "{}")][: choose.randint(1, 2)])
    parts: list[str] = []
    for _ in range(choose.randint(1, 8)):
        parts.append(
            choose.choice(choose.choice([[made], objects, markers, VALUES, [made[: choose.randrange(len(made))]]]))
        )
    words = choose.sample(PLANTED, choose.randint(0, 3))
    for word in words:
        parts.insert(choose.randint(0, len(parts)), f" {word} ")
    text = "".join(parts)
    return text, words
