"""Turns the messages and tools of a body into the input of a chat template."""

import json
from collections.abc import Sequence
from typing import Any

from lorikeet.chat.json_text import read_arguments
from lorikeet.chat.protocol import ChatMessage, ToolCall
from lorikeet.chat.tool_parsers import instructions
from lorikeet.chat.tool_parsers.base import Call, ToolFormat
from lorikeet.core.chat_template import text_of
from lorikeet.http.errors import bad_request

_RESPONSE = "<tool_response>\n{}\n</tool_response>"
_SYSTEM = ("system", "developer")

Plain = dict[str, Any]
"""Message in the form that a template takes."""


def plain_message(message: ChatMessage, index: int) -> Plain:
    """Return a message for the template, with its content as text or as parts of the type ``text``.

    Null fields, which clients return with earlier answers, are dropped, since templates test whether a field is
    defined. Arguments of calls become objects, which templates expect, even if the model's text is not valid JSON.

    Args:
        message: the message of a body.
        index: position of the message, for errors.

    Raises:
        ApiError: 400, a part has other content than text, or lacks its text.
    """
    plain = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    plain["role"] = message.role
    if isinstance(message.content, list):
        for part in message.content:
            if part.type not in ("text", "input_text"):
                raise bad_request(
                    f"messages.{index}: only text is supported, not content of type {part.type[:100]!r}.", "messages"
                )
            if part.text is None:
                raise bad_request(f"messages.{index}: a text part lacks its text.", "messages")
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    else:
        plain["content"] = message.content or ""
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if isinstance(plain.get("reasoning"), str):
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain


def content_text(message: ChatMessage) -> str:
    """Return a message's content as one string."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def with_system_prompt(messages: Sequence[Plain], text: str) -> list[Plain]:
    """Return the messages with ``text`` as the system prompt unless they have their own."""
    if not text or (messages and messages[0]["role"] in _SYSTEM):
        return [*messages]
    return [{"role": "system", "content": text}, *messages]


def with_instructions(messages: Sequence[Plain], tools: Sequence[Plain], tool_format: ToolFormat) -> list[Plain]:
    """Return the messages with a system prompt that explains the tools, for a template without tools."""
    text = instructions(tool_format, tools)
    if messages and messages[0]["role"] in _SYSTEM:
        first, *others = messages
        return [{**first, "content": f"{text_of(first['content'])}\n\n{text}".strip()}, *others]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[Plain], tool_format: ToolFormat) -> list[Plain]:
    """Return the messages with calls as text of their content, and results as messages of the user.

    Templates without calls need this form; Hermes and Qwen 2.5 also write results in it.
    """
    written: list[Plain] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(_RESPONSE.format(text_of(message["content"])))
            if len(results) > 1:
                written.pop()
            written.append({"role": "user", "content": "\n".join(results)})
            continue
        results = []
        plain = {**message}
        if calls := plain.pop("tool_calls", None):
            functions = [call["function"] for call in calls]
            text = tool_format.write([Call(each["name"], _json(each["arguments"])) for each in functions])
            plain["content"] = "\n".join(filter(None, (text_of(plain["content"]), text)))
        written.append(plain)
    return written


def _plain_call(call: ToolCall) -> Plain:
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    function = {**(call.function.model_extra or {}), "name": call.function.name, "arguments": arguments}
    given = {"id": call.id, "type": "function", "function": function}
    return {name: value for name, value in given.items() if value is not None}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
