"""Turns the messages and tools of a body into the input of a chat template."""

import json
from collections.abc import Sequence
from typing import Any

from lorikeet.chat.image_parts import IMAGE_PARTS, where_of
from lorikeet.chat.json_text import read_arguments
from lorikeet.chat.protocol import ChatMessage, ContentPart, ToolCall
from lorikeet.chat.tool_parsers import instructions
from lorikeet.chat.tool_parsers.base import Call, ToolFormat
from lorikeet.core.chat_template import text_of
from lorikeet.http.errors import ApiError, bad_request

_RESPONSE = "<tool_response>\n{}\n</tool_response>"
_SYSTEM = ("system", "developer")

Plain = dict[str, Any]
"""Message in the form that a template takes."""


def plain_message(message: ChatMessage, index: int, *, takes_images: bool = False) -> Plain:
    """Return a message for the template, with its content as text or as parts of the types ``text`` and ``image``.

    Null fields, which clients return with earlier answers, are dropped, since templates test whether a field is
    defined. Arguments of calls become objects, which templates expect, even if the model's text is not valid JSON.

    Args:
        message: the message of a body.
        index: position of the message, for errors.
        takes_images: whether the model takes images.

    Raises:
        ApiError: 400, a part has content that the model does not take, or lacks its text.
    """
    plain = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    plain["role"] = message.role
    if isinstance(message.content, list):
        plain["content"] = [_plain_part(part, index, takes_images) for part in message.content]
    else:
        plain["content"] = message.content or ""
    if message.images:
        if not takes_images:
            raise _refused("images", index, takes_images)
        text = plain["content"]
        parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
        plain["content"] = [*({"type": "image"} for _ in message.images), *parts]
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if isinstance(plain.get("reasoning"), str):
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain


def _plain_part(part: ContentPart, index: int, takes_images: bool) -> Plain:
    if takes_images and part.type in IMAGE_PARTS:
        return {"type": "image"}
    if part.type not in ("text", "input_text"):
        raise _refused(part.type, index, takes_images, where_of(part))
    if part.text is None:
        raise bad_request(f"messages.{index}: a text part lacks its text.", "messages")
    return {"type": "text", "text": part.text}


def _refused(kind: str, index: int, takes_images: bool, where: str | None = None) -> ApiError:
    supported = "text and images are" if takes_images else "text is"
    place = where or f"messages.{index}"
    return bad_request(f"{place}: only {supported} supported, not content of type {kind[:100]!r}.", "messages")


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
