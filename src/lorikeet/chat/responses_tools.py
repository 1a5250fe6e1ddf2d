"""Defines the tools of the responses API, and turns them into functions of a chat and calls back into items.

Beside functions there are custom tools, whose input is text, and namespaces of both. A custom tool becomes a function
with one text. A function's name in the chat contains its namespace's.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import Field

from lorikeet.chat.json_text import read_arguments, with_whole_characters, write_json
from lorikeet.chat.protocol import Body

_INPUT = "input"
_INPUT_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LOW_HALF = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_INPUT_PIECE = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}' + _LOW_HALF + ")*"
)
"""Whole letters of a JSON string: escapes that may go on wait for their rest."""
_JOINT = "__"


class ResponsesTool(Body):
    """A tool. Functions, custom tools and namespaces of them are served; other types are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: "list[ResponsesTool] | None" = Field(default=None, max_length=1024)


class ServedTool(NamedTuple):
    """A tool that the model may call.

    Attributes:
        name: its name in calls.
        namespace: the namespace of its name; None without one.
        is_custom: whether its input is text instead of arguments.
        function: the function that describes it in the chat.
    """

    name: str
    namespace: str | None
    is_custom: bool
    function: dict[str, Any]

    def is_named(self, names: Iterable[Any]) -> bool:
        """Return whether its name, with or without its namespace, or its namespace is among ``names``."""
        return not {self.name, self.namespace, self.function["name"]}.isdisjoint(
            name for name in names if isinstance(name, str)
        )


def served_tools(tools: Iterable[ResponsesTool]) -> dict[str, ServedTool]:
    """Return the tools that the model may call, by their names in the chat."""
    found: dict[str, ServedTool] = {}
    for tool in tools:
        if tool.type == "namespace":
            description = tool.description
            for inner in tool.tools or ():
                if inner.type in ("function", "custom"):
                    served = _served(inner, tool.name, description)
                    found[served.function["name"]] = served
                    description = None  # The first function introduces the namespace.
        elif tool.type in ("function", "custom"):
            served = _served(tool, None, None)
            found[served.function["name"]] = served
    return found


def kinds_of_tools(tools: Iterable[ResponsesTool]) -> Iterator[tuple[str, bool]]:
    """Yield each tool's type, and whether it is served: a namespace if one of its tools is."""
    for tool in tools:
        yield tool.type, tool.type in ("function", "custom") or bool(served_tools([tool]))


def chat_name(name: Any, namespace: Any) -> Any:
    """Return a tool's name in the chat, which is one name for a namespace and a name in it."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    return namespace.rstrip("_") + _JOINT + name.lstrip("_")


def as_arguments(text: str) -> str:
    """Return the input of a custom tool as the arguments of its function."""
    return write_json({_INPUT: text})


class CustomInput:
    """Reads the input of a custom tool from the arguments of its function, as they are written."""

    def __init__(self) -> None:
        self._arguments = ""
        self._unread: str | None = None
        """Arguments behind the read part of the input; None before its begin."""
        self._is_whole = False

    def push(self, arguments: str) -> str:
        """Add JSON text of the arguments; return the text that it adds to the input."""
        if self._unread is None:
            self._arguments += arguments
            begin = _INPUT_BEGIN.match(self._arguments)
            if begin is None:
                return ""
            self._unread = ""
            arguments = self._arguments[begin.end() :]
        if self._is_whole:
            return ""
        text = self._unread + arguments
        match = _INPUT_PIECE.match(text)
        end = match.end() if match else 0
        self._is_whole = text.startswith('"', end)
        self._unread = text[end:]
        read: str = with_whole_characters(json.loads(f'"{text[:end]}"', strict=False))
        return read

    def finish(self) -> str:
        """Return the input, or its rest, at the end of the arguments.

        Arguments in another form are the input as they are; those of one text are that text.
        """
        if self._unread is not None:
            return ""
        values = read_arguments(self._arguments)
        value = values.get(_INPUT)
        if value is None and len(values) == 1:
            (value,) = values.values()
        if isinstance(value, str):
            return value
        return self._arguments if values else ""


def whole_input(arguments: str) -> str:
    """Return the input of a custom tool from the whole arguments of its function."""
    reader = CustomInput()
    return reader.push(arguments) + reader.finish()


def _served(tool: ResponsesTool, namespace: str | None, introduction: str | None) -> ServedTool:
    is_custom = tool.type == "custom"
    parts = [introduction, tool.description]
    if is_custom:
        parts += [_grammar_of(tool.format), _HOW_TO_GIVE]
    function = {
        "name": chat_name(tool.name, namespace),
        "description": "\n\n".join(part for part in parts if part) or None,
        "parameters": _CUSTOM_PARAMETERS if is_custom else tool.parameters,
    }
    described = {key: value for key, value in function.items() if key == "name" or value is not None}
    return ServedTool(tool.name or "", namespace, is_custom, described)


_HOW_TO_GIVE = f"Give the text of the tool as the argument {_INPUT}, which is plain text."
"""Descriptions of custom tools tell models not to write JSON, but a call of the model's format is around the text."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The whole text."}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def _grammar_of(form: Mapping[str, Any] | None) -> str | None:
    """Return the sentence that describes the form of a custom tool's input."""
    if not form or form.get("type") != "grammar":
        return None
    return f"The input follows this {form.get('syntax', 'lark')} grammar:\n{form.get('definition', '')}"
