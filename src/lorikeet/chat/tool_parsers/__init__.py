"""Formats in which models write tool calls, one file each.

The model's chat template determines the format, unless ``--tool-call-parser`` names another. A template without tools
gets ``hermes``, and a system prompt that explains it.
"""

import json
from collections.abc import Sequence
from typing import Any

from lorikeet.chat.tool_parsers import granite, hermes, llama3_json, mistral, pythonic, qwen3_coder
from lorikeet.chat.tool_parsers.base import Call, ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    each.FORMAT.name: each.FORMAT for each in (qwen3_coder, mistral, granite, hermes, pythonic, llama3_json)
}
"""Formats by name. A chat template has the first format whose hint it contains."""


def format_of_template(source: str) -> ToolFormat | None:
    """Return the format that a chat template with tools explains; None if it is unknown."""
    found = (each for each in TOOL_FORMATS.values() if any(hint in source for hint in each.hints))
    return next(found, None)


def instructions(tool_format: ToolFormat, tools: Sequence[dict[str, Any]]) -> str:
    """Return a system prompt that explains tools and the format of calls, for templates without tools."""
    example = tool_format.write([Call("function_name", '{"argument_name": "value"}')])
    lines = [
        "You can call functions. Each line between <tools> and </tools> describes one:",
        "<tools>",
        *(json.dumps(tool, ensure_ascii=False) for tool in tools),
        "</tools>",
        "To call a function, answer in this form:",
        example,
    ]
    return "\n".join(lines)
